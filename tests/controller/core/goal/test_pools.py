"""What the workers of a job show of a pool: whether it has more machines, and when that is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import SPOT, Goal, PlanStatus, PoolStatus
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import PodPhase
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.goal.pools import RETRY_S, Present, update_pools
from tests.support.controller.goal_world import a_goal_job
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
