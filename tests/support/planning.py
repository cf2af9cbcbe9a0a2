"""Situations for the policy."""

from __future__ import annotations

from elasticctl.planning.situation import Costs, HeldWorkers, Market, Situation, Speeds, SpotPool


def situation(
    *, time_left_s: float | None, there: int, money_left_usd: float | None = None, held: tuple[HeldWorkers, ...] = ()
) -> Situation:
    """Ten hours of work on 8 workers, one spot pool at 0.3 of on demand that is there half of the time."""
    speeds = Speeds.of({1: 1.0, 2: 1.9, 4: 3.6, 8: 6.6})
    work = 10 * 3600 * 6.6 * 0.9
    return Situation(
        work_left=work,
        saved_left=work,
        time_left_s=time_left_s,
        money_left_usd=money_left_usd,
        speeds=speeds,
        costs=Costs(),
        on_demand_usd_per_h=1.0,
        pools=(SpotPool("zone-a", 0.3, there),),
        market=Market(1.0, 1.0, 0.5, 8, 0.3),
        held=held,
    )
