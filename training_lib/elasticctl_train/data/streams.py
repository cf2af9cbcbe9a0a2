"""Iterable datasets, whose samples come one after the other and cannot be indexed.

Every rank, and each of its DataLoader workers, reads the whole stream and keeps its own part of each global batch: the
i-th sample of a batch belongs to rank i modulo the world size. So the position is a number of samples here, too, the
same on every rank and valid at any world size, and the end need not be known in advance. The stream must have the same
order wherever it is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from elasticctl_store.errors import DataError
from elasticctl_train.data.loaders import Begin, check_options, worker_options
from elasticctl_train.data.sample_order import Feed


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """The rest of one epoch of a stream, from `position` on; `mark` is the stream's own state there, if it has one."""

    global_batch: int
    epoch: int = 0
    position: int = 0
    drop_last: bool = False
    mark: Any = None


class StreamLoader:
    """The rest of an epoch of a stream, from where training is when a pass begins; reports each batch to `feed`."""

    def __init__(
        self, make: Callable[[StreamPlan], DataLoader[Any]], plan: StreamPlan, feed: Feed, begin: Begin
    ) -> None:
        """`make` creates torch's loader for a plan; `begin` is called when a pass begins, and leaves its mark in
        `feed`."""
        self._make, self._plan, self._feed, self._begin = make, plan, feed, begin
        make(plan)  # raise errors now

    def __iter__(self) -> Iterator[Any]:
        cursor = self._begin()
        plan = replace(self._plan, epoch=cursor.epoch, position=cursor.position, mark=self._feed.mark)
        for total, samples, mark in self._feed.watch_fetches(lambda: self._make(plan)):
            self._feed.hand_over(range(total), mark)
            yield samples


def is_stream(dataset: object) -> bool:
    """Return whether a dataset can be read from its beginning, but not indexed."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def has_state(dataset: object) -> bool:
    """Return whether a stream can save its position and resume there."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def make_loader(dataset: Any, plan: StreamPlan, feed: Feed, begin: Begin, options: Mapping[str, Any]) -> StreamLoader:
    """Return a loader over the rest of the epoch. `options` are passed to torch's DataLoader. Raises DataError.

    If the dataset has `set_epoch`, it is called with the epoch, which the dataset may use to shuffle.
    """
    if plan.global_batch < 1:
        raise DataError(f"global_batch={plan.global_batch} makes no batch")
    check_options(options)
    collate = options.get("collate_fn") or default_collate

    def make(plan: StreamPlan) -> DataLoader[Any]:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(plan.epoch)
        chosen = worker_options({**options, "collate_fn": _as_it_is}, plan.epoch, plan.position, feed.rank)
        share = _Share(dataset, plan, feed.rank, feed.world_size, collate)
        return DataLoader(share, batch_size=None, **chosen)

    return StreamLoader(make, plan, feed, begin)


class _Share(IterableDataset[Any]):
    """This rank's part of each global batch, as (size of the global batch, collated samples, the stream's state).

    Each of n workers makes every n-th global batch. DataLoader reads from them in turn, so the order is kept.
    """

    def __init__(
        self, dataset: Any, plan: StreamPlan, rank: int, world_size: int, collate: Callable[[list[Any]], Any]
    ) -> None:
        self._dataset, self._plan, self._collate = dataset, plan, collate
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[tuple[int, Any, Any]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        stream, number = self._start(), 0
        while True:
            total, own = self._next_batch(stream)
            if total == 0 or (self._plan.drop_last and total < self._plan.global_batch):
                return
            if number % workers == worker:
                yield total, self._collate(own), self._mark(total)
            number += 1

    def _start(self) -> Iterator[Any]:
        """Return the stream after the samples that have been trained on."""
        plan = self._plan
        if plan.mark is not None:
            self._dataset.load_state_dict(plan.mark)
        stream: Iterator[Any] = iter(self._dataset)
        if plan.mark is not None:
            return stream
        skipped = sum(1 for _ in islice(stream, plan.position))
        if skipped < plan.position:
            name = type(self._dataset).__name__
            raise DataError(
                f"{name} ended at sample {skipped}, but {plan.position} have been trained on: has the data changed?"
            )
        return stream

    def _mark(self, total: int) -> Any:
        """Return the stream's state after a batch of `total` samples.

        Return None after a batch that reached the end, where the state may already be that of the next epoch.
        """
        if not has_state(self._dataset) or total < self._plan.global_batch:
            return None
        return copy.deepcopy(self._dataset.state_dict())

    def _next_batch(self, stream: Iterator[Any]) -> tuple[int, list[Any]]:
        """Return the size of the next global batch, and this rank's samples; a stand-in if it has none of its own."""
        own: list[Any] = []
        stand_in: list[Any] = []
        total = 0
        for sample in islice(stream, self._plan.global_batch):
            if total % self._world_size == self._rank:
                own.append(sample)
            elif not stand_in:
                stand_in.append(sample)
            total += 1
        return total, own or stand_in


def _as_it_is(batch: Any) -> Any:
    return batch
