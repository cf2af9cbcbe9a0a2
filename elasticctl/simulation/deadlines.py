"""The results of a deadline and a budget on recorded spot machines: the policy's own decisions, from many starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from elasticctl.planning.choose_workers import decide
from elasticctl.planning.situation import PlannedSize, Situation
from elasticctl.simulation.replay import Replay, ReplayedJob, ReplayResult
from elasticctl.simulation.traces import Recording


@dataclass(frozen=True, slots=True)
class Prospect:
    """The results of all starts at one deadline (seconds) and budget (US dollars, None: no limit).

    `promised` is the share of starts at which the policy could promise both from the first moment on, and `in_time`
    that of starts that finished by the deadline. Dollars are the median and the 95th percentile, `finish_s` the median
    of those that finished (None: none did), `on_demand` the share of all paid hours.
    """

    finish_by_s: float
    budget_usd: float | None
    starts: int
    promised: float
    in_time: float
    usd: float
    usd_p95: float
    finish_s: float | None
    on_demand: float


def prospects(
    plan: ReplayedJob, recording: Recording, limits: Sequence[tuple[float, float | None]], starts: int
) -> list[Prospect]:
    """Return a prospect for each (deadline, budget). Starts are spread evenly over the recording.

    Raises ValueError if the recording is no longer than the longest deadline.
    """
    longest = max(deadline_s for deadline_s, _ in limits)
    free = recording.ticks - int(longest / recording.gap_s) - 2
    if free < 0:
        raise ValueError("the recording is shorter than the deadline")
    ticks = sorted({int((i + 0.5) * (free + 1) / starts) for i in range(starts)})
    return [
        _prospect(replace(plan, deadline_s=deadline_s, budget_usd=budget_usd), recording, ticks)
        for deadline_s, budget_usd in limits
    ]


def _prospect(plan: ReplayedJob, recording: Recording, ticks: Sequence[int]) -> Prospect:
    found: list[ReplayResult] = []
    promised = 0
    for tick in ticks:
        said: list[bool] = []

        def policy(now: Situation, said: list[bool] = said) -> PlannedSize:
            decision = decide(now)
            said.append(decision.kept)
            return decision

        found.append(Replay(plan, recording, tick, policy).run())
        promised += said[0]
    deadline_s = plan.deadline_s or 0.0
    ends = sorted(one.finished_s for one in found if one.finished_s is not None)
    usd = sorted(one.usd for one in found)
    hours = sum(one.spot_h + one.on_demand_h for one in found)
    return Prospect(
        finish_by_s=deadline_s,
        budget_usd=plan.budget_usd,
        starts=len(found),
        promised=promised / len(found),
        in_time=sum(end_s <= deadline_s + 1e-3 for end_s in ends) / len(found),
        usd=usd[len(usd) // 2],
        usd_p95=usd[min(len(usd) - 1, int(0.95 * len(usd)))],
        finish_s=ends[len(ends) // 2] if ends else None,
        on_demand=sum(one.on_demand_h for one in found) / hours if hours else 0.0,
    )
