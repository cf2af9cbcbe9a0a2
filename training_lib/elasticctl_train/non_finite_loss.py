"""What to do about a loss that is not finite: warn, stop the job, or go back to before it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import asdict

from elasticctl_protocol import variables
from elasticctl_protocol.variables import OnNan
from elasticctl_store.errors import NotFiniteError, TrainError
from elasticctl_train import dist
from elasticctl_train.checkpoint.checkpointer import Checkpointer
from elasticctl_train.data.sample_order import Cursor
from elasticctl_train.launcher_reports import Progress
from elasticctl_train.metrics import LOSS

log = logging.getLogger("elasticctl_train")


def read_choice() -> OnNan:
    """Return what $ELASTICCTL_ON_NAN chooses. Raises TrainError for any other word."""
    given = os.environ.get(variables.ON_NAN) or OnNan.WARN
    try:
        return OnNan(given)
    except ValueError:
        choices = f"{OnNan.WARN}, {OnNan.STOP} or {OnNan.ROLLBACK}"
        raise TrainError(f"${variables.ON_NAN}={given} is invalid. FIX: set it to {choices}") from None


class LossGuard:
    """Watches the losses that this rank has passed to `progress`."""

    def __init__(self, progress: Progress) -> None:
        self._choice, self._progress = read_choice(), progress
        self._has_warned = False
        self._lost: tuple[int, str, Cursor] | None = None

    @property
    def goes_back(self) -> bool:
        """Whether the run goes back to before a loss that is not finite."""
        return self._choice is OnNan.ROLLBACK

    def refuse_rollback(self, why: str) -> None:
        """Raise TrainError if going back is configured, for users of this class that cannot skip batches."""
        if self.goes_back:
            instead = f"{OnNan.STOP} or {OnNan.WARN}"
            raise TrainError(
                f"${variables.ON_NAN}={OnNan.ROLLBACK}: {why}, so no batches can be skipped. FIX: choose {instead}"
            )

    def check_all(self, cursor: Cursor) -> None:
        """Like `check`, for every loss up to this step, including those that have not been read from the device yet."""
        self._progress.metrics.read_losses()
        self.check(cursor)

    def check(self, cursor: Cursor) -> None:
        """Warn once, on rank 0, if the loss is not finite. Raises NotFiniteError if that ends the job."""
        lost = self._progress.metrics.not_finite.get(LOSS)
        if lost is None:
            self._has_warned, self._lost = False, None
            return
        self._lost = self._lost or (lost.step, lost.value, cursor)
        if self._has_warned:
            return
        if self._choice is OnNan.STOP:
            self._report_all(cursor)
            raise NotFiniteError(
                f"the loss is {lost.value} since step {lost.step}, and the job is configured to stop then"
            )
        self._has_warned = True
        if self._progress.is_main:
            log.warning("the loss is %s since step %d", lost.value, lost.step)

    def go_back_if_lost(
        self, world: dist.World, cursor: Cursor, open_checkpoints: Callable[[], Checkpointer | None]
    ) -> None:
        """On all ranks: end this process in order to go back, if the loss of any rank is not finite and that is
        configured.

        A loss that has become finite again does not count. Raises RollbackError, or NotFiniteError.
        """
        if not self.goes_back:
            return
        self.check_all(cursor)
        if not any(world.highest(self._lost is not None)):
            return
        checkpoints = open_checkpoints()
        mine = None if self._lost is None else (*self._lost[:2], asdict(self._lost[2]))
        step, value, at = min((one for one in world.gather(mine) if one), key=lambda one: one[0])
        self._report_all(cursor)
        if checkpoints is None:
            raise NotFiniteError(
                f"the loss is {value} since step {step}, and without a storage there is no checkpoint to go back to"
            )
        checkpoints.go_back(step, value, at)

    def _report_all(self, cursor: Cursor) -> None:
        self._progress.send(cursor)
        self._progress.send_rows(surely=True)
