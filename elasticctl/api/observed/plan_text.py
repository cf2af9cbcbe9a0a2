"""A job's goal and its plan, or its order of pools, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from elasticctl.api.goal import Goal, PlanStatus, PlanStep, PoolsStatus, capacity_of, pool_words, zone_of
from elasticctl.api.observed.cost import prices_of, spent_usd, worker_seconds
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.text import dollars, span

_WEEK_S = 6 * 86_400.0


def goal_words(goal: Mapping[str, Any]) -> str:
    """`done by Fri 2026-11-27 18:00 for $200.00 at most`, for a manifest's `spec.goal`, whatever it contains."""
    found = Goal.from_spec(goal) or Goal()
    parts = ["" if found.finish_by is None else f"done by {datetime.fromtimestamp(found.finish_by):%a %Y-%m-%d %H:%M}"]
    parts.append("" if found.budget is None else f"for {dollars(found.budget)} at most")
    return " ".join(part for part in parts if part)


def outlook_text(job: ElasticJob, now: float) -> str:
    """`on track: Thu 14:10 ± 40m, $83.10 of $120.00; now 6 on spot in zone-b; on demand from 16:20 if spot stays away`.

    "" for a job without a goal, before its first plan and after its end.
    """
    plan = job.status.plan
    if job.goal is None or plan is None or job.status.phase.terminal:
        return ""
    parts = [
        f"{_verdict(job, plan)}: {_finish(plan, now)}{_money(job, plan, now)}",
        f"now {plan.words}" if plan.workers > plan.probing else "waits for spot machines" if plan.probing else "",
    ]
    if plan.on_demand_at is not None and plan.on_demand_at > now:
        parts.append(f"on demand from {moment(plan.on_demand_at, now)} if spot stays away")
    return "; ".join(part for part in parts if part)


def pools_text(job: ElasticJob, now: float) -> str:
    """`2 on spot, 2 on demand; 1 waits for spot since 14:05, 4m ago; on demand is asked at 14:15`, and the way back.

    "" for a job without an order of pools, and for one that has ended or is suspended.
    """
    pools = job.status.pools
    if pools is None or job.status.phase.terminal or job.suspend:
        return ""
    present = [worker for worker in job.status.workers if worker.cause is None and not worker.removal and worker.pool]
    held = Counter(worker.pool for worker in present if worker.node or worker.phase == PodPhase.RUNNING)
    placed = ", ".join(f"{count} {_at_pool(pool)}" for pool, count in held.items())
    return "; ".join(part for part in (placed, pools_outlook(pools, now)) if part)


def pools_outlook(pools: PoolsStatus, now: float) -> str:
    """Which pool workers wait for, since when, and which one is tried next and when; "" if none waits."""
    waits = ""
    if pools.since is not None:
        workers = "1 waits" if pools.waiting == 1 else f"{pools.waiting} wait"
        waits = (
            f"{workers} for {pool_words(pools.pool)} since {moment(pools.since, now)}, {span(now - pools.since)} ago"
        )
    if pools.trying is not None:
        until = f" until {moment(pools.then_at, now)}" if pools.then_at is not None else ""
        trial = f"{pool_words(pools.pool)} is tried again{until}, while the workers elsewhere go on"
        return "; ".join(part for part in (waits, trial) if part)
    if waits and pools.then and pools.then_at is not None:
        return f"{waits}; {pool_words(pools.then)} is asked at {moment(pools.then_at, now)}"
    if not waits and pools.stays:
        return f"not moved to {pool_words(pools.back_to)}: {pools.stays}"
    if not waits and pools.back_at is not None:
        return f"{pool_words(pools.back_to)} is tried again at {moment(pools.back_at, now)}"
    return waits


def _at_pool(pool: str) -> str:
    words = pool_words(pool)
    return words if words.startswith("on ") else f"on {words}"


def _verdict(job: ElasticJob, plan: PlanStatus) -> str:
    if job.suspend:
        return "suspended"
    if plan.reason == "Spent":
        return "out of money"
    if not plan.measured:
        return "not measured yet"
    if plan.reason == "Late":
        return "late"
    return "on track" if plan.promised else "at risk"


def _finish(plan: PlanStatus, now: float) -> str:
    if plan.finish_at is None:
        return plan.message if plan.reason == "Spent" else "no end in sight"
    return f"{moment(plan.finish_at, now)} ± {span(plan.spread_s)}"


def _money(job: ElasticJob, plan: PlanStatus, now: float) -> str:
    prices = prices_of(job)
    if prices is None or plan.reason == "Spent":
        return ""
    spent = spent_usd(worker_seconds(job, now), prices)
    budget = job.goal.budget if job.goal is not None else None
    expected = "" if plan.cost is None else f", about {dollars(plan.cost)} expected"
    return f", {dollars(spent)}" + (" so far" if budget is None else f" of {dollars(budget)}") + expected


def moment(at: float, now: float) -> str:
    """`Thu 14:10`, with the date where the weekday alone is ambiguous."""
    form = "%a %H:%M" if abs(at - now) < _WEEK_S else "%Y-%m-%d %H:%M"
    return datetime.fromtimestamp(at).strftime(form)


def step_words(step: PlanStep) -> str:
    """`4 spot (zone-b), 2 on demand`."""
    zone = zone_of(step.pool)
    spot = f"{step.spot} {capacity_of(step.pool)}{f' ({zone})' if zone else ''}" if step.spot else ""
    on_demand = f"{step.on_demand} on demand" if step.on_demand else ""
    return ", ".join(part for part in (spot, on_demand) if part) or "none"
