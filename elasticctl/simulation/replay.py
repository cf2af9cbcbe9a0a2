"""Replays a job under the policy while recorded spot machines come and go, and pays for each worker until its end.

At each event (a tick of the trace, workers that become ready, the time of the next decision), machines that are gone
are lost without notice, newest first; then the policy decides, additional workers are started, and surplus workers
leave once the new ones are ready. If no worker is left after a loss, the work since the last save is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from elasticctl.planning.deadline_policy import decide
from elasticctl.planning.situation import (
    LEAST_LOOK_S,
    ON_DEMAND,
    Costs,
    HeldWorkers,
    PlannedSize,
    Situation,
    Speeds,
    SpotPool,
)
from elasticctl.simulation.traces import Recording

Policy = Callable[[Situation], PlannedSize]


@dataclass(frozen=True, slots=True)
class ReplayedJob:
    """The work to do, its deadline and its budget (None: no limit).

    `blind`: the policy sees a pool only while it requests machines there, as in a controller.
    """

    work: float
    speeds: Speeds
    costs: Costs
    on_demand_usd_per_h: float
    deadline_s: float | None = None
    budget_usd: float | None = None
    soon: bool = False
    blind: bool = False


@dataclass(slots=True)
class ReplayResult:
    """`finished_s` is None if the work was not done within the recording and budget. Hours are paid worker hours."""

    finished_s: float | None = None
    usd: float = 0.0
    spot_h: float = 0.0
    on_demand_h: float = 0.0
    losses: int = 0
    changes: int = 0
    kept: bool = True
    sizes: list[tuple[float, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Cohort:
    pool: str
    workers: int
    ready_s: float
    began_s: float
    leaves_s: float = math.inf


class Replay:
    """One run. On-demand workers are lost at `losses_s`."""

    def __init__(
        self, plan: ReplayedJob, recording: Recording, first_tick: int, policy: Policy, losses_s: Sequence[float] = ()
    ) -> None:
        self._plan, self._recording, self._first, self._policy = plan, recording, first_tick, policy
        self._prices = {trace.name: recording.usd_per_h for trace in recording.traces}
        self._prices[ON_DEMAND] = plan.on_demand_usd_per_h
        self._losses_s = sorted(losses_s, reverse=True)
        self._cohorts: list[_Cohort] = []
        self._now_s, self._still_s, self._unsaved_s = 0.0, 0.0, 0.0
        self._left = self._saved = plan.work
        self._present: tuple[int, ...] = ()
        self._changed = True
        self._found = ReplayResult()

    def run(self) -> ReplayResult:
        """Run until the work is done or the recording ends."""
        gap_s, tick, wake_s = self._recording.gap_s, 0, 0.0
        last = self._recording.ticks - self._first
        while tick < last and self._found.finished_s is None:
            self._lose(tick)
            if self._now_s >= wake_s - 1e-6 or self._changed:
                wake_s = self._now_s + max(self._ask(tick), LEAST_LOOK_S)
            next_s = min(self._next_event_s(), wake_s, (tick + 1) * gap_s)
            self._advance(max(next_s, self._now_s))
            self._join_and_leave()
            tick = int((self._now_s + 1e-6) / gap_s)
        return self._found

    def _situation(self, tick: int) -> Situation:
        plan, at = self._plan, self._first + tick
        found = self._found
        return Situation(
            work_left=self._left,
            saved_left=self._saved,
            time_left_s=None if plan.deadline_s is None else plan.deadline_s - self._now_s,
            money_left_usd=None if plan.budget_usd is None else plan.budget_usd - found.usd,
            speeds=plan.speeds,
            costs=plan.costs,
            on_demand_usd_per_h=plan.on_demand_usd_per_h,
            pools=tuple(
                SpotPool(trace.name, self._recording.usd_per_h, trace.there[at]) for trace in self._recording.traces
            ),
            market=self._recording.markets[at],
            held=tuple(
                HeldWorkers(cohort.pool, cohort.workers, max(0.0, cohort.ready_s - self._now_s))
                for cohort in self._cohorts
            ),
            soon=plan.soon,
            blind=plan.blind,
            look_s=self._recording.gap_s,
        )

    def _ask(self, tick: int) -> float:
        decision = self._policy(self._situation(tick))
        self._changed = False
        self._found.kept = self._found.kept and decision.kept
        choice = decision.choice
        names = {cohort.pool for cohort in self._cohorts} | {choice.pool, ON_DEMAND}
        surplus = {}
        for name in sorted(names):
            mine = [cohort for cohort in self._cohorts if cohort.pool == name]
            more = choice.of(name) - sum(cohort.workers for cohort in mine)
            for cohort in mine:
                cohort.leaves_s = math.inf
            if more > 0:
                self._cohorts.append(_Cohort(name, more, self._now_s + self._plan.costs.start_s, self._now_s))
                self._found.changes += 1
            elif more < 0:
                surplus[name] = -more
        waits_s = max((cohort.ready_s for cohort in self._cohorts), default=0.0) if choice.workers else 0.0
        for name, workers in surplus.items():
            self._give_back(name, workers, waits_s if waits_s > self._now_s else self._now_s)
            self._found.changes += 1
        self._join_and_leave()
        ready = self._ready()
        if not self._found.sizes or self._found.sizes[-1][1:] != (choice.spot, choice.on_demand):
            self._found.sizes.append((self._now_s, choice.spot, choice.on_demand))
        if not ready and not choice.workers:
            self._saved = self._left
        return decision.again_s

    def _give_back(self, name: str, workers: int, leaves_s: float) -> None:
        """Release workers, newest first; those that do not train yet leave immediately."""
        for cohort in sorted((c for c in self._cohorts if c.pool == name), key=lambda c: -c.ready_s):
            if workers <= 0:
                return
            part = min(workers, cohort.workers)
            workers -= part
            at_s = self._now_s if cohort.ready_s > self._now_s else leaves_s
            if part < cohort.workers:
                cohort.workers -= part
                cohort = replace(cohort, workers=part)
                self._cohorts.append(cohort)
            cohort.leaves_s = at_s

    def _join_and_leave(self) -> None:
        """Let workers whose time has come leave, with a checkpoint, and those that are ready join."""
        if any(cohort.leaves_s <= self._now_s + 1e-6 for cohort in self._cohorts):
            before = self._ready()
            for cohort in [c for c in self._cohorts if c.leaves_s <= self._now_s + 1e-6]:
                self._end(cohort, cohort.workers)
            if before and not self._ready():
                self._saved, self._unsaved_s = self._left, 0.0
            elif self._ready() != before:
                self._still_s = max(self._still_s, self._now_s + self._plan.costs.reform_s)

    def _lose(self, tick: int) -> None:
        before, gone = self._ready(), False
        there = tuple(trace.there[self._first + tick] for trace in self._recording.traces)
        self._changed = self._changed or there != self._present
        self._present = there
        for trace in self._recording.traces:
            held = sum(cohort.workers for cohort in self._cohorts if cohort.pool == trace.name)
            gone |= self._remove_workers(trace.name, held - trace.there[self._first + tick])
        while self._losses_s and self._losses_s[-1] <= self._now_s + 1e-6:
            self._losses_s.pop()
            if any(cohort.pool == ON_DEMAND for cohort in self._cohorts):
                gone |= self._remove_workers(ON_DEMAND, 1)
        if not gone:
            return
        self._changed = True
        self._found.losses += 1
        if before and not self._ready():
            self._left, self._unsaved_s = self._saved, 0.0
        elif before:
            self._still_s = max(self._still_s, self._now_s + self._plan.costs.loss_s)

    def _remove_workers(self, name: str, workers: int) -> bool:
        gone = False
        for cohort in sorted((c for c in self._cohorts if c.pool == name), key=lambda c: -c.began_s):
            if workers <= 0:
                break
            part = min(workers, cohort.workers)
            workers -= part
            self._end(cohort, part)
            gone = True
        return gone

    def _end(self, cohort: _Cohort, workers: int) -> None:
        """Remove these workers, and pay at least the minimum for each."""
        unpaid_s = max(0.0, self._plan.costs.billed_s - (self._now_s - cohort.began_s))
        self._pay(cohort.pool, workers, unpaid_s)
        cohort.workers -= workers
        if not cohort.workers:
            self._cohorts = [other for other in self._cohorts if other is not cohort]

    def _pay(self, pool: str, workers: int, seconds: float) -> None:
        hours = workers * seconds / 3600
        self._found.usd += hours * self._prices[pool]
        if pool == ON_DEMAND:
            self._found.on_demand_h += hours
        else:
            self._found.spot_h += hours

    def _ready(self) -> int:
        return sum(cohort.workers for cohort in self._cohorts if cohort.ready_s <= self._now_s + 1e-6)

    def _next_event_s(self) -> float:
        times = [cohort.ready_s for cohort in self._cohorts] + [cohort.leaves_s for cohort in self._cohorts]
        times += self._losses_s[-1:]
        return min((at_s for at_s in times if at_s > self._now_s + 1e-6), default=math.inf)

    def _advance(self, to_s: float) -> None:
        """Train and pay until this time, or until the work is done."""
        workers = self._ready()
        rate = self._plan.speeds.rate(workers)
        from_s = max(self._now_s, self._still_s)
        if rate and from_s + self._left / rate <= to_s + 1e-9:
            to_s = max(self._now_s, from_s + self._left / rate)
            self._found.finished_s = to_s
        for cohort in self._cohorts:
            self._pay(cohort.pool, cohort.workers, to_s - self._now_s)
        trained_s = max(0.0, to_s - from_s) if rate else 0.0
        self._left = max(0.0, self._left - rate * trained_s)
        self._unsaved_s += trained_s
        every_s = self._plan.costs.save_every_s
        if self._unsaved_s >= every_s:
            self._unsaved_s %= every_s
            self._saved = self._left + rate * min(self._unsaved_s, trained_s)
        self._now_s = to_s
        if self._found.finished_s is not None:
            for cohort in list(self._cohorts):
                self._end(cohort, cohort.workers)
        elif self._ready() != workers:
            self._changed = True
            if workers:
                self._still_s = to_s + self._plan.costs.reform_s


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
