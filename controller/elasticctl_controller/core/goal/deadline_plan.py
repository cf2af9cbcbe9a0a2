"""A job with a goal: the input for the policy of `elasticctl.planning`, and what follows from its answer.

The policy is asked again when that is due, or when the basis of its answer has changed. Its plan gives a number of
workers, the pools of new ones, and the present workers that leave. From there on, that number is treated like one that
a user has typed: sharing may give less, and `reconcile` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import ON_DEMAND, Goal, PlanStatus, PlanStep, PoolStatus, Prefer
from elasticctl.api.observed.cost import prices_of, spent_usd, worker_seconds
from elasticctl.api.observed.history import steps_per_s_by_size
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl.planning.deadline_fallback import least_usd
from elasticctl.planning.deadline_feasibility import Expected, expect
from elasticctl.planning.deadline_policy import decide
from elasticctl.planning.scaling_curve import Point, ScalingCurve
from elasticctl.planning.situation import ON_DEMAND as PLANNED_ON_DEMAND
from elasticctl.planning.situation import Choice, HeldWorkers, Situation, SizeReason, Speeds, SpotPool
from elasticctl_controller.core.failure_budget import BY_PLAN
from elasticctl_controller.core.goal.pools import (
    Present,
    costs_as_kept,
    has_stepped,
    kept_costs,
    machines,
    market_of,
    measured_costs,
    placed,
    present_workers,
    update_pools,
)
from elasticctl_controller.core.manifests import grace_s
from elasticctl_controller.core.observation import Observed, SeenPools, WorkerMoves

MAX_STEPS = 20
MAX_SIZES = 8
LONGEST_LOOK_S, SHORTEST_LOOK_S, LOOKS = 300.0, 10.0, 60
"""The policy is asked at least this often; near a deadline or with little money more often, down to the shortest."""
LONGEST_S = 60 * 86_400.0
"""Nothing is planned further ahead than this."""
WIDER = 1.25
"""Before anything is measured, the work is assumed to be this many times what the user said."""
MEASURES = "to measure how fast it trains"
MEASURING_S = 600.0
"""How long it may take after a start until a job's rate is known."""
SHORTEST_WAIT_S, LONGEST_WAIT_S = 20.0, 600.0
"""A worker that has waited this long for a machine shows that its pool has no more."""
PROBE_S = 600.0
"""If no zone has spot machines, one worker waits for one in each zone in turn, for this long."""
_LOWEST, _LESS, _HIGHEST = 0.94, 0.98, 1.01
"""A rate is assumed to be a little less than measured, and is kept while it stays between these shares of it."""
_SLACK_S = 15.0
"""How late a pass of the controller, and its deletion of a pod, may be."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What a decision is based on: the policy's `situation`, and what is stored with it."""

    situation: Situation
    pools: tuple[PoolStatus, ...]
    measured: bool
    rates: tuple[float, ...]
    spent: float | None
    basis: str


@dataclass(frozen=True, slots=True)
class _Work:
    """The work that is left, now and from the last checkpoint on, and the rate at each size."""

    left: float
    saved_left: float
    rates: Mapping[int, float]
    measured: bool


def plan_workers(
    job: ElasticJob, goal: Goal, observed: Observed, moves: WorkerMoves, reported: JobStatus, now: float
) -> tuple[ElasticJob, WorkerMoves, PlanStatus | None]:
    """Return the job with as many workers as its plan wants, `moves` with the pools of new workers and the workers that
    leave, and the plan.

    `reported` is the job's status with what its group has reported since. The plan stays as it is stored while nothing
    has changed and it is not due. A job that is over or suspended keeps its last one.
    """
    plan = job.status.plan
    if job.max < 1 or job.status.phase.terminal or job.suspend or job.cancel or job.held:
        return job, moves, plan
    present = present_workers(job, observed, reported, now)
    known = _know(job, goal, reported, present, now, observed.seen_pools)
    due = plan is None or plan.again_at is None or now >= plan.again_at or plan.at is None or now < plan.at
    if plan is None or due or plan.basis != known.basis:
        plan = _decide(job, goal, known, now)
    return *_apply(job, moves, plan, present), plan


