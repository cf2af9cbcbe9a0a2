"""`KeepRanks`: the strategy that keeps ranks in their processes when the group changes.

docs/recovery.md describes the protocol. `group` is the connection to launcher and peers, `elastic_ddp` the model that
survives the loss of one, `atomic_steps` the way back to the end of the last step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from elasticctl_protocol import variables
from elasticctl_train import dist
from elasticctl_train.checkpoint import dtensor, parts
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data.sample_order import Cursor, Feed, Step
from elasticctl_train.data_parallel import Buckets
from elasticctl_train.inplace import warmup
from elasticctl_train.inplace.atomic_steps import LastStep, StepGate
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel
from elasticctl_train.inplace.group import ElasticGroup, State
from elasticctl_train.inplace.launcher_link import is_taken
from elasticctl_train.inplace.newest_state import Agreement, Standing
from elasticctl_train.inplace.script_collectives import ScriptCollectives
from elasticctl_train.inplace.warmup import ExampleInputs, is_compiled
from elasticctl_train.script_loop import Obstacle, ScriptLoop


def why_not(run_parts: Mapping[str, Stateful], given: torch.nn.Module, loaders: Sequence[str]) -> str:
    """Return why a run cannot keep its ranks, as far as its objects show; empty if it can.

    `given` is the model as the script has passed it, `loaders` are data loaders with a position of their own.
    """
    obstacles = {
        "the script has made another run before": is_taken(),
        "the script has joined its process group itself": torch.distributed.is_initialized(),
        "the model is in DistributedDataParallel already": parts.is_parallel(given),
        "the model is sharded": dtensor.has_sharded(given),
        "a data loader keeps its own position": bool(loaders),
        "no optimizer was passed to Run": "optimizer" not in run_parts,
        "no optimizer of some of the model's parameters was passed to Run": not parts.all_stepped(run_parts),
    }
    return next((words for words, is_so in obstacles.items() if is_so), "")


class KeepRanks:
    """The group of a run, the model that survives the loss of peers, and the way back to the end of the last step.

    `must_restart`: all ranks have to restart from this step, because the script's own count of steps is wrong. See
    `strategies.Strategy` for the rest.
    """

    stays = True
    why_restarts = ""

    def __init__(
        self,
        open_group: Callable[[Callable[[], None]], ElasticGroup],
        run_parts: Mapping[str, Stateful],
        feed: Feed,
        loop: ScriptLoop,
        *,
        on_skip: Callable[[], None],
        saves: bool,
    ) -> None:
        """`open_group(on_loss)` returns the group. `on_skip()` is called for each optimizer step that is skipped.
        `saves`: the run has a storage, so its ranks can restart from where they are."""
        model: Any = run_parts[parts.MODEL]
        optimizers = [part for part in run_parts.values() if isinstance(part, torch.optim.Optimizer)]
        others = {
            name: part
            for name, part in run_parts.items()
            if part is not model and not isinstance(part, torch.optim.Optimizer)
        }
        self._feed, self._loop, self._saves = feed, loop, saves
        self._last_step = LastStep(model, optimizers, others)
        self.group = open_group(self._last_step.copy_large)
        self._gate = StepGate(
            self.group.watch,
            optimizers,
            self._last_step.check_parameters,
            before_each=self._rebuild_buckets,
            on_skip=on_skip,
        )
        self._model: ElasticDataParallel | None = None
        self._compiles = False
        self._has_equal_parameters = False
        self._place_of_pass: tuple[int, int] | None = None
        self.must_restart = False
        self._state_counts = True
        if self.world.device.type == "cpu":  # a GPU does not show whether a collective has a result
            ScriptCollectives(self.group, self._is_in_step, lambda: self._gate.is_made).install()
        self._examples = ExampleInputs(os.environ.pop(variables.EXAMPLE_INPUTS, ""))

    @classmethod
    def open(
        cls,
        run_parts: Mapping[str, Stateful],
        feed: Feed,
        loop: ScriptLoop,
        *,
        on_skip: Callable[[], None],
        saves: bool,
    ) -> KeepRanks | None:
        """Return the strategy; None if no launcher keeps this process."""
        link = ElasticGroup.find_link()
        if link is None:
            return None
        return cls(partial(ElasticGroup, link), run_parts, feed, loop, on_skip=on_skip, saves=saves)

    @property
    def world(self) -> dist.World:
        """This rank's place in the newest group."""
        return self.group.world

    @property
    def has_state(self) -> bool:
        """True if one of the ranks had the state in memory when the newest group began."""
        return self.group.has_state

    @property
    def is_lost(self) -> bool:
        """True if this step is lost. Waits for the GPU unless an optimizer has already done so."""
        self.group.watch.finish_on_gpu()
        return self.group.watch.lost

    # --- entering groups

    def enter(self, model: torch.nn.Module) -> State | None:
        """Enter this process's first group; return the state of its ranks, or None if they have none.

        `model` is the model to call. If the ranks train already, it is moved to this rank's device and compiled first.
        """
        if self._examples.calls and is_compiled(model):
            with self.group.alone() as watch:
                model.to(self.world.device)
                warmup.warm_up(model, self._examples, watch)
        agreement, handed = self.group.enter(Standing(), dict)
        self._accept(agreement)
        return handed

    def enter_next(self, lost: Step | None, cursor: Cursor, state: Callable[[], Mapping[str, Any]]) -> State | None:
        """Enter the next group from the end of the last step; return a newer state if another rank has one.

        Does not return if this process has to be replaced.
        """
        if lost is not None and (obstacle := self.why_restart()):
            self.replace(obstacle.why)
        if self.world.device.type == "cuda" and self._loop.collectives.has_made_any(dist.collectives_of_script()):
            self.replace("a GPU does not show whether a collective of the script was aborted")
        if lost is not None:
            self.must_restart |= self._saves and self._loop.would_skip_batches(self._feed, lost.batches)
        is_torn = lost is not None and (lost.torn or not self._last_step.is_begun)
        # Everything is undone even if the step is torn: `restore` and `undo` must both run.
        is_whole = self._last_step.restore(self._gate.undone) & self._gate.undo() and not is_torn
        has_state = is_whole and self._state_counts
        mine = Standing(cursor.step, cursor.epoch, has_state=has_state, restarts=self.must_restart)
        agreement, handed = self.group.enter_next(mine, state)
        if agreement.source is None:
            self.replace("no rank has the state of a complete step")
        if is_whole and handed is not None and cursor.epoch != agreement.newest.epoch:
            self.replace("the other ranks are in the next epoch")
        self._accept(agreement)
        self._gate.end_step()
        if self._model is not None:
            self._model.reform()
        return handed

    def wrap(self, model: torch.nn.Module, buckets: Buckets | None) -> ElasticDataParallel:
        """Return the model to call, the same one in every generation.

        `buckets` are those of the checkpoint that the run resumed from, if any.
        """
        if self._model is None:
            self.group.watch.start_with_buckets(buckets)
            self._compiles = is_compiled(model)
            self._model = ElasticDataParallel(
                model,
                self.group.watch,
                init_sync=not self._has_equal_parameters,
                # The script may compile the model that it calls.
                on_pass=torch.compiler.disable(self._begin_pass),  # type: ignore[no-untyped-call]
            )
            self._last_step.accept_parameters()
        return self._model

    # --- in each step

    def begin_step(self, is_first: bool) -> None:
        """Record that the first batch of a step is about to be fetched."""
        self._last_step.begin_step(is_lost=self._open_step(is_first))

    def _begin_pass(self, inputs: Sequence[object], options: Mapping[str, object]) -> None:
        """Record that the model is about to be called in training.

        If the script takes no batches from the run, a step begins with the first call after the step before.
        """
        if not self._feed.feeds_script:
            place = self._feed.begun, self._feed.moves
            is_first, self._place_of_pass = place != self._place_of_pass, place
            if not self._last_step.is_begun:
                self._last_step.begin_with_pass(is_lost=self._open_step(is_first))
        if self._compiles:
            self._examples.record(inputs, options)

    def _open_step(self, is_first: bool) -> bool:
        is_lost = self.is_lost
        self.group.train_in_this_thread()
        self._loop.collectives.begin_step(dist.collectives_of_script(), is_comparable=not is_first and not is_lost)
        return is_lost

    def _is_in_step(self) -> bool:
        if self._feed.feeds_script:
            return self._feed.pending > 0 and not self._feed.is_done
        return self._last_step.is_begun

    def why_restart(self) -> Obstacle | None:
        """Return why this process cannot stay, because of its script's loop. Call this in each step."""
        return self._loop.why_restart(
            makes_groups=dist.has_other_groups(self.world),
            changes_early=self._last_step.changes_early,
            collectives=dist.collectives_of_script(),
        )

    def complete(self, work: Callable[[], None]) -> bool:
        """End a step that was made, and do `work`; return False if the group is over or a peer is lost.

        Raises any other error of `work`.
        """
        self._last_step.end_step()
        self._gate.end_step()
        self._loop.collectives.end_step(dist.collectives_of_script())
        try:
            work()
        except dist.GroupOver:
            return False
        except RuntimeError as error:
            if not dist.is_of_collective(error) and not self.group.is_over:
                raise  # an error of the script, such as a NaN loss, would recur in any other group
            self.group.watch.record_loss(error)
            return False
        return not self.group.is_over

    def share_buffers(self) -> None:
        """Take over rank 0's buffers at the end of a step, on all ranks. Raises RuntimeError if a peer is lost."""
        if self._model is not None:
            self._model.share_buffers()

    def new_examples(self) -> str | None:
        """Return what the model is called with, as text, if that has to be reported for newcomers; else None."""
        return self._examples.pop_report()

    def reduce_waits_s(self) -> float | None:
        """Return how long this rank has waited for gradients of others; None if unknown."""
        if self.world.size == 1:
            return 0.0
        return None if self._model is None else self._model.reduce_waits_s()

    # --- at the end of the script's loop

    def hold_state(self) -> None:
        """Copy the state, so that `return_to_held` can undo what the script does from now on."""
        self._last_step.begin_step(is_lost=True)

    def return_to_held(self) -> None:
        """Undo what the script has done since `hold_state`. Does not return if it has changed parameters."""
        if not self._last_step.restore():
            self.replace("the script changes parameters at the end of an epoch, and this epoch has to continue")

    def restart_all(self, *, has_state: bool = True) -> None:
        """Have all ranks restart from this step, those that wait for this one in the next step too.

        `has_state`: false if the state of another rank counts. Raises GroupOver: the ranks have to meet in another
        group first. Does nothing without a storage, from which they could resume.
        """
        if not self._saves:
            return
        self.must_restart, self._state_counts = True, has_state
        self.group.regroup("the script uses its own count of steps")

    def replace(self, why: str) -> NoReturn:
        """Have the launcher replace this process, which waits to be stopped."""
        self.group.decline(why)

    def leave(self) -> None:
        """Let this process end with its generation from now on."""
        self.group.close()

    def _rebuild_buckets(self) -> None:
        if self._model is not None:
            self._model.rebuild_buckets()

    def _accept(self, agreement: Agreement) -> None:
        """Record how the ranks of a new group have arrived at one state."""
        self._loop.collectives.enter_group()
        self._examples.enter_group()
        self.must_restart, self._state_counts = agreement.restarts, True
        self._has_equal_parameters |= self.has_state
