"""A job's goal and its order of pools, from the flags; the goal's prices, and whether it can be met."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from elasticctl.api.errors import UsageError
from elasticctl.api.goal import Goal, PoolOrder, Prices, parse_order
from elasticctl.api.observed.cost import Rate, prices_of
from elasticctl.api.spec import ElasticJob, Manifest
from elasticctl.api.text import dollars, quote, span
from elasticctl.operations.prices import spot_basis
from elasticctl.operations.submit.job_flags import JobFlags
from elasticctl.settings.contexts import LOCAL, Context

_ZONE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_MOST_ZONES = 16
SIMULATED = {"onDemand": 1.0, "spot": 0.3, "source": "simulated"}
"""What a worker costs on this machine, per hour, so that a goal can be tried there."""


def goal_of(flags: JobFlags, *, spot: bool = True) -> dict[str, Any]:
    """`spec.goal`; empty without a goal. Raises UsageError for flags that need a goal, and for a time in the past."""
    if not flags.has_goal:
        for flag, said in (("--prefer", flags.prefer), ("--work", flags.work), ("--zones", flags.zones or None)):
            if said is not None:
                raise UsageError(f"{flag} goes with a goal. FIX: add --finish-by TIME or --budget USD")
        return {}
    if not spot:
        raise UsageError("--on-demand cannot be used with a goal, which chooses the capacity itself. FIX: leave it out")
    if flags.work == 0:
        raise UsageError("--work 0s: must be longer than 0s")
    goal = flags.as_spec()
    if flags.work is not None:
        goal["workSeconds"] = flags.work
    if flags.zones:
        goal["zones"] = list(zones_of(flags.zones))
    return goal


def zones_of(text: str) -> tuple[str, ...]:
    """us-east-1a,us-east-1b. Raises UsageError."""
    found = tuple(dict.fromkeys(text.split(",")))
    if len(found) > _MOST_ZONES or not all(map(_ZONE.fullmatch, found)):
        raise UsageError(f"--zones {quote(text)} is not a list of zones such as us-east-1a,us-east-1b")
    return found


NO_POOLS = "none"


def order_of(flags: JobFlags, context: Context) -> PoolOrder | None:
    """The order of pools on the command line, or else the context's; None if something else chooses the pools.

    Raises UsageError for flags that contradict an order on the command line.
    """
    if not flags.pools and flags.pool_wait is not None and not context.pools:
        raise UsageError("--pool-wait goes with an order of pools. FIX: add --pools spot,on-demand, for example")
    if flags.pool_wait == 0:
        raise UsageError("--pool-wait 0s: must be longer than 0s")
    others = {
        "--on-demand": not flags.spot,
        "--queue, whose flavors have an order of their own,": bool(flags.queue),
        "a goal, which chooses pools by itself,": flags.has_goal,
    }
    other = next((name for name, said in others.items() if said), "")
    if flags.pools == NO_POOLS or context.provider == LOCAL or (other and not flags.pools):
        return None
    if other:
        raise UsageError(f"--pools and {other} cannot be used together. FIX: leave one of them out")
    text, wait_s = flags.pools or context.pools, flags.pool_wait or context.pool_wait_s or None
    return parse_order(text, wait_s) if text else None


def priced_goal(goal: Mapping[str, Any], rate: Rate | None, context: Context) -> dict[str, Any]:
    """The goal with the prices of a worker, if known: the list price, and the current price on spot."""
    if not goal:
        return {}
    if rate is not None:
        source = f"{rate.instances[0]}, {rate.prices.region}; spot: {spot_basis(rate)}"
        prices: dict[str, Any] = {"onDemand": rate.low, "spot": round(rate.spot_range[0], 6), "source": source}
        return {**goal, "prices": {**prices, "date": rate.prices.date}}
    return {**goal, "prices": dict(SIMULATED)} if context.provider == LOCAL else dict(goal)


def check_goal(manifest: Manifest, now: datetime) -> Iterator[str]:
    """A remark on a job's goal before it is created. Raises UsageError if the goal cannot be met."""
    job = ElasticJob.from_manifest(manifest)
    if job.goal is None:
        return
    prices = prices_of(job)
    if job.goal.budget is not None and prices is None:
        raise UsageError(
            "--budget: no price of these machines is known."
            " FIX: --set spec.goal.prices='{onDemand: 3.06, spot: 0.92}', US dollars per worker and hour"
        )
    if prices is not None:
        dated = f", {prices.date}" if prices.date else ""
        yield (
            f"prices per worker and hour: {dollars(prices.on_demand)} on demand, {dollars(prices.spot)} on spot"
            f" ({prices.source or 'as given'}{dated})"
        )
    if job.goal.work_seconds is None:
        yield (
            "how long it takes is measured first:"
            " whether the goal can be met will be known a few minutes after the start"
        )
        return
    yield _judged(job, job.goal, prices, now)


def _judged(job: ElasticJob, goal: Goal, prices: Prices | None, now: datetime) -> str:
    from elasticctl.planning.deadline_feasibility import judge
    from elasticctl.planning.scaling_curve import Point, ScalingCurve
    from elasticctl.planning.situation import Costs, Speeds

    curve = ScalingCurve.through([Point(job.max, 1.0)])
    speeds = Speeds.of({size: curve.rate(size) for size in range(max(1, job.min), job.max + 1)})
    time_s = None if goal.finish_by is None else goal.finish_by - now.timestamp()
    per_h = (prices.on_demand, prices.spot) if prices is not None else (1.0, 0.3)
    found = judge(goal.work_seconds or 0.0, speeds, Costs(), per_h, (time_s, goal.budget))
    if found.promised:
        cost = "" if prices is None else f", where it would cost {dollars(found.within_time.usd)}"
        return f"the goal can be met on demand alone{cost}"
    money = prices is not None
    early, cheap = found.within_time, found.within_budget
    pairs = [_pair(early.time_s if time_s is None else max(time_s, early.time_s), early.usd if money else None)]
    if goal.budget is not None:
        pairs.append(_pair(cheap.time_s, max(goal.budget, cheap.usd)))
    nearest = f"goals that on-demand machines can meet: {', or '.join(dict.fromkeys(pairs))}"
    if found.possible:
        return f"the goal is not guaranteed: it is met only as long as spot machines stay; {nearest}"
    wanted = f"{span(goal.work_seconds or 0.0)} of work on {job.max} workers"
    raise UsageError(f"the goal cannot be met, not even if no spot machine is lost: {wanted}. FIX: {nearest}")


def _pair(time_s: float, usd: float | None) -> str:
    """The pair as flags: `--finish-by 7h --budget 24`."""
    minutes = max(1, math.ceil(time_s / 60 - 0.5))
    time = f"{math.ceil(minutes / 60)}h" if minutes > 300 else f"{minutes}m"
    return f"--finish-by {time}" + ("" if usd is None else f" --budget {math.ceil(usd * 100) / 100:g}")
