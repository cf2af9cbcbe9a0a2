"""Keeps a `Run` in its process when the group changes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from elasticctl_train import dist
from elasticctl_train.checkpoint import parts
from elasticctl_train.checkpoint.parts import Stateful
from elasticctl_train.data.sample_order import Cursor
from elasticctl_train.data_parallel import Buckets
from elasticctl_train.dist import GroupOver
from elasticctl_train.inplace import example_inputs
from elasticctl_train.inplace.atomic_steps import LastStep, StepGate
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel
from elasticctl_train.inplace.example_inputs import ExampleInputs
from elasticctl_train.inplace.group import ElasticGroup
from elasticctl_train.inplace.newest_state import Agreement, Standing
from elasticctl_train.inplace.script_collectives import ScriptCollectives
from elasticctl_train.inplace.warmup import is_compiled, warm_up

State = dict[str, Any]


class OwnCollectives:
    """Counts the collectives that the script itself makes in the current group.

    `differ` is set once two steps of one pass over the data have had different numbers of them. `before_first` is
    their number before the first step, once that has begun.
    """

    def __init__(self) -> None:
        self.differ = False
        self.before_first: int | None = None
        self._at_begin = self._at_end = 0
        self._usual: int | None = None

    def enter_group(self) -> None:
        """Start to count from 0 in a new group."""
        self._at_end = 0

    def begin_step(self, count: int, *, is_comparable: bool) -> None:
        """Record the count at the start of a step or the end of a pass.

        `is_comparable`: a complete step precedes it, so their numbers can be compared.
        """
        if self.before_first is None:
            self.before_first = count
        made, self._at_begin = count - self._at_begin, count
        if not is_comparable:
            return
        self.differ |= self._usual is not None and made != self._usual
        self._usual = made

    def end_step(self, count: int) -> None:
        """Record the count at the end of a step."""
        self._at_end = count

    def has_made_any(self, count: int) -> bool:
        """True if the script has made a collective since the end of the last step in this group."""
        return count != self._at_end


class InPlace:
    """The group of a run, the model that survives the loss of peers, and the way back to the end of `last_step`.

    `restarts`: from this step, all ranks have to start again, because a script's own count is ahead (see `own_count`).
    `on_pass()` is called before each pass of the model in training.
    """

    def __init__(self, group: ElasticGroup, run_parts: Mapping[str, Stateful]) -> None:
        self.group = group
        model: Any = run_parts[parts.MODEL]
        optimizers = [part for part in run_parts.values() if isinstance(part, torch.optim.Optimizer)]
        others = {
            name: part
            for name, part in run_parts.items()
            if part is not model and not isinstance(part, torch.optim.Optimizer)
        }
        self.last_step = LastStep(model, optimizers, others)
        self._gate = StepGate(group.watch, optimizers, self.last_step.look, self._rebuild_buckets)
        self._model: ElasticDataParallel | None = None
        self._is_equal = self._is_checked = False
        self.restarts = False
        self._state_counts = True
        self.on_pass: Callable[[], None] | None = None
        self._own = OwnCollectives()
        self.collectives = ScriptCollectives(group, lambda: self._gate.is_made)
        if group.world.device.type == "cpu":  # a GPU does not tell whether a collective has a result
            self.collectives.install()
        self.examples = ExampleInputs(os.environ.pop(example_inputs.VARIABLE, ""))
        group.on_loss = self.last_step.keep

    @classmethod
    def open(cls, run_parts: Mapping[str, Stateful]) -> InPlace | None:
        """Return the object for a run with these parts; None if processes do not stay."""
        group = ElasticGroup.open()
        return None if group is None else cls(group, run_parts)

    @property
    def is_lost(self) -> bool:
        """True if this step is lost. Waits for the GPU unless an optimizer has already done so."""
        self.group.watch.finish_on_gpu()
        return self.group.watch.lost

    @property
    def has_skipped(self) -> bool:
        """True if an optimizer was called in this step, which is lost, and has not changed anything."""
        return self._gate.has_skipped

    def obstacle(self) -> str:
        """Return why this process cannot stay because of its script; empty if it can. Call this in each step.

        With collectives before the first step, a newcomer would wait for the others, which are already training. The
        same holds for collectives in some steps only, if the script counts batches: a newcomer counts from a different
        one. The connections of process groups that the script makes are not cut, so a rank could wait there without end
        for a peer that has moved on.
        """
        if dist.has_other_groups(self.group.world):
            return "the script makes process groups of its own"
        if self.last_step.changes_early:
            return "the script changes parameters before the optimizer's step"
        if self._own.differ:
            return "the script makes collectives of its own in some steps only"
        was_checked, self._is_checked = self._is_checked, True
        before = dist.collectives_of_script() if self._own.before_first is None else self._own.before_first
        if was_checked or not before:
            return ""
        return "the script makes collectives of its own before its first step"

    def begin_step(self, is_first: bool) -> None:
        """Record that the first batch of a step is about to be fetched; `is_first`: the first step of a pass."""
        is_lost = self._begin_step(is_first)
        self.last_step.begin(is_lost=is_lost)

    def begin_step_with_pass(self, is_first: bool) -> None:
        """Record that the model is about to be called, by a script that takes no batches from the run; a step begins
        with the first pass after the step before. `is_first`: the first step of an epoch, or in another group."""
        if not self.last_step.is_begun:
            is_lost = self._begin_step(is_first)
            self.last_step.begin_with_pass(is_lost=is_lost)

    def _begin_step(self, is_first: bool) -> bool:
        is_lost = self.is_lost
        self.group.thread = threading.get_ident()
        self._own.begin_step(dist.collectives_of_script(), is_comparable=not is_first and not is_lost)
        return is_lost

    def wrap(self, model: torch.nn.Module, buckets: Buckets | None) -> ElasticDataParallel:
        """Return the model to call, the same one in every generation.

        `buckets` are those of the checkpoint that the run resumed from, if any.
        """
        if self._model is None:
            self.group.watch.buckets = self.group.watch.buckets or buckets
            self._model = ElasticDataParallel(model, self.group.watch, init_sync=not self._is_equal)
            self._model.examples = self.examples if is_compiled(model) else None
            self._model.on_pass = self.on_pass
            self.last_step.take_over()
        return self._model

    def enter(self, model: torch.nn.Module) -> State | None:
        """Enter this process's first group; return the state of its ranks, or None if they have none.

        `model` is the model to call. If the ranks train already, it is moved to this rank's device and compiled first.
        """
        if self.examples.calls and is_compiled(model):
            with self.group.alone() as watch:
                model.to(self.group.world.device)
                warm_up(model, self.examples, watch)
        agreement, taken = self.group.enter(Standing(), dict)
        self._note(agreement)
        return taken

    def enter_next(
        self, cursor: Cursor, state: Callable[[], Mapping[str, Any]], *, is_torn: bool = False
    ) -> State | None:
        """Enter the next group from the end of the last step; return a newer state if another rank has one.

        `is_torn`: the lost step cannot be repeated here. Either it has fewer batches than others, and a script that
        counts batches to tell when a step is due would make the next one too early; or nothing has told where it began.
        Does not return if this process has to be replaced.
        """
        if self.group.world.device.type == "cuda" and self._own.has_made_any(dist.collectives_of_script()):
            self.group.decline("a GPU does not tell whether a collective of the script's own was aborted")
        is_whole = self.last_step.restore(self._gate.undone) & self._gate.undo() and not is_torn
        has_state = is_whole and self._state_counts
        mine = Standing(cursor.step, cursor.epoch, has_state=has_state, restarts=self.restarts)
        agreement, taken = self.group.enter_next(mine, state)
        if agreement.source is None:
            self.group.decline("no rank has the state of a whole step")
        if is_whole and taken is not None and cursor.epoch != agreement.newest.epoch:
            self.group.decline("the others have gone on to the next epoch")
        self._note(agreement)
        self._gate.mark()
        if self._model is not None:
            self._model.reform()
        return taken

    def start_again(self, *, has_state: bool = True) -> NoReturn:
        """Have all ranks start again from this step, those that wait for this one in the next step too.

        `has_state`: false if the state of another rank counts. Raises GroupOver: the ranks have to meet in another
        group first.
        """
        self.restarts, self._state_counts = True, has_state
        self.group.regroup("the script goes by a count of its own")

    def share_buffers(self) -> None:
        """Take over rank 0's buffers at the end of a step, on all ranks. Raises RuntimeError if a peer is lost."""
        if self._model is not None:
            self._model.share_buffers()

    def complete(self, step: Callable[[], None]) -> bool:
        """End a step that was made, and call `step()`; return False if the group is over or a peer is lost.

        Raises any other error of `step`.
        """
        self.last_step.end()
        self._gate.mark()
        self._own.end_step(dist.collectives_of_script())
        try:
            step()
        except GroupOver:
            return False
        except RuntimeError as error:
            if not dist.is_of_collective(error) and not self.group.is_over:
                raise  # an error of the script, such as a NaN loss, would recur in any other group
            self.group.watch.note(error)
            return False
        return not self.group.is_over

    def _rebuild_buckets(self) -> None:
        if self._model is not None:
            self._model.rebuild_buckets()

    def _note(self, agreement: Agreement) -> None:
        self._own.enter_group()
        self.examples.enter_group()
        self.group.has_state = agreement.source is not None
        self.restarts, self._state_counts = agreement.restarts, True
        self._is_equal |= self.group.has_state
