"""Where training is in the data, and who gets which samples.

The position is a number of samples of the epoch, the same on every rank, so it means the same at any world size. An
epoch's order depends on the seed and the epoch alone. It is cut into global batches of a fixed size (the last may be
smaller); each global batch is cut into one slice per rank, whose sizes differ by at most one. Whatever the world size
was along the way, every sample of an epoch is trained on exactly once.

Slices of different sizes make the mean over ranks, which DistributedDataParallel takes, differ from the mean over the
global batch. Rank r's gradient therefore has to count n_r x world size / n: `Feed.weight`, applied by `Run.scale_loss`.
Requiring divisibility instead would forbid most world sizes. Where a last batch has fewer samples than there are
ranks, the ranks without one run a sample of that batch with weight 0, because every rank has to take part in the
gradients' all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from elasticctl_store.errors import DataError
from elasticctl_train import rng

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """One epoch's order and its cut into global batches; the same on every rank."""

    length: int
    global_batch: int
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    drop_last: bool = False

    @property
    def end(self) -> int:
        """How many samples of the epoch are used: all, unless the smaller last batch is dropped."""
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def count(self, position: int) -> int:
        """How many global batches there are from `position` on."""
        return len(range(position, self.end, self.global_batch))

    def batches(self, position: int) -> Iterator[range]:
        """The global batches from `position` on, as ranges of positions."""
        for start in range(position, self.end, self.global_batch):
            yield range(start, min(start + self.global_batch, self.end))

    def order(self) -> torch.Tensor | range:
        """Which sample is at which position."""
        if not self.shuffle:
            return range(self.length)
        generator = torch.Generator().manual_seed(rng.mix(self.seed, self.epoch))
        return torch.randperm(self.length, generator=generator)


def slice_of(batch: range, rank: int, world_size: int) -> range:
    """The rank's share of a global batch; sizes differ by at most one, and it may be empty."""
    base, extra = divmod(len(batch), world_size)
    start = batch.start + rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far training is: `position` samples of `epoch` are trained on, out of `length` in the order of `seed`.

    `length` is None for a stream, whose end is not known beforehand.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    length: int | None = 0
    shuffle: bool = False
    seed: int = 0

    @property
    def samples(self) -> int | None:
        """How many samples are trained on in all epochs, with those that their ends drop; None where nobody tells."""
        if self.length:
            return self.epoch * self.length + self.position
        return self.position if self.position and not self.epoch else None

    def next_step(self, samples: int) -> Cursor:
        """Behind one more step, over so many samples."""
        return Cursor(self.step + 1, self.epoch, self.position + samples, self.length, self.shuffle, self.seed)

    def next_epoch(self) -> Cursor:
        """The start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)


@dataclass(slots=True)
class Feed:
    """Counts what the loader handed to the training loop; DataLoader workers' prefetch is not in it.

    `pending` samples were handed over since the last step; `own` of the newest global batch of `total` are this rank's.
    `mark` is the state of a stream behind that batch, where it has one to tell. `moves` counts those to another group.
    `batches` were handed over since the last step, `usual_batches` make most steps.
    `on_fetched(took_s)` is called once a batch has been fetched.
    """

    rank: int = 0
    world_size: int = 1
    pending: int = 0
    own: int = 0
    total: int = 0
    mark: Any = None
    moves: int = 0
    batches: int = 0
    usual_batches: int = 0
    on_fetch: Callable[[bool], None] | None = None
    on_fetched: Callable[[float], None] | None = None

    def watch_fetches(self, batches: Callable[[], Iterable[T]]) -> Iterator[T]:
        """`batches()`, with `on_fetch(is_first)` called before the first one of each step is fetched, or the pass ends.

        `is_first`: of the pass. That its workers are started is part of fetching the first.
        """
        began_s = time.monotonic()
        fetched = iter(batches())
        took_s = time.monotonic() - began_s
        is_first = True
        while True:
            if self.on_fetch is not None and not self.pending:
                self.on_fetch(is_first)
            is_first = False
            began_s = time.monotonic()
            try:
                batch = next(fetched)
            except StopIteration:
                return
            if self.on_fetched is not None:
                self.on_fetched(took_s + time.monotonic() - began_s)
            took_s = 0.0
            yield batch

    def move(self, rank: int, world_size: int) -> None:
        """This process is another rank from now on, and begins again with what follows the last step."""
        self.rank, self.world_size = rank, world_size
        self.moves += 1

    def hand_over(self, batch: range) -> None:
        """Note that this rank's slice of a global batch goes to the training loop now."""
        self.pending += len(batch)
        self.batches += 1
        self.own, self.total = len(slice_of(batch, self.rank, self.world_size)), len(batch)

    def take(self) -> int:
        """The samples handed over since the last call."""
        pending, self.pending, self.batches = self.pending, 0, 0
        return pending

    def take_step(self) -> tuple[int, bool]:
        """As `take`, for a step; and is it made of several batches, but not of as many as others?"""
        batches, usual = self.batches, self.usual_batches
        self.usual_batches = max(batches, usual)
        return self.take(), batches > 1 and batches != usual

    @property
    def weight(self) -> float:
        """What this rank's mean loss must be multiplied by so that the mean over ranks is that of the global batch."""
        return self.own * self.world_size / self.total if self.total else 1.0


def check(plan: EpochPlan, cursor: Cursor) -> None:
    """Raise DataError for a plan that cannot be, or that would repeat or miss samples of a begun epoch."""
    if plan.global_batch < 1 or plan.end < 1:
        raise DataError(f"global_batch={plan.global_batch} makes no batch out of {plan.length} samples")
    check_same(cursor, plan.length, plan.shuffle, plan.seed)


def check_same(cursor: Cursor, length: int | None, shuffle: bool, seed: int) -> None:
    """Raise DataError when a started epoch would continue with other data: `length` samples (None: a stream)."""
    if cursor.position == 0:
        return
    begun = {"samples": _count(cursor.length), "shuffle": cursor.shuffle, "seed": cursor.seed}
    now = {"samples": _count(length), "shuffle": shuffle, "seed": seed}
    for name, value in begun.items():
        if now[name] != value:
            raise DataError(
                f"epoch {cursor.epoch} was begun with {name}={value} and cannot be continued with {name}={now[name]}: "
                f"restore it, or start afresh under another storage URL"
            )


def _count(length: int | None) -> str:
    return "unknown" if length is None else str(length)
