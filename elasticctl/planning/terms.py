"""What the policy is told, and what it answers. Work is in any unit; money in US dollars; no clock is read."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

ON_DEMAND = ""
"""The name of the pool of on-demand machines, beside the names of spot pools."""
AGES_H = (0.0, 1.0, 4.0)
"""From each of these ages on, hazards are others: machines that have lasted tend to last."""
LEAST_LOOK_S = 1.0
"""A decision cannot be followed by the next one any sooner."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Work per second by number of workers, each size faster than the one before; at least one."""

    sizes: tuple[int, ...]
    per_s: tuple[float, ...]

    @classmethod
    def of(cls, rates: Mapping[int, float]) -> Speeds:
        """The sizes worth having: one that is no faster than a smaller one is left out. ValueError without any."""
        kept: list[tuple[int, float]] = []
        for workers, rate in sorted(rates.items()):
            if workers < 1 or not 0 < rate < math.inf:
                raise ValueError(f"{workers} workers with a rate of {rate}: both have to be above 0")
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
        """Work per second of so many workers; between two sizes, and below the smallest, in proportion."""
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

    `start_s`: from asking for a worker until it could train, paid for; `reform_s`: how long the group stands still when
    workers join or leave as planned; `loss_s`: when some are lost and others remain. If nobody remains, up to
    `save_every_s` of work is done again, and the rest waits for a start. A machine is paid for `billed_s` at least.
    """

    start_s: float = 180.0
    reform_s: float = 10.0
    loss_s: float = 30.0
    save_every_s: float = 300.0
    billed_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Pool:
    """Spot machines of one kind in one place: how many the job could have there now, those it has included."""

    name: str
    usd_per_h: float
    there: int


@dataclass(frozen=True, slots=True)
class Market:
    """What is expected of the spot pools together: whether any of them has machines.

    `leaves` and `returns`: how often that ends, and how often it comes back, as multiples of `belief`'s guess.
    `losses_per_h`: how often the pool that is in use is taken away. `depth`: workers to be had while there are any.
    `since_h`: how long it has been as it is now.
    """

    leaves: float
    returns: float
    losses_per_h: float
    depth: int
    usd_per_h: float
    since_h: float = 0.0


@dataclass(frozen=True, slots=True)
class Held:
    """Workers that the job has in a pool, and pays for; `ready_in_s` is 0 for those that train or could."""

    pool: str
    workers: int
    ready_in_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """Everything a decision rests on.

    `saved_left`: what would be left to do if all workers were lost now. `time_left_s`, `money_left_usd`: None without a
    limit. `soon`: rather early than cheap, as far as the money goes. `blind`: whether a pool has machines is seen only
    while some are asked for, so there is no waiting for better ones while there are any. `look_s`: at the latest then,
    or as soon as anything changes, the policy is asked again.
    """

    work_left: float
    saved_left: float
    time_left_s: float | None
    money_left_usd: float | None
    speeds: Speeds
    costs: Costs
    on_demand_usd_per_h: float
    pools: tuple[Pool, ...]
    market: Market
    held: tuple[Held, ...] = ()
    soon: bool = False
    blind: bool = False
    look_s: float = 300.0

    def ready(self, pool: str) -> int:
        """Workers of a pool that train or could."""
        return sum(held.workers for held in self.held if held.pool == pool and held.ready_in_s <= 0)

    def workers(self, pool: str) -> int:
        """Workers of a pool, those included that start."""
        return sum(held.workers for held in self.held if held.pool == pool)


@dataclass(frozen=True, slots=True)
class Choice:
    """So many workers of a spot pool, and so many on demand."""

    pool: str = ON_DEMAND
    spot: int = 0
    on_demand: int = 0

    @property
    def workers(self) -> int:
        """Both together."""
        return self.spot + self.on_demand

    def of(self, pool: str) -> int:
        """How many of this pool, or of `ON_DEMAND`."""
        if pool == ON_DEMAND:
            return self.on_demand
        return self.spot if pool == self.pool else 0


class Reason(Enum):
    """Why this many."""

    DONE = "nothing is left to do"
    CHEAPEST = "the least expected cost"
    DEADLINE = "from now on, only on-demand machines can meet the deadline"
    LATE = "the deadline cannot be met: as fast as the budget allows"
    POOR = "the budget is too small for on-demand machines: spot machines only"
    SPENT = "the budget is spent"


@dataclass(frozen=True, slots=True)
class Decision:
    """What to have now. Ask again in `again_s`, and as soon as anything changes.

    `kept`: the deadline and the budget are both kept, whatever happens to spot machines.
    """

    choice: Choice
    reason: Reason
    again_s: float
    kept: bool
