"""What jobs show of pools of machines: whether they have more, and what a new job learns from similar ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import SPOT, Goal, PlanStatus, PoolStatus
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.goal import pools
from elasticctl_controller.core.goal.deadline_plan import plan_workers
from elasticctl_controller.core.goal.pools import RETRY_S, PoolEvidence, Present, seen_of, update_pools
from elasticctl_controller.core.observation import Observed, SeenPools, WorkerMoves
from tests.support.controller.goal_world import GRACE, a_goal_job
from tests.support.controller.samples import NOW


@pytest.mark.parametrize(("patience_s", "again_s"), [(20.0, 50.0), (360.0, RETRY_S), (600.0, RETRY_S)])
def test_a_pool_with_too_few_machines_is_asked_again_after_a_few_times_the_patience(
    patience_s: float, again_s: float
) -> None:
    has = Pod("w-0", "u-0", 0, "", PodPhase.RUNNING, Timestamp(NOW), Timestamp(NOW), node="n", pool=SPOT)
    waits = replace(has, name="w-1", uid="u-1", phase=PodPhase.PENDING, node="", started_at=None)
    job = a_goal_job(Goal(Timestamp(NOW + 9e5)))
    (short,) = update_pools(job, Present({SPOT: (has, waits)}, frozenset()), patience_s, NOW + patience_s)
    assert (short.short, short.short_since) == (1, NOW + patience_s)
    job = replace(job, status=JobStatus(plan=PlanStatus(pools=(short,))))
    alone = Present({SPOT: (has,)}, frozenset())
    for later_s, asks in ((again_s - 1, False), (again_s, True)):
        (pool,) = update_pools(job, alone, patience_s, NOW + patience_s + later_s)
        assert (pool.short_since is None) == asks


def test_workers_that_have_just_asked_do_not_show_that_a_short_pool_is_empty() -> None:
    """They were given back, and are asked for again."""
    waits = Pod("w-0", "u-0", 0, "", PodPhase.PENDING, Timestamp(NOW), pool=SPOT)
    known = PoolStatus(SPOT, Timestamp(NOW), short=2, short_since=Timestamp(NOW - 30))
    job = replace(a_goal_job(Goal(Timestamp(NOW + 9e5))), status=JobStatus(plan=PlanStatus(pools=(known,))))
    for later_s, short in ((0.5, 2), (19.0, 2), (20.0, 0)):
        (pool,) = update_pools(job, Present({SPOT: (waits,)}, frozenset()), 20.0, NOW + later_s)
        assert (pool.short, pool.up) == (short, short > 0)


GOAL = Goal(Timestamp(NOW + 36_000))
POOR = PoolStatus(
    SPOT,
    Timestamp(NOW - 60),
    up=False,
    age_hours=2.0,
    up_hours=(4.0, 1.0, 0.0),
    up_ends=(9.0, 0.0, 0.0),
    away_hours=(1.0, 2.0, 3.0),
    away_ends=(1.0, 0.0, 0.0),
    short=0,
    short_since=Timestamp(NOW - 900),
)


def a_job(**changes: object) -> ElasticJob:
    return replace(a_goal_job(GOAL), **changes)  # type: ignore[arg-type]


def told(pool: PoolStatus = POOR) -> PoolEvidence:
    found = PoolEvidence()
    found.record(a_job(), JobStatus(plan=PlanStatus(pools=(pool,))))
    return found


def plan_of(job: ElasticJob, observed: Observed) -> PlanStatus:
    assert job.goal is not None
    _, _, plan = plan_workers(job, job.goal, observed, WorkerMoves(), job.status, NOW)
    assert plan is not None
    return plan


def test_a_new_job_begins_with_what_others_have_seen_but_asks_for_machines_itself() -> None:
    (pool,) = told().of(a_job(uid="another")).pools
    assert (pool.up, pool.age_hours, pool.short, pool.short_since) == (True, 0.0, 0, None)
    assert (pool.up_hours, pool.up_ends, pool.away_hours) == (POOR.up_hours, POOR.up_ends, POOR.away_hours)
    plan = plan_of(a_job(), Observed(seen_pools=SeenPools((pool,))))
    assert seen_of(plan.pools[0]).leaves > 1.5
    fresh = plan_of(a_job(), Observed())
    assert seen_of(fresh.pools[0]).leaves == 1.0


def test_what_a_job_has_seen_itself_counts_more() -> None:
    own = replace(POOR, up_ends=(0.0, 0.0, 0.0), up=True, short_since=None, at=Timestamp(NOW))
    job = a_job(status=JobStatus(plan=PlanStatus(pools=(own,))))
    plan = plan_of(job, Observed(seen_pools=told().of(job)))
    assert sum(plan.pools[0].up_ends) == 0


def test_the_newest_is_kept() -> None:
    found = told()
    for at, ends in ((NOW, 5.0), (NOW - 600, 7.0)):
        pool = replace(POOR, at=Timestamp(at), up_ends=(ends, 0.0, 0.0))
        found.record(a_job(), JobStatus(plan=PlanStatus(pools=(pool,))))
    assert found.of(a_job()).pools[0].up_ends == (5.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"namespace": "another"},
        {"template": {"spec": {**GRACE["spec"], "nodeSelector": {"node.kubernetes.io/instance-type": "g5.xlarge"}}}},
        {"goal": replace(GOAL, zones=("zone-b",))},
        {"goal": None},
    ],
)
def test_other_namespaces_machines_and_pools_say_nothing(changes: dict[str, object]) -> None:
    assert told().of(a_job(**changes)).pools == ()


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_KINDS", 2)
    found = PoolEvidence()
    for namespace in "abc":
        found.record(a_job(namespace=namespace), JobStatus(plan=PlanStatus(pools=(POOR,))))
    assert [len(found.of(a_job(namespace=namespace)).pools) for namespace in "abc"] == [0, 1, 1]


def test_what_changes_cost_others_is_what_a_new_job_begins_with() -> None:
    found, costs = told(), (20.0, 2.0, 9.0, 30.0)
    assert found.of(a_job()).costs == ()
    found.record(a_job(), JobStatus(plan=PlanStatus(pools=(POOR,), costs=(180.0, 10.0, 30.0, 300.0))))
    assert found.of(a_job()).costs == ()  # guessed
    found.record(a_job(), JobStatus(plan=PlanStatus(pools=(POOR,), costs=costs, measured=True)))
    assert found.of(a_job()).costs == costs
    assert found.of(a_job(namespace="another")).costs == found.of(a_job(goal=None)).costs == ()
    plan = plan_of(a_job(), Observed(seen_pools=SeenPools(costs=costs)))
    assert plan.costs == costs


@pytest.mark.parametrize("costs", [(1.0,), (0.0, 1.0, 1.0, 1.0), (float("nan"), 1.0, 1.0, 1.0)])
def test_costs_that_are_none_are_not_believed(costs: tuple[float, ...]) -> None:
    plan = plan_of(a_job(), Observed(seen_pools=SeenPools(costs=costs)))
    assert plan.costs == (180.0, 10.0, 30.0, 300.0)
