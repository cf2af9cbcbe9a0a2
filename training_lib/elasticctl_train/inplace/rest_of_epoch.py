"""Brings a loop that counts batches itself back to those that it has left because others came twice.

A loop may take as many batches from a loader as `len` has said before. If a step is lost meanwhile, its batches come
again, and the loop ends when as many are left. A rank that joined later was told a `len` that is as much smaller, so
all ranks leave the loop after the same step. `Run.epochs` then begins the same epoch again, over its rest, and what the
script has done since that step is undone: it will do so at the end of the epoch.
"""

from __future__ import annotations

import logging

from elasticctl_train.data.sample_order import Cursor, EpochPlan, Feed
from elasticctl_train.inplace.atomic_steps import LastStep

log = logging.getLogger("elasticctl_train")


class RestOfEpoch:
    """What is left of the epoch that `feed` hands out; `last_step` is None if no step is ever repeated."""

    def __init__(self, feed: Feed, last_step: LastStep | None) -> None:
        self._feed, self._last_step = feed, last_step

    def keep(self, plan: EpochPlan | None, cursor: Cursor) -> None:
        """Copy the state if this is where a loop that counts ends. Call it after each step."""
        if self._last_step is not None and self._is_as_repeated(plan, cursor):
            self._last_step.begin(is_lost=True)

    def is_left(self, plan: EpochPlan | None, cursor: Cursor) -> bool:
        """True if the script has left its loop where one that counts ends."""
        return not self._feed.is_done and self._is_as_repeated(plan, cursor)

    def go_back(self, cursor: Cursor, *, is_main: bool) -> bool:
        """Undo what the script has done since its last step; return False if it has changed parameters."""
        if is_main:
            log.info(
                "epoch %d goes on with the batches that are left (%d): the script counts batches itself, and has "
                "counted those twice whose steps were repeated because a worker was lost",
                cursor.epoch,
                self._feed.repeated,
            )
        self._feed.take()
        self._feed.repeated = 0
        return self._last_step is None or self._last_step.restore()

    def warn(self) -> None:
        """Say that the rest is not trained on, because the script ends."""
        log.warning(
            "the last batches of the data (%d) are not trained on: the script counts batches itself, and has counted "
            "those twice whose steps were repeated because a worker was lost. FIX: put the loop into `for epoch in "
            "run.epochs(…)`, or leave it when run.loader ends",
            self._feed.repeated,
        )

    def _is_as_repeated(self, plan: EpochPlan | None, cursor: Cursor) -> bool:
        return plan is not None and 0 < self._feed.repeated == plan.count(cursor.position)
