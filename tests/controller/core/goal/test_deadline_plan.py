"""A deadline and a budget, decided by the core over machines that come and go, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import ON_DEMAND, SPOT, Goal, PlanStatus, Prefer
from elasticctl.api.status import JobStatus, Phase
from elasticctl_controller.core.failure_budget import BY_PLAN
from tests.support.controller.goal_world import PRICES, TICK_S, GoalWorld, Timing, a_goal_job
from tests.support.controller.samples import NOW, a_step

RATES = (0.0, 1.0, 1.9, 2.7, 3.5)
HOUR_S = 3600.0
STEPS = int(2 * HOUR_S * RATES[-1])
"""Two hours on four workers, which is $8 on demand and $2.40 on spot."""


def in_hours(hours: float) -> Timestamp:
    return Timestamp(NOW + hours * HOUR_S)


def a_world(goal: Goal, spot: list[int], steps: int = STEPS) -> GoalWorld:
    return GoalWorld(a_goal_job(goal), {SPOT: spot}, steps, RATES)


def finished_h(world: GoalWorld, until_h: float = 24.0) -> float:
    """Hours until it was done."""
    world.run(NOW + until_h * HOUR_S)
    assert world.finished_at is not None, world.job.status.plan
    return (world.finished_at - NOW) / HOUR_S


def plan_of(world: GoalWorld) -> PlanStatus:
    assert world.job.status.plan is not None
    return world.job.status.plan


def test_spot_that_stays_does_it_alone() -> None:
    world = a_world(Goal(in_hours(6)), [4])
    assert finished_h(world) < 6
    assert world.usd < 1.1 * 2.4
    assert ON_DEMAND not in world.job.status.worker_seconds


def test_without_spot_it_is_measured_on_demand_and_done_in_time() -> None:
    world = a_world(Goal(in_hours(4)), [0])
    assert 3 < finished_h(world) < 4
    assert world.usd > 6


def test_on_demand_takes_over_in_time_before_the_spot_machines_leave() -> None:
    """Spot machines go for good when much is left."""
    world = a_world(Goal(in_hours(3)), [4] * 6 + [0])
    assert finished_h(world) < 3
    plan = plan_of(world)
    assert plan.promised
    assert {item.by for item in world.job.status.scalings} == {BY_PLAN}
    assert any(step.on_demand for step in plan.steps)


def test_a_moved_deadline_is_replanned_immediately_and_a_pool_is_left_when_the_next_is_ready() -> None:
    world = a_world(Goal(in_hours(3)), [0] * 16 + [4])
    world.run(in_hours(1.3))
    assert world.on(ON_DEMAND) == 4
    move(world, Goal(in_hours(6)))
    assert finished_h(world) < 6
    assert world.usd < 8
    assert world.most_at_once > 4  # the new ones are there before the old ones leave
    plan = plan_of(world)
    moved_at = in_hours(1.3)
    assert any(step.spot and not step.on_demand for step in plan.steps if (step.at or 0.0) >= moved_at)


def move(world: GoalWorld, goal: Goal) -> None:
    """The goal is changed."""
    world.job = replace(world.job, goal=replace(goal, prices=PRICES), generation=world.job.generation + 1)
    world.pass_at = world.now


@pytest.mark.slow  # takes seconds
def test_a_spent_budget_suspends_the_job_with_a_checkpoint_and_a_larger_one_resumes_it() -> None:
    world = a_world(Goal(budget=1.0), [4])
    world.run(in_hours(1.5))
    status = world.job.status
    assert (status.phase, status.reason) == (Phase.SUSPENDED, "PlannedSpent")
    assert "$1.00 is spent" in status.message
    assert 0.85 < world.usd <= 1.0
    assert world.committed == world.done > 0
    move(world, Goal(budget=4.0))
    assert finished_h(world) > 1.5
    assert world.usd <= 4.0


def test_time_is_bought_where_that_is_preferred() -> None:
    spot = [0] * 4 + ([4] * 8 + [0] * 12) * 5
    cheap = a_world(Goal(in_hours(9), budget=20.0), spot)
    fast = a_world(Goal(in_hours(9), budget=20.0, prefer=Prefer.TIME), spot)
    assert finished_h(fast) < finished_h(cheap)
    assert cheap.usd < fast.usd <= 20


def test_a_zone_that_has_dried_up_is_left_for_another() -> None:
    zones = {f"{SPOT}/zone-a": [4] * 4 + [0], f"{SPOT}/zone-b": [4]}
    world = GoalWorld(a_goal_job(Goal(in_hours(6), zones=("zone-a", "zone-b"))), zones, STEPS, RATES)
    world.run(in_hours(0.25))
    assert {worker.pool for worker in world.job.status.workers} == {f"{SPOT}/zone-a"}
    world.run(in_hours(0.75))
    assert {worker.pool for worker in world.job.status.workers} == {f"{SPOT}/zone-b"}
    assert finished_h(world) < 6
    assert world.on(ON_DEMAND) == 0
    assert world.usd < 3


def test_the_stated_work_is_planned_with_until_it_is_measured() -> None:
    """Too much for the time that is left, as the user said: no worker waits for spot machines."""
    world = a_world(Goal(in_hours(2.6), work_seconds=2 * HOUR_S), [0])
    world.run(NOW + 1)
    plan = plan_of(world)
    assert not plan.measured
    assert plan.on_demand == 4


spans = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 12)), min_size=1, max_size=8)


@settings(max_examples=2)
@given(spans, st.floats(1.75, 4.0), st.none() | st.floats(0.2, 8.0), st.booleans())
def test_never_late_when_promised_and_never_over_budget(
    spans: list[tuple[int, int]], slack: float, budget: float | None, said: bool
) -> None:
    """With any behaviour of spot machines, a deadline that on demand could meet is met, and so is one that is
    promised."""
    spot = [count for count, ticks in spans for _ in range(ticks)]
    work_h = 0.75
    limit_h = work_h * slack
    goal = Goal(in_hours(limit_h), budget, work_seconds=work_h * HOUR_S if said else None)
    world = a_world(goal, spot * max(1, 50 // len(spot)), int(work_h * HOUR_S * RATES[-1]))
    promised = False
    while world.finished_at is None and world.now < in_hours(limit_h + 0.5):
        world.run(world.now + TICK_S)
        promised = promised or (world.job.status.plan is not None and world.job.status.plan.promised)
    if budget is not None:
        assert world.usd <= budget
    if promised or budget is None:
        assert world.finished_at is not None
        assert world.finished_at <= in_hours(limit_h)


@pytest.mark.slow  # takes seconds
@settings(max_examples=1)
@given(there=st.integers(0, 3), launch_s=st.floats(20, 80), slack=st.floats(2.2, 4.5), said=st.booleans())
@example(there=1, launch_s=34.0, slack=3.2, said=True)
@example(there=0, launch_s=34.0, slack=3.2, said=False)
def test_a_plan_stays_while_machines_start(there: int, launch_s: float, slack: float, said: bool) -> None:
    """Nothing happens to spot machines, and every step is reported: plans follow what is learnt, and do not waver."""
    timing = Timing(boot_s=9.0, pull_s=1.0, launch_s=launch_s, join_s=2.0, save_s=2.0, report_s=0.7)
    goal = Goal(Timestamp(NOW + slack * 120), work_seconds=120.0 if said else None)
    world = GoalWorld(a_goal_job(goal, most=3), {SPOT: [there]}, 300, (0.0, 0.91, 1.72, 2.5), timing)
    world.run(NOW + slack * 120)
    plan = plan_of(world)
    asked_at = sorted({step.at or 0.0 for step in plan.steps})
    assert all(later - at > timing.boot_s for at, later in zip(asked_at, asked_at[3:], strict=False)), plan.steps
    assert len(asked_at) <= 10


def test_a_budget_without_a_price_is_reported_as_not_enforced() -> None:
    job = replace(a_goal_job(Goal(in_hours(3), budget=5.0, work_seconds=HOUR_S)), status=JobStatus())
    assert job.goal is not None
    job, _ = a_step(replace(job, goal=replace(job.goal, prices=None)), [])
    assert job.status.plan is not None
    assert "its budget is not enforced" in job.status.plan.message
