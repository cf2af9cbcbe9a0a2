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

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticctl_train import rng
from elasticctl_train.errors import DataError


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

    def batches(self, position: int) -> list[range]:
        """The global batches from `position` on, as ranges of positions."""
        return [
            range(start, min(start + self.global_batch, self.end))
            for start in range(position, self.end, self.global_batch)
        ]

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


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for torch's DataLoader: this rank's sample numbers of each global batch from `position` on.

    A rank without a sample in a batch gets one of that batch as a stand-in (see the module's docstring).
    """

    def __init__(self, plan: EpochPlan, *, rank: int = 0, world_size: int = 1, position: int = 0) -> None:
        self._plan, self._rank, self._world_size, self._position = plan, rank, world_size, position

    def __len__(self) -> int:
        return len(self._plan.batches(self._position))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._plan.order()
        for batch in self._plan.batches(self._position):
            own = slice_of(batch, self._rank, self._world_size) or range(batch.start, batch.start + 1)
            yield [int(number) for number in order[own.start : own.stop]]


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far training is: `position` samples of `epoch` are trained on, out of `length` in the order of `seed`."""

    step: int = 0
    epoch: int = 0
    position: int = 0
    length: int = 0
    shuffle: bool = False
    seed: int = 0

    def next_epoch(self) -> Cursor:
        """The start of the next epoch."""
        return replace(self, epoch=self.epoch + 1, position=0)


@dataclass(slots=True)
class Feed:
    """Counts what the loader handed to the training loop; DataLoader workers' prefetch is not in it.

    `pending` samples were handed over since the last step; `own` of the newest global batch of `total` are this rank's.
    """

    rank: int = 0
    world_size: int = 1
    pending: int = 0
    own: int = 0
    total: int = 0

    def hand_over(self, batch: range) -> None:
        """Note that this rank's slice of a global batch goes to the training loop now."""
        self.pending += len(batch)
        self.own, self.total = len(slice_of(batch, self.rank, self.world_size)), len(batch)

    def take(self) -> int:
        """The samples handed over since the last call."""
        pending, self.pending = self.pending, 0
        return pending

    @property
    def weight(self) -> float:
        """What this rank's mean loss must be multiplied by so that the mean over ranks is that of the global batch."""
        return self.own * self.world_size / self.total if self.total else 1.0


class ElasticLoader:
    """The rest of one epoch: iterates over this rank's batches once, and tells `feed` of each as it is handed over."""

    def __init__(self, loader: DataLoader[Any], batches: Sequence[range], feed: Feed, on_start: Callable[[], None]):
        self._loader, self._batches, self._feed, self._on_start = loader, batches, feed, on_start

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._on_start()
        for batch, data in zip(self._batches, self._loader, strict=True):
            self._feed.hand_over(batch)
            yield data


def make_loader(
    dataset: Dataset[Any],
    plan: EpochPlan,
    feed: Feed,
    position: int,
    on_start: Callable[[], None],
    options: Mapping[str, Any],
) -> ElasticLoader:
    """A loader over what is left of the epoch from `position` on. `options` go to torch's DataLoader.

    The DataLoader gets a generator of its own, so a resume does not shift the script's random numbers, and its workers
    ignore SIGTERM: it reaches the whole process group, and a worker that died of it would take the last save along.
    """
    sampler = ElasticSampler(plan, rank=feed.rank, world_size=feed.world_size, position=position)
    generator = torch.Generator().manual_seed(rng.mix(plan.seed, plan.epoch, position, feed.rank))
    worker_init = partial(_init_worker, options.get("worker_init_fn"))
    chosen = {"generator": generator, **options, "worker_init_fn": worker_init}
    loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=sampler, **chosen)
    return ElasticLoader(loader, plan.batches(position), feed, on_start)


def length_of(dataset: object) -> int:
    """How many samples a dataset has; DataError for one that cannot be indexed."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise DataError(f"{kind}: run.loader needs a dataset with __len__ and __getitem__, to give each rank its part")
    return len(dataset)


def check(plan: EpochPlan, cursor: Cursor) -> None:
    """Raise DataError for a plan that cannot be, or that would repeat or miss samples of a begun epoch."""
    if plan.global_batch < 1 or plan.end < 1:
        raise DataError(f"global_batch={plan.global_batch} makes no batch out of {plan.length} samples")
    if cursor.position == 0:
        return
    begun = {"samples": cursor.length, "shuffle": cursor.shuffle, "seed": cursor.seed}
    now = {"samples": plan.length, "shuffle": plan.shuffle, "seed": plan.seed}
    for name, value in begun.items():
        if now[name] != value:
            raise DataError(
                f"epoch {cursor.epoch} was begun with {name}={value} and cannot be continued with {name}={now[name]}: "
                f"restore it, or start afresh under another storage URL"
            )


def _init_worker(then: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if then is not None:
        then(worker)
