"""Whether a deadline and a budget can be met, judged before the job runs and while it runs, and the nearest that can.

Only on-demand machines support a promise, which includes a start, the loss of one machine, and full payment for every
machine. Spot machines that come immediately and stay are the best case: what they cannot do in time is impossible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from elasticctl.planning.deadline_fallback import fallback_s, spare_s
from elasticctl.planning.deadline_policy import aim_h, table_for, weights_of
from elasticctl.planning.situation import Costs, PlannedSize, Situation, SizeReason, Speeds


@dataclass(frozen=True, slots=True)
class PricedSize:
    """A number of workers, the time until they are done, and the price."""

    workers: int
    time_s: float
    usd: float


@dataclass(frozen=True, slots=True)
class Feasibility:
    """`promised`: on-demand machines keep both. `possible`: spot machines might.

    `within_time` is the cheapest promise for the deadline (else the earliest there is), `within_budget` the earliest
    for the budget (else the cheapest there is).
    """

    promised: bool
    possible: bool
    within_time: PricedSize
    within_budget: PricedSize


def judge(
    work: float, speeds: Speeds, costs: Costs, usd_per_h: tuple[float, float], limits: tuple[float | None, float | None]
) -> Feasibility:
    """Judge `limits`, seconds and US dollars (None: no limit), at prices on demand and on spot per worker and hour."""
    time_s, usd = limits
    on_demand = _offers(work, speeds, costs, usd_per_h[0], spare_s(costs))
    best = _offers(work, speeds, replace(costs, start_s=0.0, reform_s=0.0), usd_per_h[1], 0.0)

    def in_time(offer: PricedSize) -> bool:
        return time_s is None or offer.time_s <= time_s

    def affordable(offer: PricedSize) -> bool:
        return usd is None or offer.usd <= usd

    return Feasibility(
        promised=any(in_time(offer) and affordable(offer) for offer in on_demand),
        possible=any(in_time(offer) and affordable(offer) for offer in best),
        within_time=min(on_demand, key=lambda o: (not in_time(o), o.usd if in_time(o) else o.time_s)),
        within_budget=min(on_demand, key=lambda o: (not affordable(o), o.time_s if affordable(o) else o.usd)),
    )


def _offers(work: float, speeds: Speeds, costs: Costs, usd_per_h: float, more_s: float) -> list[PricedSize]:
    found = []
    for workers, per_s in zip(speeds.sizes, speeds.per_s, strict=True):
        takes_s = costs.start_s + costs.reform_s + work / per_s + more_s
        usd = workers * usd_per_h * (max(takes_s, costs.billed_s) + costs.billed_s) / 3600
        found.append(PricedSize(workers, takes_s, usd))
    return found


_RATE_ERROR = 0.05
"""A measured rate is taken to be as wrong as that."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The rest should take `hours`, give or take `spread_h`, and cost `usd`; None: unknown.

    `on_demand_in_s` is the time until on-demand machines take over if there are no spot machines.
    """

    hours: float | None = None
    spread_h: float = 0.0
    usd: float | None = None
    on_demand_in_s: float | None = None


def expect(now: Situation, decision: PlannedSize) -> Expected:
    """The expected outcome of a decision, assuming that the policy continues in the same way."""
    choice = decision.choice
    if now.work_left <= 0:
        return Expected(0.0, usd=0.0)
    if decision.reason in (SizeReason.SPENT, SizeReason.POOR):
        return Expected()
    if decision.reason is SizeReason.CHEAPEST:
        table, weights = table_for(now), weights_of(now)
        time_h = aim_h(now, table, weights)
        hours, usd = table.hours(weights, now.work_left, time_h), table.usd(weights, now.work_left, time_h)
    else:
        hours = (
            fallback_s(now, now.work_left, choice.workers, now.speeds.rate(choice.workers), now.held, spare=False)
            / 3600
        )
        usd = choice.workers * now.on_demand_usd_per_h * hours
    losses = now.market.losses_per_h * hours if choice.spot or not choice.workers else 0.0
    lost_h = (now.costs.start_s + now.costs.save_every_s / 2) / 3600
    spread_h = math.hypot(math.sqrt(losses) * lost_h, _RATE_ERROR * hours)
    takes_over = None
    if now.time_left_s is not None and choice.on_demand < now.speeds.most and decision.reason is SizeReason.CHEAPEST:
        fastest_s = fallback_s(now, now.saved_left, now.speeds.most, now.speeds.per_s[-1], (), spare=True)
        takes_over = max(0.0, now.time_left_s - fastest_s)
    return Expected(hours, spread_h, usd, takes_over)
