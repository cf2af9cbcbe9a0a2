"""Whether a deadline and a budget can be met, judged before the job runs, and the nearest ones that can.

Only on-demand machines support a promise, which includes a start, the loss of one machine, and full payment for every
machine. Spot machines that come at once and stay are the best case: what they cannot do in time is impossible.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elasticctl.planning.on_demand_fallback import spare_s
from elasticctl.planning.situation import Costs, Speeds


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
