"""`Run`: what a training script imports."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from elasticctl_store.errors import DataError, RestoreError, TrainError
from elasticctl_train import dist, rng
from elasticctl_train.checkpoint import compatibility, dtensor, parts
from elasticctl_train.checkpoint.newest import Restored
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data import loaders, streams
from elasticctl_train.data.loaders import ElasticLoader
from elasticctl_train.data.run_loaders import RunLoaders
from elasticctl_train.data.sample_order import Cursor, Feed, TakenStep
from elasticctl_train.data.streams import StreamLoader
from elasticctl_train.data_parallel import Buckets, ResumableDataParallel
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel
from elasticctl_train.inplace.launcher_link import is_taken
from elasticctl_train.inplace.own_count import OwnCount
from elasticctl_train.inplace.rest_of_epoch import RestOfEpoch
from elasticctl_train.inplace.run_in_place import InPlace
from elasticctl_train.same_gradients import AppliedGradients, OptimizerCalls
from elasticctl_train.save_policy import SavePolicy
from elasticctl_train.session import Session, Snapshot
from elasticctl_train.start_state import STORAGE_VARIABLE
from elasticctl_train.unsaved_state import Unsaved

log = logging.getLogger("elasticctl_train")

_FETCHES_AHEAD = (
    "batches are taken from run.loader ahead of their steps: a step counts all that were taken since the one before. "
    "After a resume or the loss of a worker, those that were taken ahead are never trained on. FIX: loop over "
    "run.loader itself, and let num_workers and pin_memory fetch ahead"
)

_COUNTS_DIFFER = (
    "since a new worker joined, ranks step their optimizers at different times or at different learning rates, so that "
    "each trains a model of its own: the script goes by a count of its own, which starts from 0 in a new process. FIX: "
    "go by run.steps_done"
)


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
        resume: compatibility.Choice | None = None,
        **others: Stateful,
    ) -> None:
        """Join the group, take over the storage URL and resume. Every rank must call it.

        Checkpoints go to `url`, which defaults to $ELASTICCTL_STORAGE; with neither, none are saved. `model` may be
        wrapped in DistributedDataParallel already, or sharded (FSDP2's `fully_shard`); a plain module is moved to
        `run.device`. `others` are saved under their names, like the model and the optimizer. `resume` says what to do
        with a checkpoint that does not fit these objects ("strict", "ignore" or "model-only"; see `compatibility`). It
        defaults to $ELASTICCTL_RESUME, and then to "strict", which refuses such a checkpoint.

        Raises StateError if a checkpoint cannot hold the state, StorageError, and RestoreError if the checkpoint is
        refused, in which case nothing has been changed. Raises TrainError in a process that only imports the script
        because the script has started it, such as a worker of a DataLoader.
        """
        dist.refuse_helper()
        self._choice = compatibility.parse_choice(resume or os.environ.get(compatibility.VARIABLE) or "strict")
        self._read_parts(model, others, optimizer=optimizer, scheduler=scheduler)
        obstacle = self._obstacle_to_staying(optimizer)
        self._stay = None if obstacle else InPlace.open(self._parts)
        handed = None if self._stay is None else self._stay.enter(model)
        group = None if self._stay is None else self._stay.group
        world = dist.join() if group is None else group.world
        if group is None and (url or os.environ.get(STORAGE_VARIABLE)):
            parts.check_alike(self._parts, world)
        self.device = self._place_model(world.device)
        self._buckets: Buckets | None = None
        self._seed = torch.initial_seed()
        self._feed = Feed(world.rank, world.size)
        self._rest = RestOfEpoch(self._feed, None if self._stay is None else self._stay.last_step)
        self._accumulated = 0  # calls of `step` since an optimizer was called
        self._last_pass: tuple[int, int] | None = None  # in which epoch, and after how many moves
        self._own_count = OwnCount()
        self._has_warned_of_counts = False
        self._session = Session(url, world, save, self._snapshot, self._fit, group, obstacle)
        self._batches = RunLoaders(self._feed, self._session)
        self._connect_feed()
        self._begin_training(handed)

    def _read_parts(self, model: torch.nn.Module, others: Mapping[str, Stateful], **named: Stateful | None) -> None:
        """Find out what is to be saved, and how. Raises StateError if a checkpoint cannot hold it."""
        self._given = model
        self._parallel = any(isinstance(layer, DistributedDataParallel) for layer in parts.layers(model))
        self._loaders = loaders.among(others)
        shared = {name: part for name, part in others.items() if name not in self._loaders}
        self._parts = parts.unwrap(model=model, **named, **shared)
        parts.check(self._parts)
        self._describe = parts.Describer(self._parts)
        unwrapped: Any = self._parts[parts.MODEL]
        self._parameters = frozenset(f"{parts.MODEL}/{name}" for name, _ in unwrapped.named_parameters())
        self._frozen = parts.Frozen(unwrapped)
        self._applied, self._calls = AppliedGradients(self._parts), OptimizerCalls(self._parts)
        self._unsaved = Unsaved(self._parts)

    def _place_model(self, device: torch.device) -> torch.device:
        """Move a plain model to `device`; return the device that the model is on."""
        if self._parallel:
            return next(self._given.parameters()).device
        if not dtensor.has_sharded(self._given):
            self._given.to(device)
        return device

    def _connect_feed(self) -> None:
        """Measure how long batches take, and begin a step with each where this process stays in its group."""
        self._has_warned_of_prefetch = False
        self._feed.on_fetched = self._session.progress.times.add_data
        self._session.progress.times.all_reduce_s = self._all_reduce_s
        self._feed.where = lambda: self._session.cursor
        if self._stay is not None:
            self._feed.on_fetch = self._begin_step
            # The script may compile run.model.
            self._stay.on_pass = torch.compiler.disable(self._begin_step_with_pass)  # type: ignore[no-untyped-call]
            self._stay.collectives.is_in_step = self._is_in_step

    def _begin_training(self, handed: Mapping[str, Any] | None) -> None:
        """Start from the state that another rank has `handed` over, from a checkpoint, or from the beginning."""
        restored = self._session.restored
        if handed is not None:
            cursor = self._take_over(handed)
            rng.seed_all(self._seed, self.rank, cursor.step)
        else:
            cursor = self._skip(Cursor() if restored is None else self._resume(restored))
        if self._loaders:
            self._session.losses.refuse_rollback("a data loader keeps a position of its own")
        self._session.is_place_shared = not self._loaders
        self._session.calls_digest = lambda: self._calls.digest
        self._session.on_calls_differ = self._end_different_counts
        self._session.begin(cursor)
        self._applied.begin()
        self._calls.begin(is_compared=handed is not None)
        self._own_count.begin(self._steps)
        self._start_again_if_told()

    @property
    def rank(self) -> int:
        """The rank of this process, from 0. It may change when the group changes."""
        return self._session.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks. It may change when the group changes."""
        return self._session.world.size

    @property
    def is_main(self) -> bool:
        """True on rank 0, which is the one that should print and plot."""
        return self.rank == 0

    @property
    def steps_done(self) -> int:
        """The number of calls of `step` so far, including those before restarts, but not those that were lost."""
        self._own_count.ask()
        return self._steps

    @property
    def own_samples(self) -> int:
        """The number of this rank's samples in the batch; 0 if it only holds a stand-in (see `data.sample_order`)."""
        return self._feed.own

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model to call. With several ranks, it is wrapped in DistributedDataParallel, unless it is sharded."""
        given = self._given
        if self._stay is not None:
            return self._stay.wrap(given, self._buckets)
        if self.world_size == 1 or self._parallel or dtensor.has_sharded(given):
            return given
        return ResumableDataParallel(given, buckets=self._buckets)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs, from 0, that are not complete. In one that was interrupted, the loader yields the rest."""
        self._session.progress.total_epochs = total
        warned = False
        while self._session.cursor.epoch < total:
            epoch, steps = self._session.cursor.epoch, self._steps
            self._feed.is_done = False
            self._feed.begun += 1
            yield epoch
            if self._is_rest_left():
                self._go_back_to_rest()
                continue
            if self._feed.take() and self._steps == steps and self.is_main and not warned:
                warned = True
                log.warning(
                    "epoch %d had batches but no run.step(): its steps are not counted, and nothing is saved before the"
                    " end. FIX: call run.step() after each optimizer.step()",
                    epoch,
                )
            self._batches.end_epoch()
            self._session.cursor = self._session.cursor.next_epoch()
        self._own_count.ask()

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
        """Return a loader of this rank's batches of the rest of the epoch.

        `global_batch` is the number of samples in a batch over all ranks. The loader may be created once, before the
        loop over the epochs: each pass over it starts where training is at that time. `options` (num_workers,
        collate_fn, pin_memory, …) are passed on to torch's DataLoader. Raises DataError, and StateError for a stream
        whose own state a checkpoint cannot hold.
        """
        if dtensor.is_tensor_parallel(self._given, self.world_size):
            raise DataError(
                "the model is tensor-parallel: ranks that work on one batch need the same samples, and run.loader "
                "gives each rank its own. FIX: use a DataLoader of your own, divided by the mesh's data-parallel "
                "dimension"
            )
        if not streams.is_stream(dataset):
            return self._batches.over_samples(dataset, global_batch, shuffle, seed, drop_last, options)
        if shuffle:
            name = type(dataset).__name__
            raise DataError(f"{name} comes in an order of its own: give it a set_epoch to shuffle by, not shuffle=True")
        if self._stay is not None:
            self._stop_staying("a stream cannot be divided anew from the step it is at")
        return self._batches.over_stream(dataset, global_batch, drop_last, options)

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Weight a loss that is the mean over this rank's samples, so that gradients are the global batch's mean.

        Ranks' slices of a global batch can differ by one sample, and DistributedDataParallel takes the plain mean over
        ranks. Call `backward` on the result; report and log the loss itself.
        """
        return loss if self._feed.weight == 1.0 else loss * self._feed.weight

    def step(self, *, loss: torch.Tensor | float | None = None) -> None:
        """Count and report a step, and save if it is time. Call it last in the loop's body, after `optimizer.step()`.

        While gradients wait for an optimizer of the run, because the script accumulates those of several batches, the
        call is counted, but nothing is saved and no worker joins before an optimizer has used them. The call does not
        return if the launcher has given notice that the group is about to change and this process cannot stay: all
        ranks then commit the same step and wait to be stopped. Raises FencedError if a newer run has taken over the
        storage URL.
        """
        self._own_count.call()
        has_skipped = self._stay is not None and self._stay.has_skipped
        if self._feed.pending and not has_skipped and self._calls.are_awaited():
            self._accumulated += 1
            self._feed.go_on()
            if loss is not None:
                self.log(loss=loss)
            return
        taken = self._feed.take_step()
        if self._feed.fetches_ahead and not self._has_warned_of_prefetch:
            self._has_warned_of_prefetch = True
            log.warning(_FETCHES_AHEAD)
        if unsaved := self._unsaved.look():
            self._warn_of(unsaved)
        if self._stay is not None and (why := self._stay.obstacle()):
            self._stop_staying(why)
        if self._stay is not None and self._stay.is_lost:
            self._move(lost=taken)
        else:
            self._complete(taken, loss)
        self._keep_for_rest()

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Report metrics by name. The latest value of each is also stored with the next checkpoint."""
        self._session.log(metrics)

    def finish(self) -> None:
        """Save the final state, wait until it is committed, and leave the group.

        Every rank must call it. A second call does nothing. If the script counts steps itself, and has counted some
        twice because they were repeated, the call does not return: all ranks start again from here, to make those that
        are left. Raises SaveError if the final state could not be committed.
        """
        if self._stay is None:
            self._end_training()
            return
        while not self._stay.complete(self._end_training):
            self._move()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.finish()
        else:
            if isinstance(error, SystemExit) and not error.code:
                self._session.warn_of_unsaved()
            self._session.abandon()

    def _obstacle_to_staying(self, optimizer: torch.optim.Optimizer | None) -> str:
        """Why this process cannot go on when the group changes; empty if it can."""
        obstacles = {
            "the script has made another run before": is_taken(),
            "the script has joined its process group itself": torch.distributed.is_initialized(),
            "the model came in DistributedDataParallel": self._parallel,
            "the model is sharded": dtensor.has_sharded(self._given),
            "a data loader keeps a position of its own": bool(self._loaders),
            "Run was given no optimizer": optimizer is None,
            "Run was given no optimizer of some of the model's parameters": not parts.all_stepped(self._parts),
        }
        return next((words for words, is_so in obstacles.items() if is_so), "")

    @property
    def _steps(self) -> int:
        return self._session.cursor.step + self._accumulated

    def _end_training(self) -> None:
        is_early = not self._feed.is_done and self._own_count.is_ahead(self._steps)
        if is_early and self._stay is not None and self._session.url:
            self._stay.start_again()
        if self.is_main and self._is_rest_left():
            self._rest.warn()
        self._session.finish()

    def _end_different_counts(self) -> None:
        """Have all ranks start again with rank 0's state: their optimizers have made different steps."""
        if self._stay is not None and self._session.url:
            self._stay.start_again(has_state=self.is_main)
        if self.is_main and not self._has_warned_of_counts:
            self._has_warned_of_counts = True
            log.warning(_COUNTS_DIFFER)

    def _would_skip_batches(self, lost: TakenStep) -> bool:
        """Return whether this rank would not make the batch of a lost step again, because its script counts that step.

        Then batches, and probably learning rates, go by the script's own count, not by `loader` or `epochs`.
        """
        makes_batches = not lost.batches and not self._feed.begun
        return makes_batches and self._own_count.leads and bool(self._session.url)

    def _start_again_if_told(self) -> None:
        while self._stay is not None and self._stay.restarts:
            if not self._stay.complete(self._session.start_again):
                self._move()

    def _complete(self, taken: TakenStep, loss: torch.Tensor | float | None) -> None:
        """End a step that was made."""
        self._batches.end_step()
        self._calls.end_step()
        cursor = self._session.cursor = self._session.cursor.next_step(taken.samples, 1 + self._accumulated)
        self._accumulated = 0
        if self._stay is None:
            self._end_step(cursor, taken.samples, loss)
        elif not self._stay.complete(lambda: self._end_step(cursor, taken.samples, loss)):
            self._move()

    def _end_step(self, cursor: Cursor, samples: int, loss: torch.Tensor | float | None) -> None:
        if self._stay is not None:
            self._stay.share_buffers()
        self._applied.compare(self._session.world)
        self._session.step(cursor, samples, loss)
        if self._stay is not None and self.is_main and (examples := self._stay.examples.take()):
            self._session.report_inputs(examples)

    def _all_reduce_s(self) -> float | None:
        if self.world_size == 1:
            return 0.0
        model = self.__dict__.get("model")  # once the script has asked for it
        return model.reduce_waits_s() if isinstance(model, ElasticDataParallel) else None

    def _warn_of(self, unsaved: str) -> None:
        """Warn of state that no part holds. In a newcomer it is new, so this process cannot stay beside one."""
        if self.is_main:
            log.warning(
                "Run was not given the %s: no checkpoint has it, so whenever the script starts again, it begins anew, "
                "and training goes on otherwise than without the interruption. FIX: create it before Run(…), of the "
                "bare model or the optimizer, and pass it by a name of your choice: Run(…, scheduler=scheduler), "
                "Run(…, average=average)",
                unsaved,
            )
        if self._stay is not None:
            self._stop_staying(f"Run was not given the {unsaved}")

    def _stop_staying(self, why: str) -> None:
        self._session.stop_staying(why)
        self._stay, self._feed.on_fetch = None, None

    def _move(self, *, lost: TakenStep | None = None) -> None:
        """Go on in the next group, from the end of the last step that any of its ranks has made."""
        if self._stay is None:
            raise RuntimeError("this process does not stay when its group changes")
        if lost is not None:
            self._feed.repeated += lost.batches
            self._stay.restarts |= self._would_skip_batches(lost)
        is_torn = lost is not None and (lost.is_uneven or not self._stay.last_step.is_begun)
        handed = self._stay.enter_next(self._session.cursor, self._to_hand_over, is_torn=is_torn)
        if handed is not None:
            self._session.cursor = self._take_over(handed)
        world, self._accumulated = self._stay.group.world, 0
        self._feed.take()
        self._feed.move(world.rank, world.size)
        self._session.move(world, self._stay.group.generation)
        self._applied.begin()
        self._calls.begin(is_compared=self._stay.group.has_state)
        self._start_again_if_told()

    def _begin_step(self, is_first: bool) -> None:
        if self._stay is not None:
            self._stay.begin_step(is_first)
            self._keep_for_rest()

    def _begin_step_with_pass(self) -> None:
        """Begin a step of a script that makes its data itself, or has a loader of its own."""
        if self._stay is not None and not self._takes_batches:
            now = self._session.cursor.epoch, self._feed.moves
            self._stay.begin_step_with_pass(is_first=now != self._last_pass)
            self._last_pass = now

    def _is_in_step(self) -> bool:
        if self._takes_batches or self._stay is None:
            return self._feed.pending > 0 and not self._feed.is_done
        return self._stay.last_step.is_begun

    @property
    def _takes_batches(self) -> bool:
        """True if the script trains on batches of `loader`, as far as is known before its first step."""
        return self._feed.pending > 0 or self._feed.usual_batches > 0

    def _keep_for_rest(self) -> None:
        self._rest.keep(self._session.progress.plan, self._session.cursor)

    def _is_rest_left(self) -> bool:
        return self._rest.is_left(self._session.progress.plan, self._session.cursor)

    def _go_back_to_rest(self) -> None:
        """Continue from the last step of an epoch that has not ended."""
        if self._rest.go_back(self._session.cursor, is_main=self.is_main):
            return
        why = "the script changes parameters at the end of an epoch, and this one has to go on"
        if self._stay is None:
            raise TrainError(why)
        self._stay.group.decline(why)

    def _fit(self, state: dict[str, Any], where: str) -> dict[str, Any]:
        """Check that a checkpoint is one of a run with these parts, before anything is changed."""
        own = state.get(parts.OWN)
        if not isinstance(own, dict) or not {"cursor", "seed"} <= own.keys():
            raise RestoreError(
                f"{where}: it does not say how far training was, for something other than Run has saved it. FIX: give "
                "Run another URL, and load what you need of this one with Checkpointer or dcp.load"
            )
        return compatibility.check(self._parts, state, where, self._choice)

    def _take(self, state: Mapping[str, Any], where: str = "the state of another rank") -> Cursor:
        """Load a whole state; returns how far it is."""
        different = compatibility.load(self._parts, state, where, self._choice)
        if different and self.is_main:
            log.warning("%s: taken over (resume=%s) although it does not fit %s", where, self._choice, different)
        own = state[parts.OWN]
        self._seed = own["seed"]
        self._frozen.put_back(own.get("frozen", {}))
        self._buckets = own.get("buckets")
        self._batches.put_mark(own.get("stream"))
        return Cursor(**own["cursor"])

    def _to_hand_over(self) -> dict[str, Any]:
        """The state for a rank of this group that does not have it; a checkpoint does not know of repeated batches."""
        state = self._snapshot().state
        return {**state, parts.OWN: {**state[parts.OWN], "repeated": self._feed.repeated}}

    def _take_over(self, handed: Mapping[str, Any]) -> Cursor:
        """Load the state of another rank."""
        self._feed.repeated = handed[parts.OWN]["repeated"]
        return self._take(handed)

    def _resume(self, restored: Restored) -> Cursor:
        cursor = self._take(restored.state, f"{self._session.url}, step {restored.commit.step}")
        if restored.local is not None:
            loaders.restore(self._loaders, restored.local, len(restored.commit.shares), self.world_size)
            self._batches.rng = restored.local["rng"]
            rng.restore(restored.local["rng"])
        else:
            rng.seed_all(self._seed, self._session.generation, self.rank)
        return cursor

    def _skip(self, cursor: Cursor) -> Cursor:
        """Leave out the batches that made the loss no finite number, where this run has gone back because of them."""
        skip_to = self._session.skip_to
        if skip_to is None:
            return cursor
        self._batches.put_mark(None)  # a stream is read from its beginning: nothing has marked this place
        return Cursor(**{**skip_to, "step": cursor.step})

    def _snapshot(self) -> Snapshot:
        state = {name: part.state_dict() for name, part in self._parts.items()}
        state[parts.OWN] = {"cursor": asdict(self._session.cursor), "seed": self._seed, "stream": self._batches.mark}
        state[parts.OWN] |= {"parts": self._describe(), "frozen": self._frozen.changed()}
        wrapped = self.__dict__.get("model")  # once the script has asked for it
        if isinstance(wrapped, ResumableDataParallel):
            self._buckets = wrapped.buckets()
        state[parts.OWN]["buckets"] = self._buckets
        local = {"rng": rng.capture(), "loaders": {name: part.state_dict() for name, part in self._loaders.items()}}
        return Snapshot(state, local, parts.rank_0_only(self._parts), self._parameters, parts.until_step(self._parts))
