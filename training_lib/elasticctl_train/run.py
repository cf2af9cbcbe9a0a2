"""`Run`: what a training script imports."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import cached_property, partial
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from elasticctl_store.errors import DataError
from elasticctl_train import dist, rng
from elasticctl_train.checkpoint import dtensor, parts
from elasticctl_train.checkpoint.checkpointer import Restored
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data import loaders, streams
from elasticctl_train.data import plan as data
from elasticctl_train.data.loaders import ElasticLoader, length_of, make_loader
from elasticctl_train.data.plan import Cursor, EpochPlan, Feed
from elasticctl_train.data.streams import StreamLoader, StreamPlan
from elasticctl_train.policy import SavePolicy
from elasticctl_train.session import Session, Snapshot


class Run:
    """One training run: joins the ranks, resumes from the newest whole checkpoint, saves as it goes.

        with Run("file:///runs/a", model=model, optimizer=optimizer) as run:
            for epoch in run.epochs(90):
                for images, labels in run.loader(dataset, global_batch=1024, shuffle=True):
                    loss = loss_of(run.model(images.to(run.device)), labels.to(run.device))
                    optimizer.zero_grad()
                    run.scale_loss(loss).backward()
                    optimizer.step()
                    run.step(loss=loss)

    `rank`, `world_size` and `device` tell where this process is; `run.model` is the model to call.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: Stateful | None = None,
        save: SavePolicy = SavePolicy(),  # noqa: B008 - frozen
        **others: Stateful,
    ) -> None:
        """Join, take over the storage URL and resume. Every rank must call it.

        `url` is where checkpoints go; without one, $ELASTICCTL_STORAGE, and without that none are saved. `model` may be
        wrapped in DistributedDataParallel already, or sharded (FSDP2's `fully_shard`); a bare one is moved to
        `run.device`. `others` are saved under their names like the rest. Raises StateError for a state that a
        checkpoint cannot hold, StorageError, and RestoreError when the checkpoint found is not one of these objects.
        """
        self._given = model
        self._loaders = loaders.among(others)
        shared = {name: part for name, part in others.items() if name not in self._loaders}
        self._parts = parts.unwrap(model=model, optimizer=optimizer, scheduler=scheduler, **shared)
        parts.check(self._parts)
        world = dist.join()
        self.rank, self.world_size, self.device = world.rank, world.size, world.device
        self._parallel = any(isinstance(layer, DistributedDataParallel) for layer in parts.layers(model))
        if self._parallel:
            self.device = next(model.parameters()).device
        elif not dtensor.has_sharded(model):
            model.to(self.device)
        self._feed = Feed(self.rank, self.world_size)
        self._mark: Any = None  # the state of a stream behind the last step; `feed` has that behind the last batch
        self._begun: tuple[Any, Any] | None = None  # a stream, and its state as this epoch began
        self._seed = torch.initial_seed()
        self._rng: dict[str, Any] | None = None
        self._session = Session(url, world, save, self._snapshot, partial(parts.check_fit, self._parts))
        restored = self._session.restored
        self._session.begin(Cursor() if restored is None else self._resume(restored))

    @property
    def is_main(self) -> bool:
        """True on the one rank that should print and plot."""
        return self.rank == 0

    @property
    def steps_done(self) -> int:
        """Optimizer steps done so far, over all incarnations of the run."""
        return self._session.cursor.step

    @property
    def own_samples(self) -> int:
        """How many samples of the current batch are this rank's: 0 when it holds a stand-in (see `data`)."""
        return self._feed.own

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model to call: in DistributedDataParallel when there are several ranks, unless it came sharded."""
        given = self._given
        if self.world_size == 1 or self._parallel or dtensor.has_sharded(given):
            return given
        return DistributedDataParallel(given)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs (from 0) that are not done yet; of a half-done one the loader yields the rest."""
        self._session.progress.total_epochs = total
        while self._session.cursor.epoch < total:
            yield self._session.cursor.epoch
            self._feed.take()
            self._feed.mark = self._mark = self._begun = None
            self._session.cursor = self._session.cursor.next_epoch()

    def loader(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> ElasticLoader | StreamLoader:
        """This rank's batches of what is left of the epoch. `global_batch` samples make one batch over all ranks.

        One that is made before the loop over the epochs will do: each pass begins where training is by then. `options`
        (num_workers, collate_fn, pin_memory, …) go to torch's DataLoader. Raises DataError, and StateError for a stream
        whose own state a checkpoint cannot hold.
        """
        cursor = self._session.cursor
        if streams.is_stream(dataset):
            return self._stream(dataset, StreamPlan(global_batch, cursor.epoch, drop_last=drop_last), shuffle, options)
        plan = EpochPlan(length_of(dataset), global_batch, shuffle, seed, cursor.epoch, drop_last)
        self._go_on_with(plan)
        return make_loader(dataset, plan, self._feed, cursor.position, partial(self._begin, plan), options)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Weight a loss that is the mean over this rank's samples, so that gradients are the global batch's mean.

        Ranks' slices of a global batch can differ by one sample, and DistributedDataParallel takes the plain mean over
        ranks. Call `backward` on the result; report and log the loss itself.
        """
        return loss if self._feed.weight == 1.0 else loss * self._feed.weight

    def step(self, *, loss: torch.Tensor | float | None = None) -> None:
        """Call last in the loop's body, after `optimizer.step()`: counts, reports, and saves when it is time.

        Where the launcher gives notice that the group has to change, does not return: all ranks commit the same step
        and wait to be stopped. Raises FencedError when a younger run has taken over the storage URL.
        """
        samples, cursor = self._feed.take(), self._session.cursor
        self._mark = self._feed.mark
        cursor = replace(cursor, step=cursor.step + 1, position=cursor.position + samples)
        self._session.step(cursor, samples, loss)

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Report numbers of one's own; the newest of each also goes into the next checkpoint's entry."""
        self._session.log(metrics)

    def finish(self) -> None:
        """Commit the end of training, wait for it, and leave the group. Every rank must call it; a second call is idle.

        Raises SaveError when the end could not be committed.
        """
        self._session.finish()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            self._session.abandon()

    def _resume(self, restored: Restored) -> Cursor:
        where = f"{self._session.url}, step {restored.commit.step}"
        parts.load(self._parts, restored.state, where)
        own = restored.state[parts.OWN]
        self._seed = own["seed"]
        self._feed.mark = self._mark = own.get("stream")
        if restored.local is not None:
            loaders.restore(self._loaders, restored.local, len(restored.commit.shares), self.world_size)
            self._rng = restored.local["rng"]
            rng.restore(restored.local["rng"])
        else:
            rng.seed_all(self._seed, self._session.generation, self.rank)
        return Cursor(**own["cursor"])

    def _stream(self, dataset: Any, plan: StreamPlan, shuffle: bool, options: Mapping[str, Any]) -> StreamLoader:
        """The loader of a dataset that cannot be indexed."""
        if shuffle:
            name = type(dataset).__name__
            raise DataError(f"{name} comes in an order of its own: give it a set_epoch to shuffle by, not shuffle=True")
        self._go_on_with(None)
        if streams.has_state(dataset):
            parts.check({"dataset": dataset})
        return streams.make_loader(dataset, plan, self._feed, partial(self._begin, None, dataset), options)

    def _go_on_with(self, plan: EpochPlan | None) -> None:
        """The epoch continues in this order (None: a stream's). Raises DataError where it was begun in another."""
        cursor = self._session.cursor
        if plan is None:
            data.check_same(cursor, None, False, 0)
            self._session.cursor = replace(cursor, length=None, shuffle=False, seed=0)
        else:
            data.check(plan, cursor)
            self._session.cursor = replace(cursor, length=plan.length, shuffle=plan.shuffle, seed=plan.seed)
        self._session.progress.plan = plan

    def _begin(self, plan: EpochPlan | None, stream: Any = None) -> Cursor:
        """The first batch of a pass is about to be fetched, with a plan or of a stream; returns where training is.

        What was handed over and not trained on comes again. Random numbers that set-up code has drawn since the resume
        are forgotten.
        """
        self._feed.take()
        self._feed.mark = self._mark
        self._go_on_with(plan)
        if self._session.cursor.position == 0 and streams.has_state(stream):
            self._feed.mark = self._beginning_of(stream)
        if self._rng is not None:
            rng.restore(self._rng)
            self._rng = None
        return self._session.cursor

    def _beginning_of(self, stream: Any) -> Any:
        """What to put a stream back to for one more pass from the beginning of the epoch; None for the first pass."""
        if self._begun is not None and self._begun[0] is stream:
            return self._begun[1]
        self._begun = stream, copy.deepcopy(stream.state_dict())
        return None

    def _snapshot(self) -> Snapshot:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state[parts.OWN] = {"cursor": asdict(self._session.cursor), "seed": self._seed, "stream": self._mark}
        local = {"rng": rng.capture(), "loaders": {name: part.state_dict() for name, part in self._loaders.items()}}
        return Snapshot(state, local, parts.rank_0_only(self._parts))