def _apply(job: ElasticJob, moves: WorkerMoves, plan: PlanStatus, present: Present) -> tuple[ElasticJob, WorkerMoves]:
    """Carry out the plan. A pool is left once the new workers are ready; until then the job has both (make before
    break).
    """
    pools = sorted({plan.pool, ON_DEMAND, *present.pods} - {""})
    kept = {pool: present.of(pool)[: plan.of(pool)] for pool in pools}
    missing = tuple(pool for pool in pools for _ in range(plan.of(pool) - len(kept[pool])))
    probe = 1 if plan.probing else 0
    awaited = [pod for pool in pools for pod in kept[pool][: len(kept[pool]) - probe * (pool == plan.pool)]]
    settled = len(missing) <= probe and all(pod.uid in present.ready for pod in awaited) and has_stepped(job.status)
    surplus = [pod for pool in pools for pod in present.of(pool)[plan.of(pool) :]]
    stay = [] if settled or plan.workers == 0 else [pod for pod in surplus if pod.uid in present.ready]
    leave = frozenset(pod.uid for pod in surplus) - {pod.uid for pod in stay}
    wanted = plan.workers + len(stay)
    job = replace(job, desired=wanted, max=max(job.max, wanted), scaled_by=BY_PLAN)
    return job, replace(moves, moves=moves.moves | leave, pools=missing)


def _know(job: ElasticJob, goal: Goal, status: JobStatus, present: Present, now: float, seen: SeenPools) -> _Known:
    """All that is known about a job, in the policy's terms."""
    plan = job.status.plan
    kept, others = (kept_costs(costs) for costs in (plan.costs if plan else (), seen.costs))
    costs = measured_costs(status, present, kept or others, float(grace_s(job)))
    time_left_s = None if goal.finish_by is None else min(goal.finish_by - now, LONGEST_S)
    patience_s = min(2 * costs.start_s, LONGEST_WAIT_S, time_left_s / 20 if time_left_s is not None else math.inf)
    pools = update_pools(job, present, max(SHORTEST_WAIT_S, patience_s), now, seen.pools)
    prices = prices_of(job)
    dear, cheap = (prices.on_demand, prices.spot) if prices is not None else (1.0, 0.3)
    spent = None if prices is None else spent_usd(worker_seconds(replace(job, status=status), now), prices)
    money = _money_left(job, goal, spent, dear)
    work = _look_at_work(job, goal, status, now)
    situation = Situation(
        work_left=work.left,
        saved_left=max(work.left, work.saved_left),
        time_left_s=time_left_s,
        money_left_usd=money,
        speeds=Speeds.of(work.rates),
        costs=costs,
        on_demand_usd_per_h=dear,
        pools=tuple(SpotPool(pool.name, cheap, machines(pool, job)) for pool in pools),
        market=market_of(pools, job, cheap, now),
        held=_held(present, costs.start_s, now),
        soon=goal.prefer is Prefer.TIME,
        blind=True,
        look_s=_look_s(job, time_left_s, money, dear),
    )
    basis = _basis(job, situation, work.measured, status.progress.step)
    return _Known(situation, pools, work.measured, tuple(work.rates.values()), spent, basis)


def _look_at_work(job: ElasticJob, goal: Goal, status: JobStatus, now: float) -> _Work:
    """The work as measured; before that, as the goal says."""
    rates = {size: rate for size, rate in steps_per_s_by_size(status, now).items() if rate > 0}
    total, step = status.progress.total_steps, status.progress.step
    measured = bool(rates and total)
    if measured and total and step is not None:
        before = job.status.plan.rates if job.status.plan is not None else ()
        steady = _steady_rates(_sizes(job), rates, before, _counted(status))
        saved_left = float(max(0, total - (status.checkpoint.step or 0)))
        return _Work(float(max(0, total - step)), saved_left, steady, measured)
    curve = ScalingCurve.through([Point(max(1, job.max), 1.0)])
    left = WIDER * (goal.work_seconds or 3600.0)  # as given; if it is unknown, it is measured first
    return _Work(left, left, {size: curve.rate(size) for size in _sizes(job)}, measured)


