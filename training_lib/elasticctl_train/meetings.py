"""The steps at which all ranks meet: they agree whether to save or to stop, save or copy, and agree when to meet again.

`save_policy` decides when; `Snapshot` is what is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticctl_protocol.reports import CopiedReport
from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
from elasticctl_train.checkpoint.memory.copies import Copies
from elasticctl_train.data.sample_order import Cursor
from elasticctl_train.dist import World
from elasticctl_train.launcher_reports import Progress, Reporter
from elasticctl_train.non_finite_loss import LossGuard
from elasticctl_train.run_storage import RunStorage
from elasticctl_train.save_policy import Cadence, SavePolicy


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What to save now: `state` is the same on all ranks, `local` is this rank's own (see `Checkpointer.save`).

    `parameters` names the tensors in it that should contain no NaN or infinity, `until_step` the parts that belong to
    optimizers.
    """

    state: Mapping[str, Any]
    local: Mapping[str, Any]
    rank_0_only: Collection[str] = field(default_factory=set)
    parameters: Collection[str] = ()
    until_step: Collection[str] = ()


class Meetings:
    """When this rank meets the others, and what is saved there.

    `saved` is where training was at the newest save of this incarnation.
    """

    def __init__(
        self,
        storage: RunStorage,
        policy: SavePolicy,
        snapshot: Callable[[], Snapshot],
        losses: LossGuard,
        progress: Progress,
        reporter: Reporter,
    ) -> None:
        """`snapshot()` returns what to save; no save has a loss that `losses` refuses."""
        self._storage, self._policy, self._snapshot = storage, policy, snapshot
        self._losses, self._progress, self._reporter = losses, progress, reporter
        self._cadence = Cadence(policy, 0)
        self._next = 0
        self._is_prepared = self._owes_save = False
        self._reported_copies = "", 0
        self.saved = Cursor()

    def start_at(self, cursor: Cursor, *, notice_possible: bool) -> None:
        """Start or resume training here."""
        start = self._storage.start
        is_saved = start.restored is not None and not (start.origin or start.is_copy)
        self.saved = cursor if is_saved else Cursor()  # what another rank has handed over may not be saved here yet
        self._cadence = Cadence(
            self._policy, cursor.step, notice_possible=notice_possible, hazard=lambda: self._storage.hazard
        )
        self._next = self._cadence.first_check

    def move(self, cursor: Cursor) -> None:
        """Continue in another group, which has not taken over the storage."""
        self._is_prepared = self._owes_save = False
        self.saved, self._reported_copies = Cursor(), ("", 0)
        self._next = cursor.step + 1

    def prepare(self) -> None:
        """Get ready to save, after the first step, which has given the optimizer its state."""
        if self._is_prepared:
            return
        self._is_prepared = True
        self._storage.release_start()
        if self._storage.checkpoints is not None:
            first = self._snapshot()
            self._storage.checkpoints.prepare(first.state, local=first.local, rank_0_only=first.rank_0_only)

    def is_due(self, step: int) -> bool:
        """Return whether the ranks meet after this step."""
        return step >= self._next

    def agree(self, world: World, step: int, *, noticed: bool) -> tuple[bool, bool]:
        """Return whether all ranks save now, and whether they stop; set the step at which they meet again.

        `noticed`: this rank has notice.
        """
        due, next_check = self._cadence.check(step)
        checkpoints = self._storage.checkpoints
        if checkpoints is not None:
            due |= self._owes_save and not checkpoints.busy
            granted, self._next, stop = checkpoints.agree(due, next_check, noticed)
            self._owes_save = due and not granted and self._policy.every_steps is None
            return granted, stop
        # The storage has not been taken over yet, or nothing is saved; rank 0 says when.
        mine = (next_check, due) if world.rank == 0 else (0, 0)
        self._next, anyone_due, anyone_noticed = world.highest(*mine, noticed)
        if anyone_due and not self._storage.is_open:
            return self._take_over(world, step), bool(anyone_noticed)
        return bool(anyone_due), bool(anyone_noticed)

    def _take_over(self, world: World, step: int) -> bool:
        """Take over the storage; return True if this very step must be saved, rather than one soon after, which costs
        less."""
        checkpoints = self._storage.open(world)
        self.prepare()
        if checkpoints is not None and self._policy.every_steps is None:
            self._owes_save, self._next = True, step + 1
            return False
        return checkpoints is not None

    def save_or_copy(self, cursor: Cursor, *, due: bool) -> None:
        """Save if that is `due`; otherwise copy the state to launchers' memory, if it is time."""
        checkpoints = self._storage.checkpoints
        if due and checkpoints is not None:
            self.save(checkpoints, cursor)
        elif checkpoints is not None and checkpoints.copies is not None:
            self._copy(checkpoints, checkpoints.copies, cursor)

    def save(self, checkpoints: Checkpointer, cursor: Cursor) -> None:
        """Save this step, in the background."""
        self._losses.check_all(cursor)
        started_s = time.monotonic()
        now = self._snapshot()
        self.saved = cursor
        label = Label(cursor.step, cursor.epoch, dict(self._progress.metrics.finite), now.parameters)
        checkpoints.save(now.state, label, local=now.local, rank_0_only=now.rank_0_only, until_step=now.until_step)
        is_main = self._progress.is_main  # rank 0's interval counts
        self._cadence.saved(time.monotonic() - started_s, quietly=not is_main)

    def record_commit(self, duration_s: float) -> None:
        """Record how long a save took until its commit. May be called from another thread."""
        self._cadence.written(duration_s)

    def commit(self, checkpoints: Checkpointer, cursor: Cursor, gives_up: Callable[[], bool]) -> bool:
        """Commit this very step on all ranks; return False if that failed, or was given up after notice.

        The storage may be unavailable. A rank does not wait for it once `gives_up()`.
        """
        is_saved = self.saved == cursor
        if checkpoints.settle(gives_up, is_last=is_saved) and is_saved:
            return True
        if checkpoints.has_given_up:
            return False
        self.save(checkpoints, cursor)
        return checkpoints.settle(gives_up, is_last=True)

    def _copy(self, checkpoints: Checkpointer, copies: Copies, cursor: Cursor) -> None:
        """Copy this step's state, if all launchers are ready; report how far back a loss goes from now on."""
        if checkpoints.is_copy_granted:
            now = self._snapshot()
            label = Label(cursor.step, cursor.epoch, dict(self._progress.metrics.finite))
            checkpoints.copy(now.state, label, local=now.local, rank_0_only=now.rank_0_only, until_step=now.until_step)
        lack, steps = checkpoints.copies_lack, 0 if copies.failed else copies.steps_back
        reported_lack, reported_steps = self._reported_copies
        is_news = lack != reported_lack or not reported_steps / 2 <= steps <= reported_steps * 1.25
        if self._progress.is_main and is_news:
            self._reported_copies = lack, steps
            self._reporter.send(CopiedReport(step=copies.step, every_steps=steps, lack=lack or None))
