"""What is done about a loss that is no finite number: warn, stop the job, or go back to before it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum

from elasticctl_store.errors import NotFiniteError, TrainError
from elasticctl_train import dist
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from elasticctl_train.data.plan import Cursor
from elasticctl_train.metrics import LOSS
from elasticctl_train.progress import Progress

log = logging.getLogger("elasticctl_train")

ON_NAN_VARIABLE = "ELASTICCTL_ON_NAN"


class OnNan(StrEnum):
    """What $ELASTICCTL_ON_NAN may say. The default, `warn`, lets training go on."""

    WARN = "warn"
    STOP = "stop"
    ROLLBACK = "rollback"

    @classmethod
    def from_environment(cls) -> OnNan:
        """Raises TrainError for any other word."""
        given = os.environ.get(ON_NAN_VARIABLE) or cls.WARN
        try:
            return cls(given)
        except ValueError:
            choices = f"{cls.WARN}, {cls.STOP} or {cls.ROLLBACK}"
            raise TrainError(f"${ON_NAN_VARIABLE}={given}: give {choices}") from None


class LossGuard:
    """Watches the losses that this rank has told `progress`."""

    def __init__(self, progress: Progress) -> None:
        self._choice, self._progress = OnNan.from_environment(), progress
        self._has_warned = False
        self._lost: tuple[int, str, Cursor] | None = None

    @property
    def goes_back(self) -> bool:
        """Is a loss that is no finite number undone?"""
        return self._choice is OnNan.ROLLBACK

    def refuse_rollback(self, why: str) -> None:
        """For users that cannot skip batches: raises TrainError where that may be asked for."""
        if self.goes_back:
            instead = f"{OnNan.STOP} or {OnNan.WARN}"
            raise TrainError(
                f"${ON_NAN_VARIABLE}={OnNan.ROLLBACK}: {why}, so no batches can be skipped. FIX: choose {instead}"
            )

    def look(self, cursor: Cursor) -> None:
        """As `heed`, of every loss up to this step: some may not have been read from the device yet."""
        self._progress.metrics.look()
        self.heed(cursor)

    def heed(self, cursor: Cursor) -> None:
        """Warn once, on rank 0, if the loss is no finite number. Raises NotFiniteError where that ends the job."""
        lost = self._progress.metrics.not_finite.get(LOSS)
        if lost is None:
            self._has_warned, self._lost = False, None
            return
        self._lost = self._lost or (lost.step, lost.value, cursor)
        if self._has_warned:
            return
        if self._choice is OnNan.STOP:
            self._tell_all(cursor)
            raise NotFiniteError(f"the loss is {lost.value} since step {lost.step}, and the job was told to stop then")
        self._has_warned = True
        if self._progress.is_main:
            log.warning("the loss is %s since step %d", lost.value, lost.step)

    def go_back_if_lost(
        self, world: dist.World, cursor: Cursor, open_checkpoints: Callable[[], Checkpointer | None]
    ) -> None:
        """All ranks: is the loss of any no finite number, and is that to be undone? Then this process ends.

        A loss that was finite again by now has harmed nothing. Raises RollbackError, or NotFiniteError.
        """
        if not self.goes_back:
            return
        self.look(cursor)
        if not any(world.highest(self._lost is not None)):
            return
        checkpoints = open_checkpoints()
        mine = None if self._lost is None else (*self._lost[:2], asdict(self._lost[2]))
        step, value, at = min((one for one in world.gather(mine) if one), key=lambda one: one[0])
        self._tell_all(cursor)
        if checkpoints is None:
            raise NotFiniteError(f"the loss is {value} since step {step}, and without a storage there is no way back")
        checkpoints.go_back(step, value, at)

    def _tell_all(self, cursor: Cursor) -> None:
        self._progress.send(cursor)
        self._progress.send_rows(surely=True)
