"""When to save, agreed over the ranks without a message in every step.

Saving "every 30 s" by each rank's own clock would have ranks disagree. So the ranks meet only at *check* steps, which
are known to all beforehand: there rank 0 says whether a save is due and which step is the next check.

The same meeting serves a notice (this group has to stop soon): the launcher makes a file appear, any rank that sees it
says so at the next check, and all stop behind that very step. Where a notice can come, checks are never far apart.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from elasticctl_train.errors import TrainError

DEFAULT_EVERY_S = 30.0
NOTICE_CHECK_S = 0.2
"""How far checks are apart where a notice can come: a message of some 0.1 ms each time."""


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Save every `every_s` seconds (30 unless told), or every `every_steps` steps instead; keep the newest commits.

    `Run.finish` saves the end in any case. The end of an epoch is no reason of its own to save: a resume is exact in
    mid-epoch too. A save that comes due while one is still being written is skipped and counted.
    """

    every_s: float | None = None
    every_steps: int | None = None
    keep_last: int = 3

    def __post_init__(self) -> None:
        if self.every_s is not None and self.every_steps is not None:
            raise TrainError("SavePolicy: give every_s or every_steps, not both")
        for name in ("every_s", "every_steps", "keep_last"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise TrainError(f"SavePolicy: {name}={value} must be greater than 0")


class Cadence:
    """Rank 0's clockwork: turns the policy into check steps."""

    def __init__(
        self, policy: SavePolicy, step: int, now_s: float | None = None, *, notice_possible: bool = False
    ) -> None:
        self._notice_possible = notice_possible
        self._every_steps = policy.every_steps
        self._every_s = policy.every_s or DEFAULT_EVERY_S
        self._saved_s = self._checked_s = time.monotonic() if now_s is None else now_s
        self._checked_step = step
        self._gap = 1
        by_clock = self._every_steps is None or notice_possible
        self.first_check = step + 1 if by_clock else _next_multiple(step, self._every_steps or 1)

    def check(self, step: int, now_s: float | None = None) -> tuple[bool, int]:
        """At a check step: is a save due, and which step is the next check.

        By time, the distance of checks doubles after a save until what is left of the interval allows no more steps.
        """
        if self._every_steps is not None and not self._notice_possible:
            return True, _next_multiple(step, self._every_steps)
        now_s = time.monotonic() if now_s is None else now_s
        step_s = (now_s - self._checked_s) / max(1, step - self._checked_step)
        self._checked_s, self._checked_step = now_s, step
        due, left = self._due(step, now_s, step_s)
        if self._notice_possible and step_s > 0:
            left = min(left, NOTICE_CHECK_S / step_s)
        self._gap = max(1, int(min(self._gap * 2, left)))
        return due, step + self._gap

    def _due(self, step: int, now_s: float, step_s: float) -> tuple[bool, float]:
        """Is a save due at this step, and in how many steps is the next."""
        if self._every_steps is not None:
            return step % self._every_steps == 0, _next_multiple(step, self._every_steps) - step
        left_s = self._every_s - (now_s - self._saved_s)
        due = left_s <= 0
        if due:
            self._saved_s, left_s = now_s, self._every_s
        return due, left_s / step_s if step_s > 0 else self._gap * 2.0


def _next_multiple(step: int, of: int) -> int:
    return (step // of + 1) * of
