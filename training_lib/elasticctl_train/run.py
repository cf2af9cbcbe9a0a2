"""`Run`: what a training script imports."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

import torch
from torch.utils.data import Dataset

from elasticctl_protocol import variables
from elasticctl_store.errors import DataError
from elasticctl_train import dist, rng
from elasticctl_train.checkpoint import compatibility, dtensor, parts
from elasticctl_train.checkpoint.newest import Restored
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data import loaders, streams
from elasticctl_train.data.loaders import ElasticLoader
from elasticctl_train.data.run_loaders import RunLoaders
from elasticctl_train.data.sample_order import Cursor, Feed, Step
from elasticctl_train.data.streams import StreamLoader
from elasticctl_train.meetings import Snapshot
from elasticctl_train.run_state import RunState
from elasticctl_train.same_training import COUNTS_DIFFER, AppliedGradients, OptimizerCalls, compare_places
from elasticctl_train.save_policy import SavePolicy
from elasticctl_train.script_loop import LEFT_EARLY, STREAM, Obstacle, ScriptLoop
from elasticctl_train.session import Session
from elasticctl_train.strategies import Strategy, choose_strategy, restart_instead

log = logging.getLogger("elasticctl_train")

_FETCHES_AHEAD = (
    "batches are taken from run.loader ahead of their steps: a step counts all that were taken since the one before. "
    "After a resume or the loss of a worker, those that were taken ahead are never trained on. FIX: loop over "
    "run.loader itself, and let num_workers and pin_memory fetch ahead"
)
_NO_STEPS = (
    "epoch %d had batches but no run.step(): its steps are not counted, and nothing is saved before the end. FIX: call "
    "run.step() after each optimizer.step()"
)
_REST = (
    "epoch %d continues with the batches that are left (%d): the script counts batches itself, and has counted those "
    "twice whose steps were repeated because a worker was lost"
)
_UNSAVED = (
    "%s: checkpoints do not contain that state, so it starts from scratch whenever the script restarts, and training "
    "diverges from an uninterrupted run. FIX: %s"
)
_WILL_RESTART = (
    "from now on, ranks restart when the group changes, because %s. They resume from the newest copy in workers' memory"
    " or the newest checkpoint. FIX: %s"
)


class Run:
    """One training run: joins the ranks, resumes from the newest intact checkpoint, saves as it goes.

        with Run("file:///runs/a", model=model, optimizer=optimizer) as run:
            for epoch in run.epochs(90):
                for images, labels in run.loader(dataset, global_batch=1024, shuffle=True):
                    loss = loss_of(run.model(images.to(run.device)), labels.to(run.device))
                    optimizer.zero_grad()
                    run.scale_loss(loss).backward()
                    optimizer.step()
                    run.step(loss=loss)

    `rank`, `world_size` and `device` say where this process is; `run.model` is the model to call.
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
        self._state = RunState(model, others, choice=resume, optimizer=optimizer, scheduler=scheduler)
        run_parts, stateful_loaders = self._state.parts, self._state.loaders
        saves = bool(url or os.environ.get(variables.STORAGE))
        self._warned = set[str]()
        # What is detected of the script, and how its ranks recover.
        self._feed = Feed(
            before_step=self._begin_step,
            after_fetch=lambda took_s: self._session.progress.times.add_data(took_s),
        )
        self._loop = ScriptLoop(run_parts)
        self._calls, self._applied = OptimizerCalls(run_parts), AppliedGradients(run_parts)
        self._strategy: Strategy = choose_strategy(
            self._state, self._feed, self._loop, on_skip=self._calls.record_skipped, saves=saves
        )
        handed = self._strategy.enter(model)
        world = self._strategy.world
        if saves and not self._strategy.stays:
            parts.check_alike(run_parts, world)
        self.device = self._state.place_model(world.device)
        self._feed.move(world.rank, world.size)
        # What training starts from, and where it is saved.
        compare = (lambda: None) if stateful_loaders else self._compare_ranks
        self._session = Session(url, self._strategy, save, self._snapshot, self._state.check, compare)
        self._batches = RunLoaders(self._feed, self._session)
        if stateful_loaders:
            self._session.losses.refuse_rollback("a data loader keeps its own position")
        self._session.begin_training(self._find_place(handed))
        self._loop.count.start_at(self._session.cursor.step)
        self._enter_group(is_compared=handed is not None)

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
        self._loop.count.record_read()
        return self._steps

    @property
    def own_samples(self) -> int:
        """The number of this rank's samples in the batch; 0 if it only holds a stand-in (see `data.sample_order`)."""
        return self._feed.own

    @cached_property
    def model(self) -> torch.nn.Module:
        """The model to call. With several ranks, it is wrapped in DistributedDataParallel, unless it is sharded."""
        return self._strategy.wrap(self._state.given, self._state.buckets)

    def epochs(self, total: int) -> Iterator[int]:
        """Yield the epochs, from 0, that are not complete. In one that was interrupted, the loader yields the rest."""
        self._session.progress.expect(total_epochs=total)
        while self._session.cursor.epoch < total:
            epoch, steps = self._session.cursor.epoch, self._steps
            self._feed.begin_epoch()
            yield epoch
            if self._counts_batches():
                self._continue_epoch()
                continue
            if self._feed.drop_pending() and self._steps == steps and self.is_main:
                self._warn_once(_NO_STEPS, epoch)
            self._batches.end_epoch()
            self._session.go_to(self._session.cursor.next_epoch())
        self._loop.count.record_read()

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
        if dtensor.is_tensor_parallel(self._state.given, self.world_size):
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
        self._restart_from_now_on(STREAM)
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
        calls = self._loop.count.record_call()
        if self._feed.pending and self._calls.are_awaited():
            self._feed.continue_step()
            if loss is not None:
                self.log(loss=loss)
            return
        step = self._feed.take_step(calls, loss)
        self._warn_of_script()
        if self._strategy.is_lost:
            self._move(lost=step)
        else:
            if obstacle := self._strategy.why_restart():
                self._restart_from_now_on(obstacle)
            self._count(step)
        self._hold_state()

    def log(self, **metrics: torch.Tensor | float) -> None:
        """Report metrics by name. The latest value of each is also stored with the next checkpoint."""
        self._session.log(metrics)

    def finish(self) -> None:
        """Save the final state, wait until it is committed, and leave the group.

        Every rank must call it. A second call does nothing. If the script counts steps itself, and has counted some
        twice because they were repeated, the call does not return: all ranks restart from here, to make those that are
        left. Raises SaveError if the final state could not be committed.
        """
        while not self._strategy.complete(self._end_training):
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

    # --- a step

    @property
    def _steps(self) -> int:
        return self._session.cursor.step + self._loop.count.in_step

    def _begin_step(self, is_first: bool) -> None:
        self._strategy.begin_step(is_first)
        self._hold_state()

    def _warn_of_script(self) -> None:
        """Say what this step shows of the script, as far as that matters with any strategy."""
        if self._feed.fetches_ahead:
            self._warn_once(_FETCHES_AHEAD)
        unsaved = self._loop.unsaved.search()
        if unsaved is not None and self.is_main:
            self._warn_once(_UNSAVED, unsaved.why, unsaved.fix)

    def _count(self, step: Step) -> None:
        """End a step that was made: it counts, even if the group ends before all ranks know of it."""
        self._batches.end_step()
        self._calls.end_step()
        self._loop.count.end_step()
        made = replace(step, cursor=self._session.cursor.next_step(step.samples, step.calls))
        self._session.go_to(made.cursor)
        self._with_all_ranks(lambda: self._record(made))

    def _record(self, step: Step) -> None:
        self._strategy.share_buffers()
        self._applied.compare(self._session.world)
        self._session.step(step)
        if self.is_main and (examples := self._strategy.new_examples()):
            self._session.report_inputs(examples)

    def _compare_ranks(self) -> None:
        """Raise TrainError if ranks are at different positions in the data; restart if their optimizers differ."""
        if not compare_places(self._session.world, self._session.cursor, self._calls.digest):
            self._strategy.restart_all(has_state=self.is_main)
            if self.is_main:
                self._warn_once(COUNTS_DIFFER)

    # --- another group

    def _with_all_ranks(self, work: Callable[[], None]) -> None:
        """Do something that communicates; if the group ends meanwhile, continue in the next one."""
        if not self._strategy.complete(work):
            self._move()

    def _move(self, *, lost: Step | None = None) -> None:
        """Continue in the next group, from the end of the last step that any of its ranks has made."""
        if lost is not None:
            self._feed.repeat(lost)
        handed = self._strategy.enter_next(lost, self._session.cursor, self._state_for_peers)
        if handed is not None:
            self._session.go_to(self._take_over(handed))
        self._loop.count.end_step()
        world = self._strategy.world
        self._feed.move(world.rank, world.size)
        self._session.move()
        self._enter_group(is_compared=self._strategy.has_state)

    def _enter_group(self, *, is_compared: bool) -> None:
        """A group begins. `is_compared`: some of its ranks were there before others."""
        self._applied.enter_group()
        self._calls.enter_group(is_compared=is_compared)
        while self._strategy.must_restart:
            self._with_all_ranks(self._session.save_and_restart)

    def _restart_from_now_on(self, obstacle: Obstacle) -> None:
        """Have this process restarted when the group changes."""
        if not self._strategy.stays:
            return
        if self.is_main:
            self._warn_once(_WILL_RESTART, obstacle.why, obstacle.fix)
        self._strategy = restart_instead(self._strategy, obstacle.why, self.__dict__.get("model"))
        self._session.switch_strategy(self._strategy)

    # --- the end of the script's loop

    def _counts_batches(self) -> bool:
        return self._loop.counts_batches(self._feed, self._batches.plan, self._session.cursor)

    def _hold_state(self) -> None:
        """Copy the state where a script that counts batches leaves its loop too early."""
        if self._feed.repeated and self._counts_batches():
            self._strategy.hold_state()

    def _continue_epoch(self) -> None:
        """Continue an epoch that the script has left early, from its last step."""
        if self.is_main:
            log.info(_REST, self._session.cursor.epoch, self._feed.repeated)
        self._feed.begin_rest()
        self._strategy.return_to_held()

    def _end_training(self) -> None:
        if self._loop.leaves_early(self._feed, self._batches.plan, self._session.cursor):
            self._strategy.restart_all()
            if self.is_main:
                self._warn_once(LEFT_EARLY)
        self._session.finish()

    # --- the state

    def _find_place(self, handed: Mapping[str, Any] | None) -> Cursor:
        """Load what another rank has handed over, or a checkpoint; return where training starts."""
        if handed is not None:
            cursor = self._take_over(handed)
            rng.seed_all(self._state.seed, self.rank, cursor.step)
            return cursor
        restored, back = self._session.restored, self._session.storage.start.back
        cursor = Cursor() if restored is None else self._resume(restored)
        if back is None:
            return cursor
        # Skip the batches that made the loss no finite number. A stream is read from its beginning: nothing has marked
        # the place after them.
        self._batches.put_mark(None)
        return Cursor(**{**back.skip_to, "step": cursor.step})

    def _resume(self, restored: Restored) -> Cursor:
        cursor = self._load(restored.state, f"{self._session.storage.url}, step {restored.commit.step}")
        if restored.local is not None:
            loaders.restore(self._state.loaders, restored.local, len(restored.commit.shares), self.world_size)
            self._batches.restore_rng(restored.local["rng"])
        else:
            rng.seed_all(self._state.seed, self._session.storage.generation, self.rank)
        return cursor

    def _take_over(self, handed: Mapping[str, Any]) -> Cursor:
        """Load the state of another rank."""
        self._feed.adopt_repeated(handed[parts.OWN]["repeated"])
        return self._load(handed, "the state of another rank")

    def _load(self, state: Mapping[str, Any], where: str) -> Cursor:
        cursor, mark = self._state.load(state, where, is_main=self.is_main)
        self._batches.put_mark(mark)
        return cursor

    def _snapshot(self) -> Snapshot:
        wrapped = self.__dict__.get("model")  # once the script has asked for it
        return self._state.capture(self._session.cursor, self._batches.mark, wrapped)

    def _state_for_peers(self) -> dict[str, Any]:
        """The state for a rank of this group that does not have it; a checkpoint does not know of repeated batches."""
        state = self._snapshot().state
        return {**state, parts.OWN: {**state[parts.OWN], "repeated": self._feed.repeated}}

    def _warn_once(self, message: str, *values: object) -> None:
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)
