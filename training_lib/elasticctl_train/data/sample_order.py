"""The position of training in the data, and which rank gets which samples.

The position is a number of samples of the epoch, the same on every rank, so it is valid at any world size. The order of
an epoch depends only on the seed and the epoch. It is cut into global batches of a fixed size (the last may be
smaller); each global batch is cut into one slice per rank, and their sizes differ by at most one. However the world
size changes along the way, every sample of an epoch is trained on exactly once.

With slices of different sizes, the mean over ranks, which DistributedDataParallel computes, differs from the mean over
the global batch. Rank r's gradient therefore has to be weighted by n_r x world size / n: this is `Feed.weight`, which
`Run.scale_loss` applies. Requiring divisibility instead would rule out most world sizes. If the last batch has fewer
samples than there are ranks, the ranks without a sample run one of that batch with weight 0, because every rank has to
take part in the all-reduce of gradients.
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

_NOTHING_LEFT = (
    "all samples of this epoch have been trained on, and run.loader yields what is left of an epoch: there would be no "
    "more steps. FIX: put the loop over run.loader, once, into `for epoch in run.epochs(…)`, which continues with the "
    "next epoch; evaluate with a DataLoader of your own"
)


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The order of one epoch and its cut into global batches; the same on every rank."""

    length: int
    global_batch: int
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    drop_last: bool = False

    @property
    def end(self) -> int:
        """The number of samples of the epoch that are used: all, unless the smaller last batch is dropped."""
        return self.length - self.length % self.global_batch if self.drop_last else self.length

    def count(self, position: int) -> int:
        """Return the number of global batches from `position` on."""
        return len(range(position, self.end, self.global_batch))

    def batches(self, position: int) -> Iterator[range]:
        """Yield the global batches from `position` on, as ranges of positions."""
        for start in range(position, self.end, self.global_batch):
            yield range(start, min(start + self.global_batch, self.end))

    def order(self) -> torch.Tensor | range:
        """Return the index of the sample at each position."""
        if not self.shuffle:
            return range(self.length)
        generator = torch.Generator().manual_seed(rng.mix(self.seed, self.epoch))
        return torch.randperm(self.length, generator=generator)


