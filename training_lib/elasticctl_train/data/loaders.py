"""Data loaders over map-style datasets: this rank's batches, from a position that a checkpoint can hold."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from elasticctl_store.errors import DataError, RestoreError
from elasticctl_train import rng
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data import sample_order as data
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed, slice_of

log = logging.getLogger("elasticctl_train")

_FIXED_OPTIONS = ("batch_size", "batch_sampler", "sampler")
Begin = Callable[[], Cursor]
"""Called when a pass over a loader starts; returns where training is."""


class ElasticSampler(Sampler[list[int]]):
    """A batch sampler for torch's DataLoader: this rank's samples of each global batch, from a position that can be
    saved.

        sampler = ElasticSampler(EpochPlan(len(dataset), global_batch=256, shuffle=True))
        loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
        sampler.load_state_dict(…)                  # of any world size
        while sampler.epoch < 90:
            for batch in loader:                    # the rest of the epoch
                (loss * sampler.weight).backward()
                …
                sampler.advance()                   # this batch has been trained on
                save(sampler.state_dict())

    Only `advance` moves the position, so what a DataLoader's workers prefetch is not counted. The length is that of a
    whole epoch. A rank without a sample in a batch gets a stand-in from that batch, with weight 0 (see `plan`).
    """

    def __init__(
        self, plan: EpochPlan, *, rank: int | None = None, world_size: int | None = None, position: int = 0
    ) -> None:
        """Start at `position` of the plan's epoch. Rank and world size default to the process group's, or torchrun's.

        Raises DataError for a plan without a batch.
        """
        data.check(plan, Cursor())
        place = _place()
        self._rank = place[0] if rank is None else rank
        self._world_size = place[1] if world_size is None else world_size
        self._plan, self._position = plan, position

    @property
    def epoch(self) -> int:
        """The epoch of the next batch to be trained on, from 0."""
        return self._plan.epoch

    @property
    def own_samples(self) -> int:
        """The number of samples of the next batch that belong to this rank; 0 if it gets a stand-in."""
        return self._feed().own

    @property
    def weight(self) -> float:
        """The factor for the next batch's mean loss by which the mean over ranks becomes that of the global batch."""
        return self._feed().weight

    def advance(self) -> None:
        """Record that all ranks have trained on the next batch; after the last one of an epoch, the next epoch
        begins."""
        self._position += len(self._next())
        if self._position >= self._plan.end:
            self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of another epoch; if it is the current one, keep the position."""
        if epoch != self.epoch:
            self._plan, self._position = replace(self._plan, epoch=epoch), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the position; the same on every rank, and valid for any world size."""
        plan = self._plan
        cursor = Cursor(0, plan.epoch, self._position, plan.length, plan.shuffle, plan.seed)
        return {name: value for name, value in asdict(cursor).items() if name != "step"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go to a saved position. Raises DataError if its epoch was begun with other data, shuffle or seed."""
        cursor = Cursor(**state_dict)
        data.check(self._plan, cursor)
        self._plan, self._position = replace(self._plan, epoch=cursor.epoch), cursor.position

    def __len__(self) -> int:
        return self._plan.count(0)

    def __iter__(self) -> Iterator[list[int]]:
        order = self._plan.order()
        for batch in self._plan.batches(self._position):
            own = slice_of(batch, self._rank, self._world_size) or range(batch.start, batch.start + 1)
            numbers = order[own.start : own.stop]
            yield numbers.tolist() if isinstance(numbers, torch.Tensor) else list(numbers)

    def _next(self) -> range:
        return range(self._position, min(self._position + self._plan.global_batch, self._plan.end))

    def _feed(self) -> Feed:
        feed = Feed(self._rank, self._world_size)
        feed.hand_over(self._next())
        return feed


class ElasticDataLoader(DataLoader[Any]):
    """A DataLoader whose position is in its `state_dict()`, for frameworks that own the training loop.

    A batch counts as trained on when it is returned, so the framework must not prefetch. `options` are those of torch's
    DataLoader, except its batch size and samplers.
    """

    def __init__(
        self, dataset: Dataset[Any], *, global_batch: int, shuffle: bool = False, seed: int = 0, **options: Any
    ) -> None:
        """`global_batch` is the number of samples in one batch over all ranks. Raises DataError."""
        plan = EpochPlan(length_of(dataset), global_batch, shuffle, seed, drop_last=options.pop("drop_last", False))
        self.global_batch = global_batch
        self._elastic = ElasticSampler(plan)
        self._weight = 1.0
        chosen = worker_options(options, seed)
        super().__init__(dataset, batch_sampler=self._elastic, **chosen)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch's own iterator is a private class
        """Yield the rest of the epoch."""
        for batch in super().__iter__():
            self._weight = self._elastic.weight
            self._elastic.advance()
            yield batch

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Weight the mean loss over this rank's samples of the newest batch, like `Run.scale_loss`."""
        return loss if self._weight == 1.0 else loss * self._weight

    def set_epoch(self, epoch: int) -> None:
        """See `ElasticSampler.set_epoch`."""
        self._elastic.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """See `ElasticSampler.state_dict`."""
        return self._elastic.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """See `ElasticSampler.load_state_dict`."""
        self._elastic.load_state_dict(state_dict)


class ElasticLoader:
    """The rest of an epoch, from where training is when a pass begins; `feed` counts each batch that is returned.

    `len` is that of the epoch's newest pass. Batches that are repeated because a step was lost count each time, like in
    a script that numbers the batches of a pass. Before the epoch's first pass, `len` leaves out as many batches as have
    been repeated before this process joined: loops that count end after the same batch on all ranks then.
    """

    def __init__(
        self,
        make: Callable[[EpochPlan, int], DataLoader[Any]],
        plan: EpochPlan,
        feed: Feed,
        where: Callable[[], Cursor],
        begin: Begin,
    ) -> None:
        """`make` creates torch's loader for a plan from a position on; `where` returns where training is, and so does
        `begin`, when a pass begins."""
        self._make, self._feed, self._where, self._begin = make, feed, where, begin
        self._passed, self._passes_in = 0, -1
        self._go_to(plan, where().position)

    def __len__(self) -> int:
        if self._passes_in == self._feed.begun:
            return self._passed + self._left
        left = self._plan.count(self._where().position)
        return left - self._feed.repeated if self._feed.repeated <= left else left

    def __iter__(self) -> Iterator[Any]:
        is_done, handed = False, 0
        while not is_done:
            cursor = self._begin()
            place = cursor.epoch, cursor.position, self._feed.moves
            if place != self._place:
                self._go_to(replace(self._plan, epoch=cursor.epoch), cursor.position)
            is_done, self._passed, self._passes_in = True, handed, self._feed.begun
            for batch, samples in self._feed.watch_fetches(
                partial(zip, self._plan.batches(cursor.position), self._loader, strict=True)
            ):
                self._feed.hand_over(batch)
                handed += 1
                yield samples
                if self._feed.moves != place[-1]:
                    is_done = False
                    break

    def _go_to(self, plan: EpochPlan, position: int) -> None:
        self._plan, self._place = plan, (plan.epoch, position, self._feed.moves)
        self._loader, self._left = self._make(plan, position), plan.count(position)


def make_loader(
    dataset: Dataset[Any],
    plan: EpochPlan,
    feed: Feed,
    where: Callable[[], Cursor],
    begin: Begin,
    options: Mapping[str, Any],
) -> ElasticLoader:
    """Return a loader over the rest of the epoch (see `ElasticLoader`). `options` are passed to torch's DataLoader."""

    def make(plan: EpochPlan, position: int) -> DataLoader[Any]:
        sampler = ElasticSampler(plan, rank=feed.rank, world_size=feed.world_size, position=position)
        chosen = worker_options(options, plan.seed, plan.epoch, position, feed.rank)
        return DataLoader(dataset, batch_sampler=sampler, **chosen)

    return ElasticLoader(make, plan, feed, where, begin)


def worker_options(options: Mapping[str, Any], *seeds: int) -> dict[str, Any]:
    """Return options of a DataLoader with what this library adds to them.

    It gets a generator of its own, so that a resume does not shift the script's random numbers. Its workers ignore
    every SIGTERM but the rank's own: the signal may reach the whole process group, and a worker that died from it would
    prevent the last save. Raises DataError for options that determine which samples form a batch.
    """
    check_options(options)
    generator = torch.Generator().manual_seed(rng.mix(*seeds))
    return {"generator": generator, **options, "worker_init_fn": partial(_init_worker, options.get("worker_init_fn"))}


def check_options(options: Mapping[str, Any]) -> None:
    """Raise DataError for options of a DataLoader that determine which samples form a batch."""
    for name in _FIXED_OPTIONS:
        if name in options:
            raise DataError(f"{name}={options[name]!r}: run.loader forms the batches. FIX: pass only global_batch")


def length_of(dataset: object) -> int:
    """Return the number of samples in a dataset. Raises DataError if it cannot be indexed."""
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        kind = type(dataset).__name__
        raise DataError(f"{kind}: a dataset needs __len__ and __getitem__, to give each rank its part")
    return len(dataset)


def among(parts: Mapping[str, Any]) -> dict[str, Stateful]:
    """Return the parts that have a position of their own on each rank: data loaders with a state, such as torchdata's.

    Raises DataError for a data loader without one.
    """
    found = {
        name: part
        for name, part in parts.items()
        if isinstance(part, DataLoader) or type(part).__module__.partition(".")[0] == "torchdata"
    }
    for name, part in found.items():
        if not hasattr(part, "load_state_dict"):
            kind = type(part).__name__
            raise DataError(
                f"{name}: a {kind} cannot save its position. FIX: use run.loader, or torchdata's StatefulDataLoader"
            )
    return found


def restore(loaders: Mapping[str, Stateful], local: Mapping[str, Any], ranks_before: int, world_size: int) -> None:
    """Restore the positions of this rank's loaders. At another world size these positions are meaningless: they start
    over."""
    if loaders and ranks_before != world_size:
        names = ", ".join(loaders)
        log.warning(
            "%s: the positions were saved on %d ranks and cannot be used on %d: starting over",
            names,
            ranks_before,
            world_size,
        )
        return
    for name, loader in loaders.items():
        if name not in local["loaders"]:
            raise RestoreError(f"the checkpoint has no {name!r}. FIX: use another storage URL")
        loader.load_state_dict(local["loaders"][name])


def is_shared_position(state: object) -> bool:
    """Return whether this is a state of `ElasticSampler`, which is the same on every rank and valid for any world
    size."""
    return isinstance(state, Mapping) and state.keys() == {"epoch", "position", "length", "shuffle", "seed"}


def _place() -> tuple[int, int]:
    """Return rank and world size of this process."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _init_worker(then: Callable[[int], None] | None, worker: int) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_obey_rank, name="elasticctl-sigterm", daemon=True).start()
    if then is not None:
        then(worker)


def _obey_rank() -> None:
    """End this worker when its rank terminates it.

    A DataLoader does so with workers that do not exit by themselves, for example because they wait for a file system.
    The interpreter of the rank would otherwise wait for them when it exits.
    """
    rank = multiprocessing.parent_process()
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != (rank.pid if rank is not None else os.getppid()):
        continue
    os._exit(128 + signal.SIGTERM)
