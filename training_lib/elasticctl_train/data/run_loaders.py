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


class HasPlan(Protocol):
    """Whose work depends on the order of the epoch; None is a stream's."""

    plan: EpochPlan | None


class Place(Protocol):
    """Where training is."""

    cursor: Cursor

    @property
    def progress(self) -> HasPlan:
        """What is told the order of the epoch."""


class RunLoaders:
    """Loaders that report their batches to `feed`, begin at `place`, and say there in which order the epoch goes on.

    `mark` is the state of a stream behind the last step; `feed` has that behind the last batch. `rng` is the state of
    the random number generators for the first batch, if training has resumed.
    """

    def __init__(self, feed: Feed, place: Place) -> None:
        self._feed, self._place = feed, place
        self._begun: tuple[Any, Any] | None = None  # a stream, and its state as this epoch began
        self.mark: Any = None
        self.rng: dict[str, Any] | None = None

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
        cursor = self._place.cursor
        plan = EpochPlan(loaders.length_of(dataset), global_batch, shuffle, seed, cursor.epoch, drop_last)
        self._go_on_with(plan)
        return loaders.make_loader(dataset, plan, self._feed, cursor.position, partial(self._begin, plan), options)

    def over_stream(self, dataset: Any, global_batch: int, drop_last: bool, options: Mapping[str, Any]) -> StreamLoader:
        """Return a loader of the rest of the epoch of a dataset that cannot be indexed; see `Run.loader`."""
        self._go_on_with(None)
        if streams.has_state(dataset):
            parts.check({"dataset": dataset})
        plan = StreamPlan(global_batch, self._place.cursor.epoch, drop_last=drop_last)
        return streams.make_loader(dataset, plan, self._feed, partial(self._begin, None, dataset), options)

    def end_step(self) -> None:
        """Record that the batches so far have been trained on."""
        self.mark = self._feed.mark

    def put_mark(self, mark: Any) -> None:
        """Continue a stream from this state of its own (None: from where training is)."""
        self._feed.mark = self.mark = mark

    def end_epoch(self) -> None:
        """Begin the next epoch anew."""
        self.put_mark(None)
        self._begun = None
        self._feed.repeated = 0

    def _go_on_with(self, plan: EpochPlan | None) -> None:
        """The epoch continues in this order (None: a stream's). Raises DataError where it was begun in another."""
        cursor = self._place.cursor
        if plan is None:
            sample_order.check_same(cursor, None, False, 0)
            self._place.cursor = replace(cursor, length=None, shuffle=False, seed=0)
        else:
            sample_order.check(plan, cursor)
            self._place.cursor = replace(cursor, length=plan.length, shuffle=plan.shuffle, seed=plan.seed)
        self._place.progress.plan = plan

    def _begin(self, plan: EpochPlan | None, stream: Any = None) -> Cursor:
        """The first batch of a pass is about to be fetched, with a plan or of a stream; returns where training is.

        What was handed over and not trained on comes again. Random numbers that set-up code has drawn since the resume
        are forgotten.
        """
        self._feed.take()
        self._feed.mark = self.mark
        self._go_on_with(plan)
        if self._place.cursor.position == 0 and streams.has_state(stream):
            self._feed.mark = self._beginning_of(stream)
        if self.rng is not None:
            rng.restore(self.rng)
            self.rng = None
        return self._place.cursor

    def _beginning_of(self, stream: Any) -> Any:
        """What to put a stream back to for one more pass from the beginning of the epoch; None for the first pass."""
        if self._begun is not None and self._begun[0] is stream:
            return self._begun[1]
        self._begun = stream, copy.deepcopy(stream.state_dict())
        return None