def _money_left(job: ElasticJob, goal: Goal, spent: float | None, usd_per_h: float) -> float | None:
    """The money that is not spent yet, less what all workers would cost until they are gone if they were stopped
    now."""
    if goal.budget is None or spent is None:
        return None
    going_s = float(grace_s(job)) + _SLACK_S
    return goal.budget - spent - (job.max + 1) * usd_per_h * going_s / 3600


def _sizes(job: ElasticJob) -> list[int]:
    """The sizes to choose from: all of them, or some in a geometric series that includes the smallest and the
    largest."""
    low, high = max(1, job.min), max(1, job.min, job.max)
    if high - low < MAX_SIZES:
        return list(range(low, high + 1))
    ratio = (high / low) ** (1 / (MAX_SIZES - 1))
    return sorted({round(low * ratio**i) for i in range(MAX_SIZES)})


def _held(present: Present, start_s: float, now: float) -> tuple[HeldWorkers, ...]:
    """The workers that exist, and when they will be ready; spot workers count once they have a machine."""
    found: dict[tuple[str, float], int] = {}
    for pool, pods in present.pods.items():
        name = PLANNED_ON_DEMAND if pool == ON_DEMAND else pool
        for pod in pods if pool == ON_DEMAND else placed(pods):
            ready_s = 0.0
            if pod.uid not in present.ready:
                ready_s = max(1.0, start_s - (now - (pod.created_at or now)))
            found[name, ready_s] = found.get((name, ready_s), 0) + 1
    return tuple(HeldWorkers(name, count, ready_s) for (name, ready_s), count in sorted(found.items()))


def _look_s(job: ElasticJob, time_left_s: float | None, money: float | None, usd_per_h: float) -> float:
    lasts_s = [LONGEST_LOOK_S * LOOKS]
    lasts_s += [] if time_left_s is None or time_left_s <= 0 else [time_left_s]  # once it is late, nothing is urgent
    lasts_s += [] if money is None or money <= 0 else [money / (max(1, job.max) * usd_per_h) * 3600]
    return min(LONGEST_LOOK_S, max(SHORTEST_LOOK_S, min(lasts_s) / LOOKS))


def _basis(job: ElasticJob, now: Situation, measured: bool, step: int | None) -> str:
    """What a decision is based on, except for the time, the money and the steps that go by."""
    held = ",".join(f"{one.pool or ON_DEMAND}:{one.workers}{'' if one.ready_in_s <= 0 else '*'}" for one in now.held)
    there = ",".join(f"{pool.name}:{pool.there}" for pool in now.pools)
    rates = ",".join(f"{rate:.3g}" for rate in now.speeds.per_s)
    done = measured and now.work_left <= 0
    return f"{job.generation};{held};{there};{rates};{now.costs.start_s:g};{measured:d}{done:d}{step is not None:d}"


