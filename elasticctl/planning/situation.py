"""The input and the output of the policy. Work is in any unit, money in US dollars; no clock is read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

ON_DEMAND = ""
"""The name of the pool of on-demand machines, next to the names of spot pools."""
AGES_H = (0.0, 1.0, 4.0)
"""Ages at which the hazard changes: machines that have lasted tend to last."""
LEAST_LOOK_S = 1.0
"""A decision cannot be followed by the next one any sooner."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Work per second by number of workers: one size or more, each faster than the one before."""

    sizes: tuple[int, ...]
    per_s: tuple[float, ...]

    @classmethod
    def of(cls, rates: Mapping[int, float]) -> Speeds:
        """Return the sizes worth having, without those no faster than a smaller one. Raises ValueError for none."""
        kept: list[tuple[int, float]] = []
        for workers, rate in sorted(rates.items()):
            if workers < 1 or not 0 < rate < math.inf:
                raise ValueError(f"{workers} workers with a rate of {rate}: both must be above 0")
            if not kept or rate > kept[-1][1]:
                kept.append((workers, rate))
        if not kept:
            raise ValueError("no size has a rate")
        return cls(tuple(workers for workers, _ in kept), tuple(rate for _, rate in kept))

    @property
    def most(self) -> int:
        """The largest size."""
        return self.sizes[-1]

    def rate(self, workers: int) -> float:
        """Work per second of a number of workers; in proportion between two sizes, and below the smallest."""
        if workers <= 0:
            return 0.0
        if workers >= self.most:
            return self.per_s[-1]
        right = bisect_right(self.sizes, workers)
        low, low_rate = (self.sizes[right - 1], self.per_s[right - 1]) if right else (0, 0.0)
        return low_rate + (self.per_s[right] - low_rate) * (workers - low) / (self.sizes[right] - low)


@dataclass(frozen=True, slots=True)
class Costs:
    """What changes cost, in seconds.

    `start_s` passes from the request for a worker until it can train, and is paid for. Training stands still for
    `reform_s` when workers join or leave as planned, and for `loss_s` when some are lost and others remain. If none
    remains, up to `save_every_s` of work is repeated, after a start. A machine is paid for at least `billed_s`.
    """

    start_s: float = 180.0
    reform_s: float = 10.0
    loss_s: float = 30.0
    save_every_s: float = 300.0
    billed_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SpotPool:
    """Spot machines of one kind in one place: how many the job could have there now, including those it has."""

    name: str
    usd_per_h: float
    there: int


@dataclass(frozen=True, slots=True)
class Market:
    """What to expect of the spot pools as a whole: whether any of them has machines.

    `leaves` and `returns` are how often the machines go away and come back, as multiples of the guesses in
    `availability`. `losses_per_h` is how often the pool in use is lost, `depth` how many workers it has while it has
    any, and `since_h` how long, in hours, the present state has lasted.
    """

    leaves: float
    returns: float
    losses_per_h: float
    depth: int
    usd_per_h: float
    since_h: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldWorkers:
    """Workers that the job has, and pays for, in a pool; `ready_in_s` is 0 once they can train."""

    pool: str
    workers: int
    ready_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a decision rests on.

    `saved_left` is the work that would remain if all workers were lost now. `time_left_s` and `money_left_usd` are None
    without a limit. `soon`: prefer an early end to a low cost, within the budget. `blind`: only a request shows whether
    a pool has machines, so the job does not wait for better ones while there are any. The policy decides again after
    `look_s` at the latest, and as soon as anything changes.
    """

    work_left: float
    saved_left: float
    time_left_s: float | None
    money_left_usd: float | None
    speeds: Speeds
    costs: Costs
    on_demand_usd_per_h: float
    pools: tuple[SpotPool, ...]
    market: Market
    held: tuple[HeldWorkers, ...] = ()
    soon: bool = False
    blind: bool = False
    look_s: float = 300.0

    def ready(self, pool: str) -> int:
        """The number of workers of a pool that can train now."""
        return sum(held.workers for held in self.held if held.pool == pool and held.ready_in_s <= 0)

    def workers(self, pool: str) -> int:
        """The number of workers of a pool, including those that are starting."""
        return sum(held.workers for held in self.held if held.pool == pool)


@dataclass(frozen=True, slots=True)
class Choice:
    """How many workers to have in a spot pool, and how many on demand."""

    pool: str = ON_DEMAND
    spot: int = 0
    on_demand: int = 0

    @property
    def workers(self) -> int:
        """Both together."""
        return self.spot + self.on_demand

    def of(self, pool: str) -> int:
        """The number of workers in this pool, or in `ON_DEMAND`."""
        if pool == ON_DEMAND:
            return self.on_demand
        return self.spot if pool == self.pool else 0


class SizeReason(Enum):
    """Why a number of workers was chosen."""

    DONE = "nothing is left to do"
    CHEAPEST = "the least expected cost"
    DEADLINE = "from now on, only on-demand machines can meet the deadline"
    LATE = "the deadline cannot be met: as fast as the budget allows"
    POOR = "the budget is too small for on-demand machines: spot machines only"
    SPENT = "the budget is spent"


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """What to have now. Decide again in `again_s`, and as soon as anything changes.

    `kept`: the deadline and the budget are both kept, even if no spot machine stays.
    """

    choice: Choice
    reason: SizeReason
    again_s: float
    kept: bool
