"""Which machines a job runs on: a deadline and a budget to meet, or an order of preference among pools of machines.

`spec.goal` comes with `status.plan`, the decisions made to meet it; `spec.pools` with `status.pools`, where its workers
are. A pool is named `CAPACITY[:TYPE][/ZONE]`, such as `spot`, `spot/zone-a`, `onDemand:g5.xlarge` or `/zone-b`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from elasticctl.api.codec import Timestamp, from_json
from elasticctl.api.errors import UsageError
from elasticctl.api.objects import as_list, as_mapping, as_text
from elasticctl.api.text import quote

SPOT, ON_DEMAND = "spot", "onDemand"
"""Kinds of capacity, as keys of `status.workerSeconds`, and the first part of a pool's name."""
MIN_USD, MAX_USD = 1e-6, 1e9
"""Amounts outside these bounds are ignored: prices are divided by each other, and JSON cannot hold an infinite cost."""
WAIT_S, RETRY_S = 600.0, 900.0
"""How long workers wait for a pool before the next one is tried, and when a better one is tried again."""


class Prefer(StrEnum):
    """What to aim for within the goal: a low cost, finishing just in time, or the earliest end within the budget."""

    COST = "cost"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices in US dollars per worker and hour, with their source and date."""

    on_demand: float = 0.0
    spot: float = 0.0
    source: str = ""
    date: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """`spec.goal`. `budget` is in US dollars (None: no limit); spot machines are used in `zones` only.

    `work_seconds` is how long training should take on the largest number of workers allowed; None: unknown.
    """

    finish_by: Timestamp | None = None
    budget: float | None = None
    prefer: Prefer = Prefer.COST
    zones: tuple[str, ...] = ()
    work_seconds: float | None = None
    prices: Prices | None = None

    @classmethod
    def from_spec(cls, data: object) -> Goal | None:
        """Read `spec.goal`, whatever it contains; None where it sets no goal."""
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
        """The names of the goal's spot pools: one for each zone, or one for all."""
        return tuple(f"{SPOT}/{zone}" for zone in dict.fromkeys(self.zones)) or (SPOT,)


def _is_amount(value: float | None) -> bool:
    return value is not None and MIN_USD <= value <= MAX_USD


def capacity_of(pool: str) -> str:
    """`spot/zone-a` -> `spot`; "" for a pool of any capacity."""
    return pool.partition("/")[0].partition(":")[0]


def type_of(pool: str) -> str:
    """`spot:g5.xlarge/zone-a` -> `g5.xlarge`; "" for a pool of any machine type."""
    return pool.partition("/")[0].partition(":")[2]


def zone_of(pool: str) -> str:
    """`spot/zone-a` -> `zone-a`; "" for a pool that is not of one zone."""
    return pool.partition("/")[2]


def pool_name(capacity: str, instance_type: str, zone: str) -> str:
    """The pool's name from its parts; "" is any."""
    return f"{capacity}{f':{instance_type}' if instance_type else ''}{f'/{zone}' if zone else ''}"


def pool_words(pool: str) -> str:
    """`spot on g5.xlarge in zone-a`."""
    kind = {SPOT: "spot", ON_DEMAND: "on demand", "": "any capacity"}.get(capacity_of(pool), capacity_of(pool))
    on, zone = type_of(pool), zone_of(pool)
    return f"{kind}{f' on {on}' if on else ''}{f' in {zone}' if zone else ''}"


@dataclass(frozen=True, slots=True)
class PoolOrder:
    """`spec.pools`: the names of the pools to take machines from, best first.

    The next pool is tried once workers have waited `wait_seconds` for a machine; a better pool that had none is tried
    again after `retry_seconds`.
    """

    order: tuple[str, ...]
    wait_seconds: float = WAIT_S
    retry_seconds: float = RETRY_S

    @classmethod
    def from_spec(cls, data: object) -> PoolOrder | None:
        """Read `spec.pools`, whatever it contains; None where it names no pool."""
        said = as_mapping(data)
        parts = [[as_text(as_mapping(one).get(key)) for key in _PARTS] for one in as_list(said.get("order"))]
        order = tuple(dict.fromkeys(pool_name(*part) for part in parts if any(part)))
        wait_s, retry_s = (_time(said.get(key), default) for key, default in _TIMES)
        return cls(order, wait_s, retry_s) if order else None

    def as_spec(self) -> dict[str, object]:
        """Return the value of `spec.pools`."""
        named = [(capacity_of(pool), type_of(pool), zone_of(pool)) for pool in self.order]
        pools = [{key: value for key, value in zip(_PARTS, parts, strict=True) if value} for parts in named]
        times = zip(_TIMES, (self.wait_seconds, self.retry_seconds), strict=True)
        said = {key: int(value) if value.is_integer() else value for (key, default), value in times if value != default}
        return {"order": pools, **said}

    @property
    def words(self) -> str:
        """`spot in zone-a, then spot, then on demand`."""
        return ", then ".join(map(pool_words, self.order))


