"""Makes the loaders of a run: each of their passes begins where training is."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch.utils.data import Dataset

from elasticctl_train import rng
from elasticctl_train.checkpoint import parts
from elasticctl_train.data import loaders, sample_order, streams
from elasticctl_train.data.loaders import ElasticLoader
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed
from elasticctl_train.data.streams import StreamLoader, StreamPlan


class TrainingPlace(Protocol):
    """Where training is."""

    @property
    def cursor(self) -> Cursor:
        """How far training is."""

    def continue_in(self, cursor: Cursor, plan: EpochPlan | None) -> None:
        """Record that the epoch continues from `cursor`, in the order of `plan` (None: a stream's)."""


class RunLoaders:
    """Loaders that report their batches to `feed`, begin at `place`, and say there in which order the epoch continues.

    `plan` is that order, if it is no stream's. `mark` is the state of a stream after the last step; `feed` has that
    after the last batch.
    """

    def __init__(self, feed: Feed, place: TrainingPlace) -> None:
        self._feed, self._place = feed, place
        self._stream_at_begin: tuple[Any, Any] | None = None  # a stream, and its state as this epoch began
        self._rng: dict[str, Any] | None = None
        self.plan: EpochPlan | None = None
        self.mark: Any = None

    def over_samples(
        self,
        dataset: Dataset[Any],
        global_batch: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        options: Mapping[str, Any],
    ) -> ElasticLoader:
        """Return a loader of the rest of the epoch of a dataset that can be indexed; see `Run.loader`."""
        epoch = self._place.cursor.epoch
        plan = EpochPlan(loaders.length_of(dataset), global_batch, shuffle, seed, epoch, drop_last)
        self._continue_in(plan)
        begin = partial(self._begin_pass, plan)
        return loaders.make_loader(dataset, plan, self._feed, lambda: self._place.cursor, begin, options)

    def over_stream(self, dataset: Any, global_batch: int, drop_last: bool, options: Mapping[str, Any]) -> StreamLoader:
        """Return a loader of the rest of the epoch of a dataset that cannot be indexed; see `Run.loader`."""
        self._continue_in(None)
        if streams.has_state(dataset):
            parts.check({"dataset": dataset})
        plan = StreamPlan(global_batch, self._place.cursor.epoch, drop_last=drop_last)
        return streams.make_loader(dataset, plan, self._feed, partial(self._begin_pass, None, dataset), options)

    def restore_rng(self, state: dict[str, Any]) -> None:
        """Restore the random number generators, now and before the first batch: set-up code may draw from them."""
        self._rng = state
        rng.restore(state)

    def end_step(self) -> None:
        """Record that the batches so far have been trained on."""
        self.mark = self._feed.mark

    def put_mark(self, mark: Any) -> None:
        """Continue a stream from this state of its own (None: from where training is)."""
        self.mark = mark
        self._feed.restart_at(mark)

    def end_epoch(self) -> None:
        """Record that all of an epoch has been trained on."""
        self.put_mark(None)
        self._stream_at_begin = None
        self._feed.end_epoch()

    def _continue_in(self, plan: EpochPlan | None) -> None:
        """The epoch continues in this order (None: a stream's). Raises DataError where it was begun in another."""
        cursor = self._place.cursor
        if plan is None:
            sample_order.check_same(cursor, None, False, 0)
            cursor = replace(cursor, length=None, shuffle=False, seed=0)
        else:
            sample_order.check(plan, cursor)
            cursor = replace(cursor, length=plan.length, shuffle=plan.shuffle, seed=plan.seed)
        self.plan = plan
        self._place.continue_in(cursor, plan)

    def _begin_pass(self, plan: EpochPlan | None, stream: Any = None) -> Cursor:
        """The first batch of a pass is about to be fetched, with a plan or of a stream; returns where training is."""
        self._continue_in(plan)
        cursor = self._place.cursor
        is_again = cursor.position == 0 and streams.has_state(stream)
        self._feed.restart_at(self._beginning_of(stream) if is_again else self.mark)
        if self._rng is not None:
            rng.restore(self._rng)
            self._rng = None
        return cursor

    def _beginning_of(self, stream: Any) -> Any:
        """The state of a stream for one more pass from the beginning of the epoch; None for the first pass."""
        if self._stream_at_begin is not None and self._stream_at_begin[0] is stream:
            return self._stream_at_begin[1]
        self._stream_at_begin = stream, copy.deepcopy(stream.state_dict())
        return None
