"""What the workers of a job show of a pool: whether it has more machines, and when that is tried again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import SPOT, Goal, PlanStatus
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import PodPhase
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.goal.pools import RETRY_S, Present, look_at_pools
from tests.support.controller.goal_world import a_goal_job
from tests.support.controller.samples import NOW


@pytest.mark.parametrize(("patience_s", "again_s"), [(20.0, 50.0), (360.0, RETRY_S), (600.0, RETRY_S)])
def test_a_pool_with_too_few_machines_is_asked_again_after_a_few_times_the_patience(
    patience_s: float, again_s: float
) -> None:
    has = Pod("w-0", "u-0", 0, "", PodPhase.RUNNING, Timestamp(NOW), Timestamp(NOW), node="n", pool=SPOT)
    waits = replace(has, name="w-1", uid="u-1", phase=PodPhase.PENDING, node="", started_at=None)
    job = a_goal_job(Goal(Timestamp(NOW + 9e5)))
    (short,) = look_at_pools(job, Present({SPOT: (has, waits)}, frozenset()), patience_s, NOW + patience_s)
    assert (short.short, short.short_since) == (1, NOW + patience_s)
    job = replace(job, status=JobStatus(plan=PlanStatus(pools=(short,))))
    alone = Present({SPOT: (has,)}, frozenset())
    for later_s, asks in ((again_s - 1, False), (again_s, True)):
        (pool,) = look_at_pools(job, alone, patience_s, NOW + patience_s + later_s)
        assert (pool.short_since is None) == asks
