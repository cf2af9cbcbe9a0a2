"""When to save, agreed over the ranks without a message in every step; and which checkpoints to keep.

Saving "every 30 s" by each rank's own clock would have ranks disagree. So the ranks meet only at *check* steps, which
are known to all beforehand: there rank 0 says whether a save is due and which step is the next check.

The same meeting serves a notice (this group has to stop soon): the launcher makes a file appear, any rank that sees it
says so at the next check, and all stop behind that very step. Where a notice can come, checks are never far apart.

Without an interval given, rank 0 chooses it: a save costs the time that training stands still for it, an interruption
costs on average half an interval of work, and their sum is least at sqrt(2 x cost x mean time between interruptions)
(Young, "A first order approximation to the optimum checkpoint interval", 1974; Daly refined it in 2006). The rate of
interruptions changes with the age of the machines, so the interval is chosen anew at each save (`interruptions`).
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
"""How far checks are apart where a notice can come: a message of some 0.1 ms each time."""

SHORTEST_S, LONGEST_S = 5.0, 600.0
"""Between these the interval is chosen."""

_COSTS_KEPT = 5
_SAID_AGAIN_AT = 2.0


@dataclass(frozen=True, slots=True)
class SavePolicy:
    """Save every `every_s` seconds ("auto": as often as is worth it), or every `every_steps` steps instead.

    Of the commits, the newest `keep_last` stay; also one in every `keep_every_h` hours, and the `keep_best` best by
    `metric` (a name given to `Run.log`, or "loss"), whose `mode` is "min" or "max".

    `Run.finish` saves the end in any case. The end of an epoch is no reason of its own to save: a resume is exact in
    mid-epoch too. A save that comes due while one is still being written is skipped and counted.
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
        """True where the interval is chosen during training: the default."""
        return self.every_steps is None and self.every_s in (None, "auto")

    @property
    def retention(self) -> Retention:
        """Which commits stay."""
        every_s = None if self.keep_every_h is None else self.keep_every_h * 3600
        return Retention(self.keep_last, every_s, self.keep_best or 0, self.metric, self.mode)


def interval_s(cost_s: float, write_s: float, hazard: Hazard) -> float:
    """The seconds between saves at which the least time is lost.

    `cost_s` is how long training stands still for a save. Writing takes `write_s` beside training; the interval is
    twice that at least, to leave training the network half the time.
    """
    return min(max(hazard.best_interval_s(cost_s), 2 * write_s, SHORTEST_S), LONGEST_S)


class Cadence:
    """Rank 0's clockwork: turns the policy into check steps.

    `hazard()` is how likely interruptions are from now on, for a policy that chooses its interval.
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

    def saved(self, cost_s: float) -> None:
        """Training has stood still so long for a save: chooses the interval anew where that is left to it.

        Of the last few costs the median counts: the first save also pays for memory it touches for the first time.
        """
        self._costs_s.append(cost_s)
        if not self._auto:
            return
        cost_s, hazard = statistics.median(self._costs_s), self._hazard()
        self._every_s = interval_s(cost_s, self._write_s, hazard)
        if not self._said_s / _SAID_AGAIN_AT <= self._every_s <= self._said_s * _SAID_AGAIN_AT:
            self._said_s = self._every_s
            log.info(
                "saving every %.0f s: a save stops training for %.0f ms, an interruption is expected every %.1f h",
                self._every_s,
                cost_s * 1000,
                hazard.between_s() / 3600,
            )

    def written(self, write_s: float) -> None:
        """A save took so long from its start to its commit. May be called from another thread."""
        self._write_s = write_s

    def check(self, step: int, now_s: float | None = None) -> tuple[bool, int]:
        """At a check step: is a save due, and which step is the next check.

        By time, the distance of checks doubles after a save until what is left of the interval allows no more steps.
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
        """Is a save due at this step, and in how many steps is the next."""
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
