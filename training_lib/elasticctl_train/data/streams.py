"""Iterable datasets: samples that come one after the other, with no numbers to give out.

Every rank, and every DataLoader worker of it, reads the whole stream and keeps its own part of each global batch: of
the i-th sample of a batch, rank i modulo the world size. So the position is a number of samples here too, the same on
every rank; it means the same at any world size, and nobody needs to know the end beforehand. It takes a stream that
comes in the same order wherever it is read.
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
from elasticctl_train.data.plan import Feed


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What is left of one epoch of a stream, from `position` on; `mark` is its own state there, if it has one."""

    global_batch: int
    epoch: int = 0
    position: int = 0
    drop_last: bool = False
    mark: Any = None


class StreamLoader:
    """What is left of an epoch of a stream, from where training is when a pass begins; tells `feed` of each batch."""

    def __init__(
        self, make: Callable[[StreamPlan], DataLoader[Any]], plan: StreamPlan, feed: Feed, begin: Begin
    ) -> None:
        """`make` makes torch's loader of a plan; `begin` is called as a pass begins, and leaves its mark in `feed`."""
        self._make, self._plan, self._feed, self._begin = make, plan, feed, begin
        make(plan)  # whether it can be made is seen at once

    def __iter__(self) -> Iterator[Any]:
        cursor = self._begin()
        plan = replace(self._plan, epoch=cursor.epoch, position=cursor.position, mark=self._feed.mark)
        for total, samples, mark in self._feed.watch_fetches(lambda: self._make(plan)):
            self._feed.hand_over(range(total))
            self._feed.mark = mark
            yield samples


def is_stream(dataset: object) -> bool:
    """True for a dataset that can be read from its beginning on, but not by number."""
    return isinstance(dataset, IterableDataset) or (
        hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")
    )


def has_state(dataset: object) -> bool:
    """True for a stream that can save its position and resume there."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def make_loader(dataset: Any, plan: StreamPlan, feed: Feed, begin: Begin, options: Mapping[str, Any]) -> StreamLoader:
    """A loader over what is left of the epoch. `options` go to torch's DataLoader. Raises DataError.

    A dataset with `set_epoch` gets the epoch, by which it may shuffle.
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

    Of n workers each makes every n-th global batch. DataLoader takes turns with them, so all come in order.
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
        """The stream behind what is trained on already."""
        plan = self._plan
        if plan.mark is not None:
            self._dataset.load_state_dict(plan.mark)
        stream: Iterator[Any] = iter(self._dataset)
        if plan.mark is not None:
            return stream
        skipped = sum(1 for _ in islice(stream, plan.position))
        if skipped < plan.position:
            name = type(self._dataset).__name__
            raise DataError(f"{name} ended at sample {skipped}, and {plan.position} were trained on: is it other data?")
        return stream

    def _mark(self, total: int) -> Any:
        """The stream's state behind a batch of `total` samples; None behind one that hit the end, where it may tell of
        the next beginning already.
        """
        if not has_state(self._dataset) or total < self._plan.global_batch:
            return None
        return copy.deepcopy(self._dataset.state_dict())

    def _next_batch(self, stream: Iterator[Any]) -> tuple[int, list[Any]]:
        """How many samples the next global batch has, and this rank's; a stand-in where it has none of its own."""
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