def parse_order(text: str, wait_s: float | None = None) -> PoolOrder:
    """`spot/us-east-1a,spot,on-demand:g5.xlarge` as typed on the command line. Raises UsageError."""
    named = [part.strip() for part in text.split(",")]
    for part in named:
        if not _POOL.fullmatch(part):
            raise UsageError(
                f"{quote(part)} is not a pool. FIX: give spot or on-demand, with :TYPE or /ZONE where it matters, such"
                " as spot/us-east-1a or on-demand:g5.xlarge"
            )
    order = tuple(dict.fromkeys(part.replace("on-demand", ON_DEMAND, 1) for part in named))
    if len(order) > _MOST_POOLS:
        raise UsageError(f"{len(order)} pools are too many. FIX: give up to {_MOST_POOLS}")
    return PoolOrder(order, WAIT_S if wait_s is None else float(wait_s))


_POOL = re.compile(
    r"(?=.)(spot|on-demand|onDemand|)(:[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?(/[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)?"
)
_MOST_POOLS = 8
_PARTS = ("capacity", "instanceType", "zone")
_TIMES = (("waitSeconds", WAIT_S), ("retrySeconds", RETRY_S))


def _time(value: object, default: float) -> float:
    is_time = isinstance(value, int | float) and not isinstance(value, bool) and 1 <= value <= 315_360_000
    return float(value) if is_time else default  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """What is known of a pool of spot machines at the time `at`: whether it is `up`, that is, has machines.

    `up_hours` and `away_hours` are how long it was up or away, `up_ends` and `away_ends` how often that ended, by age;
    older observations count for less. Since `short_since` it has had no more than `short` machines (None: as many as
    wanted).
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
class PoolsStatus:
    """`status.pools`: which pool a job with an order of pools requests machines from, and what is known of each pool.

    `waiting` workers have waited for a machine of `pool` since `since`; the pool `then` is tried at `then_at` (0 and
    None: no worker waits). Since `trying`, replacements for workers in worse pools have been requested in `pool`, while
    those workers train on. `back_to` is a better pool than the one some workers are in; it is tried again at `back_at`,
    or, where that is None, not tried for the reason `stays`. Only `short` and `short_since` are used of each of the
    `seen`: workers gave up waiting for that pool then.
    """

    pool: str = ""
    waiting: int = 0
    since: Timestamp | None = None
    then: str = ""
    then_at: Timestamp | None = None
    trying: Timestamp | None = None
    back_to: str = ""
    back_at: Timestamp | None = None
    stays: str = ""
    seen: tuple[PoolStatus, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanStep:
    """One decision: how many workers run on spot machines of a pool, how many on demand, and why."""

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
    """`status.plan`: what the policy has decided, why, and what it expects. The next decision is due at `again_at`.

    `reason` is one word, `message` a sentence without a subject. `promised`: the deadline and the budget are kept even
    if no spot machine stays. `measured`: the rates were measured in this job. It should end at `finish_at`, give or
    take `spread_s`, and cost `cost` US dollars, of which `spent` are spent; at `on_demand_at`, on-demand machines take
    over if there are no spot machines by then. `probing`: one spot worker only waits, to notice when there are machines
    again. `basis` is what the decision rests on. `costs` are the measured seconds that a start, a planned change and a
    loss take, and those between saves; `rates` are steps per second by size, smallest first. `steps` are the last
    decisions.
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
    rates: tuple[float, ...] = ()
    steps: tuple[PlanStep, ...] = ()

    @property
    def workers(self) -> int:
        """The number of workers wanted now."""
        return self.spot + self.on_demand

    def of(self, pool: str) -> int:
        """The number of workers wanted in this pool."""
        return self.on_demand if pool == ON_DEMAND else self.spot if pool == self.pool else 0

    @property
    def words(self) -> str:
        """The workers wanted now: `6 on spot in zone-b and 2 on demand`."""
        zone, spot = zone_of(self.pool), self.spot - self.probing
        parts = [f"{spot} on spot{f' in {zone}' if zone else ''}" if spot > 0 else ""]
        parts.append(f"{self.on_demand} on demand" if self.on_demand else "")
        return " and ".join(part for part in parts if part) or "no workers"
