"""The expected outcome of a decision: when the work is done, what the rest costs, when on demand takes over."""

from __future__ import annotations

import math
from dataclasses import dataclass

from elasticctl.planning.choose_workers import aim_h, table_for, weights_of
from elasticctl.planning.on_demand_fallback import fallback_s
from elasticctl.planning.situation import PlannedSize, Situation, SizeReason

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
