"""What jobs show of pools of machines: whether they have more, what changes cost, and what a new job learns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import ON_DEMAND, SPOT, Goal, PlanStatus, PoolStatus
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import GroupGeneration, JobStatus
from elasticctl.planning.situation import Costs
from elasticctl_controller.core.goal import pools
from elasticctl_controller.core.goal.deadline_plan import plan_workers
from elasticctl_controller.core.goal.pools import (
    RETRY_S,
    PoolEvidence,
    Present,
    kept_costs,
    measured_costs,
    seen_of,
    update_pools,
)
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


def evidence(pool: PoolStatus = POOR) -> PoolEvidence:
    found = PoolEvidence()
    found.record(a_job(), JobStatus(plan=PlanStatus(pools=(pool,))))
    return found


def plan_of(job: ElasticJob, observed: Observed) -> PlanStatus:
    assert job.goal is not None
    _, _, plan = plan_workers(job, job.goal, observed, WorkerMoves(), job.status, NOW)
    assert plan is not None
    return plan


def test_a_new_job_begins_with_what_others_have_seen_but_asks_for_machines_itself() -> None:
    (pool,) = evidence().of(a_job(uid="another")).pools
    assert (pool.up, pool.age_hours, pool.short, pool.short_since) == (True, 0.0, 0, None)
    assert (pool.up_hours, pool.up_ends, pool.away_hours) == (POOR.up_hours, POOR.up_ends, POOR.away_hours)
    plan = plan_of(a_job(), Observed(seen_pools=SeenPools((pool,))))
    assert seen_of(plan.pools[0]).leaves > 1.5
    fresh = plan_of(a_job(), Observed())
    assert seen_of(fresh.pools[0]).leaves == 1.0


def test_a_jobs_own_evidence_counts_more() -> None:
    own = replace(POOR, up_ends=(0.0, 0.0, 0.0), up=True, short_since=None, at=Timestamp(NOW))
    job = a_job(status=JobStatus(plan=PlanStatus(pools=(own,))))
    plan = plan_of(job, Observed(seen_pools=evidence().of(job)))
    assert sum(plan.pools[0].up_ends) == 0


def test_the_newest_is_kept() -> None:
    found = evidence()
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
    assert evidence().of(a_job(**changes)).pools == ()


def test_it_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_KINDS", 2)
    found = PoolEvidence()
    for namespace in "abc":
        found.record(a_job(namespace=namespace), JobStatus(plan=PlanStatus(pools=(POOR,))))
    assert [len(found.of(a_job(namespace=namespace)).pools) for namespace in "abc"] == [0, 1, 1]


def test_a_new_job_starts_with_what_changes_cost_others() -> None:
    found, costs = evidence(), (20.0, 2.0, 9.0, 30.0)
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


KNOWN = Costs(200.0, 10.0, 30.0, 300.0)
STEP = 1.2
"""What is measured is rounded up by at most that much."""


def a_pod(number: int, pool: str, scheduled_s: float) -> Pod:
    """A pod that was asked for at NOW, and on a machine so much later."""
    started_at = Timestamp(NOW + scheduled_s)
    return Pod(f"w-{number}", f"u-{number}", number, "", PodPhase.RUNNING, Timestamp(NOW), started_at, pool=pool)


def start_s(pods: Iterable[Pod], steps_s: float, known: Costs | None = None) -> float:
    """Of a job whose only group, of these pods, made its first step so long after they were asked for."""
    by_pool: dict[str, tuple[Pod, ...]] = {}
    for pod in pods:
        by_pool[pod.pool] = (*by_pool.get(pod.pool, ()), pod)
    names = tuple(pod.name for pods_there in by_pool.values() for pod in pods_there)
    first_step_at = Timestamp(NOW + steps_s)
    group = GroupGeneration(1, names, formed_at=Timestamp(NOW + steps_s - 1), first_step_at=first_step_at)
    return measured_costs(JobStatus(generations=(group,)), Present(by_pool, frozenset()), known, 10.0).start_s


def test_a_start_lasts_until_the_first_step_not_only_until_there_is_a_machine() -> None:
    assert 60 <= start_s([a_pod(0, ON_DEMAND, 20)], 60) <= 60 * STEP


def test_a_machine_that_was_there_already_does_not_say_how_long_others_take() -> None:
    assert start_s([a_pod(0, ON_DEMAND, 1)], 15, KNOWN) >= KNOWN.start_s
    assert start_s([a_pod(0, SPOT, 1)], 15, KNOWN) >= KNOWN.start_s
    assert start_s([a_pod(0, ON_DEMAND, 40), a_pod(1, ON_DEMAND, 1)], 60, KNOWN) <= 60 * STEP
    assert start_s([a_pod(0, ON_DEMAND, 1)], 15) <= 15 * STEP  # where nothing else is known


def test_a_start_on_spot_takes_somewhat_longer_than_the_quickest_one() -> None:
    """One had to wait for a machine."""
    assert start_s([a_pod(0, SPOT, 20)], 40) >= 1.5 * 40
    assert start_s([a_pod(0, SPOT, 20), a_pod(1, ON_DEMAND, 30)], 40) <= 40 * STEP


def test_a_spot_worker_that_waited_for_hours_does_not_say_that_a_start_takes_hours() -> None:
    assert KNOWN.start_s <= start_s([a_pod(0, SPOT, 7200)], 7230, KNOWN) <= KNOWN.start_s * STEP
    assert Costs().start_s <= start_s([a_pod(0, SPOT, 7200)], 7230) <= Costs().start_s * STEP


@pytest.mark.parametrize("took_s", [22.0, 31.0, 76.0, 136.0, 480.0])
def test_what_is_known_of_a_start_stays_as_it_is_while_nothing_contradicts_it(took_s: float) -> None:
    """Neither rounding it up again, nor the leaving of on-demand workers, makes it longer."""
    known = start_s([a_pod(0, ON_DEMAND, 6)], took_s)
    for pods in ([a_pod(0, ON_DEMAND, 1)], [a_pod(0, SPOT, 1)], [a_pod(0, SPOT, 6)]):
        assert start_s(pods, took_s * 0.9 if pods[0].pool == SPOT else took_s, replace(KNOWN, start_s=known)) == known


def test_workers_whose_group_has_made_no_step_say_nothing() -> None:
    present = Present({ON_DEMAND: (a_pod(0, ON_DEMAND, 20),)}, frozenset())
    assert measured_costs(JobStatus(), present, KNOWN, 10.0).start_s == KNOWN.start_s
    dropped = GroupGeneration(7, ("w-0",), formed_at=Timestamp(NOW + 900), first_step_at=Timestamp(NOW + 910))
    assert measured_costs(JobStatus(generations=(dropped,)), present, KNOWN, 10.0).start_s == KNOWN.start_s


def test_a_guess_is_not_kept_as_if_it_were_known() -> None:
    guess = Costs()
    assert kept_costs((guess.start_s, guess.reform_s, guess.loss_s, guess.save_every_s)) is None
    assert kept_costs(()) is None
    assert kept_costs((20.0, 2.0, 9.0, 30.0)) == Costs(20.0, 2.0, 9.0, 30.0)