def slice_of(batch: range, rank: int, world_size: int) -> range:
    """Return the rank's slice of a global batch; sizes differ by at most one, and it may be empty."""
    base, extra = divmod(len(batch), world_size)
    start = batch.start + rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far training is: `position` samples of `epoch` have been trained on, out of `length`, in the order of `seed`.

    `length` is None for a stream, whose end is not known in advance.
    """

    step: int = 0
    epoch: int = 0
    position: int = 0
    length: int | None = 0
    shuffle: bool = False
    seed: int = 0

    @property
    def samples(self) -> int | None:
        """The number of samples trained on in all epochs, including those that `drop_last` drops; None if unknown."""
        if self.length:
            return self.epoch * self.length + self.position
        return self.position if self.position and not self.epoch else None

    def next_step(self, samples: int, calls: int = 1) -> Cursor:
        """Return the cursor after a step over this many samples, which the script has counted as `calls` steps."""
        return Cursor(self.step + calls, self.epoch, self.position + samples, self.length, self.shuffle, self.seed)

    def next_epoch(self) -> Cursor:
        """Return the start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the script, as it passes from the loader through the strategy to the session.

    It was taken from the loader: `samples` of all ranks, in `batches` global batches. The script has called `Run.step`
    for it `calls` times, the last time with `loss`. `cursor` is where training is after it.

    If a peer is lost before the optimizers have made it, it does not count, and its batches are repeated. `torn`: it
    cannot be repeated in this process then, because it has fewer batches than others: a script that counts batches
    would make the next step too early.
    """

    samples: int
    batches: int = 1
    calls: int = 1
    loss: torch.Tensor | float | None = None
    cursor: Cursor = Cursor()
    torn: bool = False


class Feed:
    """Counts what the loader has passed to the training loop, without what DataLoader workers have prefetched.

    `pending` samples in `batches` were passed since the last step; `own` samples of the newest global batch belong to
    this rank. `mark` is the state of a stream after that batch, if it has one. `moves` counts moves to another group,
    `begun` the times that the script has begun an epoch, or its rest. `is_done`: a pass has ended in this epoch.
    `repeated` batches of this epoch were repeated because their steps were lost, on the ranks that were in the group
    then. `fetches_ahead`: the script takes each batch from the loader before it has trained on the one before.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        *,
        before_step: Callable[[bool], None] = lambda is_first: None,
        after_fetch: Callable[[float], None] = lambda took_s: None,
    ) -> None:
        """`before_step(is_first)` is called before the first batch of a step is fetched, and before a pass ends;
        `is_first`: it is the first batch of the pass. `after_fetch(took_s)` is called after each batch."""
        self.rank, self.world_size = rank, world_size
        self.pending = self.batches = self.own = self.moves = self.begun = self.repeated = 0
        self.mark: Any = None
        self.is_done = self.fetches_ahead = False
        self._before_step, self._after_fetch = before_step, after_fetch
        self.total = self._usual_batches = 0
        self._first_steps: list[int] = []

    @property
    def weight(self) -> float:
        """The factor for this rank's mean loss by which the mean over ranks becomes that of the global batch."""
        return self.own * self.world_size / self.total if self.total else 1.0

    @property
    def feeds_script(self) -> bool:
        """True if the script trains on batches of a loader, as far as is known before its first step."""
        return self.pending > 0 or self._usual_batches > 0

    def watch_fetches(self, batches: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Yield from `batches()`, which may start workers.

        Raises DataError for a pass over an epoch of which a former pass has left nothing: the script would not train
        any more.
        """
        self._first_steps.clear()
        began_s = time.monotonic()
        fetched = iter(batches())
        took_s = time.monotonic() - began_s
        is_first = True
        while True:
            if not self.pending:
                self._before_step(is_first)
            began_s = time.monotonic()
            try:
                batch = next(fetched)
            except StopIteration:
                if is_first and self.is_done:
                    raise DataError(_NOTHING_LEFT) from None
                self.is_done = True
                return
            is_first = False
            self._after_fetch(took_s + time.monotonic() - began_s)
            took_s = 0.0
            yield batch

    def hand_over(self, batch: range, mark: Any = None) -> None:
        """Record that this rank's slice of a global batch is passed to the training loop now."""
        self.pending += len(batch)
        self.batches += 1
        self.own, self.total, self.mark = len(slice_of(batch, self.rank, self.world_size)), len(batch), mark

    def restart_at(self, mark: Any) -> None:
        """Continue after the last step, where the stream's state is `mark`: batches passed since then are repeated."""
        self.drop_pending()
        self.mark = mark

    def begin_epoch(self) -> None:
        """Record that the script begins an epoch, or its rest."""
        self.is_done = False
        self.begun += 1

    def end_epoch(self) -> None:
        """Record that all of an epoch has been trained on."""
        self.repeated = 0

    def begin_rest(self) -> None:
        """Record that an epoch continues that the script has left early; nothing of its rest has been repeated yet."""
        self.drop_pending()
        self.repeated = 0

    def drop_pending(self) -> int:
        """Return the number of samples passed since the last step; they belong to no step any more."""
        pending, self.pending, self.batches = self.pending, 0, 0
        return pending

    def take_step(self, calls: int = 1, loss: torch.Tensor | float | None = None) -> Step:
        """Return the step that was made of what was passed since the one before."""
        batches, usual = self.batches, self._usual_batches
        self._usual_batches = max(batches, usual)
        if len(self._first_steps) < 3:
            self._first_steps.append(batches)
            self.fetches_ahead |= self._first_steps in ([2, 1, 1], [3, 1, 1])
        return Step(self.drop_pending(), batches, calls, loss, torn=batches > 1 and batches != usual)

    def continue_step(self) -> None:
        """Record that the step continues with another batch, whose gradient is added: nothing was fetched ahead."""
        self._first_steps = [0, 0, 0]

    def move(self, rank: int, world_size: int) -> None:
        """Become another rank, and start again with what follows the last step."""
        self.drop_pending()
        self.rank, self.world_size = rank, world_size
        self.moves += 1
        self.is_done = False

    def repeat(self, step: Step) -> None:
        """Record that the batches of a step are repeated."""
        self.repeated += step.batches

    def adopt_repeated(self, batches: int) -> None:
        """Record how many batches were repeated on the ranks that this one joins."""
        self.repeated = batches


def check(plan: EpochPlan, cursor: Cursor) -> None:
    """Raise DataError for an invalid plan, or one that would repeat or skip samples of an epoch that has begun."""
    if plan.global_batch < 1 or plan.end < 1:
        raise DataError(f"global_batch={plan.global_batch} makes no batch out of {plan.length} samples")
    check_same(cursor, plan.length, plan.shuffle, plan.seed)


def check_same(cursor: Cursor, length: int | None, shuffle: bool, seed: int) -> None:
    """Raise DataError if an epoch that has begun would continue with other data: `length` samples (None: a stream)."""
    if cursor.position == 0:
        return
    begun = {"samples": _count(cursor.length), "shuffle": cursor.shuffle, "seed": cursor.seed}
    now = {"samples": _count(length), "shuffle": shuffle, "seed": seed}
    for name, value in begun.items():
        if now[name] != value:
            raise DataError(
                f"epoch {cursor.epoch} was begun with {name}={value} and cannot be continued with {name}={now[name]}."
                f" FIX: restore {name}, or start over with another storage URL"
            )


def _count(length: int | None) -> str:
    return "unknown" if length is None else str(length)
