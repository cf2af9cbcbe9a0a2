"""By when a job is to be done and for how much: `spec.goal`, and `status.plan`, what was decided to get there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elasticctl.api.codec import Timestamp, from_json

SPOT, ON_DEMAND = "spot", "onDemand"
"""Kinds of capacity, as keys of `status.workerSeconds`, and the first part of a pool's name."""
MAX_USD = 1e9


class Prefer(StrEnum):
    """Rather cheap, and done just in time; or rather early, as far as the budget goes."""

    COST = "cost"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars per worker and hour, where they come from, and of which day they are."""

    on_demand: float = 0.0
    spot: float = 0.0
    source: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """`spec.goal`: `budget` is in US dollars; None: no limit. `zones` are those to have spot machines in.

    `work_seconds` is how long training is expected to take on as many workers as the job may have; None: unknown.
    """

    finish_by: Timestamp | None = None
    budget: float | None = None
    prefer: Prefer = Prefer.COST
    zones: tuple[str, ...] = ()
    work_seconds: float | None = None
    prices: Prices | None = None

    @classmethod
    def from_spec(cls, data: object) -> Goal | None:
        """Read `spec.goal` of any content; None where it asks for nothing."""
        if not isinstance(data, Mapping):
            return None
        found = from_json(cls, data)
        prices = found.prices
        found = replace(
            found,
            budget=found.budget if _is_amount(found.budget) else None,
            work_seconds=found.work_seconds if _is_amount(found.work_seconds) else None,
            prices=prices if prices is not None and _is_amount(prices.on_demand) and _is_amount(prices.spot) else None,
        )
        return None if found.finish_by is None and found.budget is None else found

    @property
    def spot_pools(self) -> tuple[str, ...]:
        """The names of its spot pools: one for each zone, or one for all."""
        return tuple(f"{SPOT}/{zone}" for zone in dict.fromkeys(self.zones)) or (SPOT,)


def _is_amount(value: float | None) -> bool:
    return value is not None and 0 < value <= MAX_USD and math.isfinite(value)


def capacity_of(pool: str) -> str:
    """`spot/zone-a` -> `spot`."""
    return pool.partition("/")[0]


def zone_of(pool: str) -> str:
    """`spot/zone-a` -> `zone-a`; "" for a pool that is not of one zone."""
    return pool.partition("/")[2]


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What was seen of a pool of spot machines up to `at`: is it `up` (has machines), and for how long, in hours.

    `up_hours`, `up_ends`, `away_hours`, `away_ends` are how long it was so and how often that ended, by age; what is
    long ago counts for less. `short_since`: it had no more than `short` machines then (None: it has as many as wanted).
    """

    name: str = ""
    at: Timestamp | None = None
    up: bool = True
    age_hours: float = 0.0
    up_hours: tuple[float, ...] = ()
    up_ends: tuple[float, ...] = ()
    away_hours: tuple[float, ...] = ()
    away_ends: tuple[float, ...] = ()
    short: int = 0
    short_since: Timestamp | None = None


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One decision: so many workers on spot machines of a pool, so many on demand, and why."""

    at: Timestamp | None = None
    pool: str = ""
    spot: int = 0
    on_demand: int = 0
    message: str = ""

    @property
    def workers(self) -> int:
        """Both together."""
        return self.spot + self.on_demand


@dataclass(frozen=True, slots=True)
class PlanStatus:
    """`status.plan`: what the policy has decided, why, and what it expects. Decided again at `again_at`.

    `reason` is one word, `message` a sentence without a subject. `promised`: deadline and budget are kept whatever
    happens to spot machines. `measured`: by rates of this job's own. `finish_at` is expected give or take `spread_s`,
    for `cost` US dollars in all, `spent` of them by now; `on_demand_at` is when on-demand machines take over if spot
    machines stay away. `probing`: one of the spot workers only waits to see when there are machines again. `basis` is
    what it was decided from; `costs` are what a start, a planned change, a loss and the time between saves were
    measured at, in seconds. `steps` are the last decisions.
    """

    at: Timestamp | None = None
    again_at: Timestamp | None = None
    basis: str = ""
    pool: str = ""
    spot: int = 0
    on_demand: int = 0
    probing: bool = False
    reason: str = ""
    message: str = ""
    promised: bool = False
    measured: bool = False
    finish_at: Timestamp | None = None
    spread_s: float = 0.0
    cost: float | None = None
    spent: float | None = None
    on_demand_at: Timestamp | None = None
    pools: tuple[PoolStatus, ...] = ()
    costs: tuple[float, ...] = ()
    steps: tuple[PlanStep, ...] = ()

    @property
    def workers(self) -> int:
        """As many as it wants now."""
        return self.spot + self.on_demand

    def of(self, pool: str) -> int:
        """How many of this pool."""
        return self.on_demand if pool == ON_DEMAND else self.spot if pool == self.pool else 0

    @property
    def words(self) -> str:
        """`6 on spot in zone-b and 2 on demand`: what it wants now."""
        zone, spot = zone_of(self.pool), self.spot - self.probing
        parts = [f"{spot} on spot{f' in {zone}' if zone else ''}" if spot > 0 else ""]
        parts.append(f"{self.on_demand} on demand" if self.on_demand else "")
        return " and ".join(part for part in parts if part) or "no workers"