def _decide(job: ElasticJob, goal: Goal, known: _Known, now: float) -> PlanStatus:
    """Ask the policy, and return its answer as the job's plan."""
    before = job.status.plan or PlanStatus()
    situation, money = known.situation, known.situation.money_left_usd
    decision = decide(situation)
    if money is not None and money <= 0:
        decision = replace(decision, choice=Choice(), reason=SizeReason.SPENT, kept=False)
    elif decision.reason is SizeReason.DONE:  # the script ends by itself
        again_at = Timestamp(now + situation.look_s)
        return replace(before, at=Timestamp(now), again_at=again_at, basis=known.basis, on_demand_at=None)
    measures = not known.measured and goal.work_seconds is None and decision.reason is not SizeReason.SPENT
    choice = decision.choice
    if measures:
        choice = _to_measure(job, situation) or choice
    probing = decision.reason is not SizeReason.SPENT and not any(pool.there for pool in situation.pools)
    pool = choice.pool
    if probing:
        pool = goal.spot_pools[int(now // PROBE_S) % len(goal.spot_pools)]
    expected = Expected() if measures else expect(situation, decision)
    finish_at = None if expected.hours is None else Timestamp(now + expected.hours * 3600)
    takes_over = expected.on_demand_in_s
    plan = PlanStatus(
        at=Timestamp(now),
        again_at=Timestamp(now + decision.again_s),
        basis=known.basis,
        pool=pool,
        spot=choice.spot + probing,
        on_demand=choice.on_demand,
        probing=probing,
        reason=decision.reason.name.capitalize(),
        message=MEASURES if measures else _words(goal, situation, decision.reason, known),
        promised=decision.kept and known.measured,
        measured=known.measured,
        finish_at=finish_at,
        spread_s=round(expected.spread_h * 3600),
        cost=None if known.spent is None or expected.usd is None else round(known.spent + expected.usd, 4),
        spent=None if known.spent is None else round(known.spent, 4),
        on_demand_at=None if takes_over is None else Timestamp(now + takes_over),
        pools=known.pools,
        costs=costs_as_kept(situation.costs),
        rates=known.rates,
        steps=before.steps,
    )
    return _with_step(plan)


def _with_step(plan: PlanStatus) -> PlanStatus:
    """The plan with a step for its workers, unless they are those of its last step."""
    step = PlanStep(plan.at, plan.pool if plan.spot else "", plan.spot, plan.on_demand, plan.message)
    last = plan.steps[-1] if plan.steps else None
    if last is not None and (last.pool, last.spot, last.on_demand) == (step.pool, step.spot, step.on_demand):
        return plan
    return replace(plan, steps=(*plan.steps, step)[-MAX_STEPS:])


def _to_measure(job: ElasticJob, situation: Situation) -> Choice | None:
    """The choice that finds out how long unknown work takes: spot machines or, if there are none, as few on-demand
    machines as possible. None if the money is not enough for that.
    """
    money, fewest = situation.money_left_usd, max(1, job.min)
    takes_h = (situation.costs.start_s + MEASURING_S) / 3600
    there = max(situation.pools, key=lambda pool: (situation.workers(pool.name), pool.there), default=None)
    if there is not None and there.there:
        for workers in (min(there.there, situation.speeds.most), fewest):
            if money is None or workers * there.usd_per_h * takes_h <= money:
                return Choice(there.name, workers)
    elif money is None or fewest * situation.on_demand_usd_per_h * takes_h <= money:
        return Choice(on_demand=fewest)
    return None


def _words(goal: Goal, situation: Situation, reason: SizeReason, known: _Known) -> str:
    """The reason for the decision, as a sentence without a subject."""
    if reason is SizeReason.SPENT and goal.budget is not None:
        more = least_usd(situation) - max(0.0, situation.money_left_usd or 0.0)
        return f"the budget of ${goal.budget:,.2f} is spent; the rest needs about ${max(0.01, more):,.2f} more"
    guess = "" if known.measured else " (from the given amount of work: nothing has been measured yet)"
    no_price = (
        "; its budget is not enforced, because no price is known"
        if goal.budget is not None and known.spent is None
        else ""
    )
    return f"{reason.value}{guess}{no_price}"


def _steady_rates(
    sizes: Sequence[int], measured: Mapping[int, float], kept: Sequence[float], counted: int
) -> Mapping[int, float]:
    """Steps per second at each size. While the measured rates stay near those of the last plan, its rates are kept:
    otherwise every counted step would be a reason for another plan. New rates are a little less than measured, so that
    a fluctuation promises nothing.

    A measurement over `counted` steps is exact to one step.
    """
    curve = ScalingCurve.through([Point(size, rate) for size, rate in measured.items()])
    found = {size: curve.rate(size) for size in sizes}
    last, wide = dict(zip(sizes, kept, strict=False)), 1 + 1 / max(1, counted)
    low, high = _LOWEST / wide, _HIGHEST * wide
    if last.keys() == found.keys() and all(low <= last[size] / rate <= high for size, rate in found.items()):
        return last
    return {size: rate * _LESS for size, rate in found.items()}


def _counted(status: JobStatus) -> int:
    """How many steps were made at the size of the newest group."""
    newest = len(status.generations[-1].workers) if status.generations else 0
    groups = [group for group in status.generations if len(group.workers) == newest]
    return sum(max(0, (group.last_step or 0) - (group.resumed_step or 0)) for group in groups)
