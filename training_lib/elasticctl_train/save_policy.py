"""When to save, agreed between the ranks without a message in every step; and which checkpoints to keep.

If each rank saved "every 30 s" by its own clock, ranks would disagree. So the ranks only meet at *check* steps, which
all of them know in advance. There, rank 0 decides whether a save is due and which step is the next check.

The same meeting handles notice (this group has to stop soon): the launcher creates a file, any rank that sees it says
so at the next check, and all ranks stop after that very step. If notice is possible, checks are never far apart.

If no interval is given, rank 0 chooses it. A save costs the time for which training is stopped; an interruption costs
half an interval of work on average; their sum is minimal at sqrt(2 x cost x mean time between interruptions) (Young, "A
first order approximation to the optimum checkpoint interval", 1974; refined by Daly in 2006). The rate of interruptions
changes with the age of the machines, so the interval is chosen again at each save (`interruptions`).
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from elasticctl_store.checkpoints.entries import Retention
from elasticctl_store.errors import TrainError
from elasticctl_train.interruptions import Hazard, unknown_hazard

log = logging.getLogger("elasticctl_train")

NOTICE_CHECK_S = 0.2
"""The time between checks if notice is possible; each costs a message of some 0.1 ms."""

SHORTEST_S, LONGEST_S = 5.0, 600.0
"""The limits of a chosen interval."""

_COSTS_KEPT = 5
_SAID_AGAIN_AT = 2.0


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Save every `every_s` seconds ("auto": as often as it pays), or every `every_steps` steps instead.

    Of the commits, the newest `keep_last` are kept; also one for every `keep_every_h` hours, and the `keep_best` best
    by `metric` (a name given to `Run.log`, or "loss"), whose `mode` is "min" or "max".

    `Run.finish` saves the end in any case. The end of an epoch is not saved specially: a run resumes exactly in the
    middle of an epoch, too. A save that is due while another is still being written is skipped and counted. Raises
    TrainError for invalid values.
    """

    every_s: float | Literal["auto"] | None = None
    every_steps: int | None = None
    keep_last: int = 3
    keep_every_h: float | None = None
    keep_best: int | None = None
    metric: str = ""
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if self.every_s is not None and self.every_steps is not None:
            raise TrainError("SavePolicy: give every_s or every_steps, not both")
        for name in ("every_s", "every_steps", "keep_last", "keep_every_h", "keep_best"):
            value = getattr(self, name)
            if value is None or (name == "every_s" and value == "auto"):
                continue
            if isinstance(value, str) or not value > 0:
                raise TrainError(f"SavePolicy: {name}={value} must be greater than 0")
        if bool(self.metric) != bool(self.keep_best):
            raise TrainError("SavePolicy: keep_best and metric go together: give both or neither")
        if self.mode not in ("min", "max"):
            raise TrainError(f'SavePolicy: mode={self.mode!r} must be "min" or "max"')

    @property
    def auto(self) -> bool:
        """Whether the interval is chosen during training, which is the default."""
        return self.every_steps is None and self.every_s in (None, "auto")

    @property
    def retention(self) -> Retention:
        """Which commits to keep."""
        every_s = None if self.keep_every_h is None else self.keep_every_h * 3600
        return Retention(self.keep_last, every_s, self.keep_best or 0, self.metric, self.mode)


def interval_s(cost_s: float, write_s: float, hazard: Hazard) -> float:
    """Return the interval between saves, in seconds, that loses the least time.

    `cost_s` is how long training is stopped for a save. Writing takes `write_s` seconds next to training; the interval
    is at least twice that, to leave training the network half the time.
    """
    return min(max(hazard.best_interval_s(cost_s), 2 * write_s, SHORTEST_S), LONGEST_S)


class Cadence:
    """Rank 0's schedule: turns the policy into check steps.

    `hazard()` returns the rate of interruptions from now on, for a policy that chooses its interval.
    """

    def __init__(
        self,
        policy: SavePolicy,
        step: int,
        now_s: float | None = None,
        *,
        notice_possible: bool = False,
        hazard: Callable[[], Hazard] = unknown_hazard,
    ) -> None:
        self._notice_possible = notice_possible
        self._every_steps = policy.every_steps
        self._every_s = SHORTEST_S if policy.auto else float(policy.every_s or 0)
        self._auto, self._hazard, self._said_s = policy.auto, hazard, 0.0
        self._costs_s: deque[float] = deque(maxlen=_COSTS_KEPT)
        self._write_s = 0.0
        self._saved_s = self._checked_s = time.monotonic() if now_s is None else now_s
        self._checked_step = step
        self._gap = 1
        by_clock = self._every_steps is None or notice_possible
        self.first_check = step + 1 if by_clock else _next_multiple(step, self._every_steps or 1)

    def saved(self, cost_s: float, *, quietly: bool = False) -> None:
        """Record that a save stopped training for `cost_s` seconds; choose a new interval if that is left to this
        class.

        The median of the last few costs is used, because the first save also touches its memory for the first time.
        A new interval that is far from the last goes to the log, unless `quietly`.
        """
        self._costs_s.append(cost_s)
        if not self._auto:
            return
        cost_s, hazard = statistics.median(self._costs_s), self._hazard()
        self._every_s = interval_s(cost_s, self._write_s, hazard)
        if not self._said_s / _SAID_AGAIN_AT <= self._every_s <= self._said_s * _SAID_AGAIN_AT:
            self._said_s = self._every_s
            log.log(
                logging.DEBUG if quietly else logging.INFO,
                "saving every %.0f s: a save stops training for %.0f ms, an interruption is expected every %.1f h",
                self._every_s,
                cost_s * 1000,
                hazard.between_s() / 3600,
            )

    def written(self, write_s: float) -> None:
        """Record that a save took `write_s` seconds from its start to its commit. May be called from another thread."""
        self._write_s = write_s

    def check(self, step: int, now_s: float | None = None) -> tuple[bool, int]:
        """At a check step: return whether a save is due, and the step of the next check.

        With an interval in time, the distance between checks doubles after a save until the rest of the interval
        permits no more steps.
        """
        if self._every_steps is not None and not self._notice_possible:
            return True, _next_multiple(step, self._every_steps)
        now_s = time.monotonic() if now_s is None else now_s
        step_s = (now_s - self._checked_s) / max(1, step - self._checked_step)
        due, left = self._due(step, now_s, step_s)
        self._checked_s, self._checked_step = now_s, step
        if self._notice_possible and step_s > 0:
            left = min(left, NOTICE_CHECK_S / step_s)
        self._gap = max(1, int(min(self._gap * 2, left)))
        return due, step + self._gap

    def _due(self, step: int, now_s: float, step_s: float) -> tuple[bool, float]:
        """Return whether a save is due at this step, and in how many steps the next one is."""
        if self._every_steps is not None:
            passed = step >= _next_multiple(self._checked_step, self._every_steps)
            return passed, _next_multiple(step, self._every_steps) - step
        left_s = self._every_s - (now_s - self._saved_s)
        due = left_s <= 0
        if due:
            self._saved_s, left_s = now_s, self._every_s
        return due, left_s / step_s if step_s > 0 else self._gap * 2.0


def _next_multiple(step: int, of: int) -> int:
    return (step // of + 1) * of
