"""An order of pools, followed by the core over machines that come and go, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.goal import ON_DEMAND, SPOT, Goal, PoolOrder, PoolsStatus
from elasticctl.api.status import Phase
from elasticctl_controller.core.actions import CreateWorker
from elasticctl_controller.core.goal.pool_order import DO_NOT_DISRUPT, NOT_TO_DISRUPT, NOT_WORTH_IT
from tests.support.controller.goal_world import TICK_S, GoalWorld, a_goal_job
from tests.support.controller.samples import NOW

RATES = (0.0, 1.0, 1.9, 2.7, 3.5)
HOUR_S = 3600.0
STEPS = int(8 * HOUR_S * RATES[-1])
WAIT_S, RETRY_S = 200.0, 900.0
ORDER = PoolOrder((SPOT, ON_DEMAND), WAIT_S, RETRY_S)


def a_world(machines: dict[str, list[int]], order: PoolOrder = ORDER, steps: int = STEPS) -> GoalWorld:
    """Four workers with an order of pools; pools that are not named have as many machines as are wanted."""
    job = replace(a_goal_job(Goal()), goal=None, sharing=replace(a_goal_job(Goal()).sharing, automatic=False))
    return GoalWorld(replace(job, pools=order), machines, steps, RATES)


def pools_of(world: GoalWorld) -> PoolsStatus:
    pools = world.job.status.pools
    assert pools is not None
    return pools


def on(world: GoalWorld) -> dict[str, int]:
    return {pool: world.on(pool) for pool in (SPOT, ON_DEMAND)}


def test_the_first_pool_alone_is_asked_as_long_as_it_has_machines() -> None:
    world = a_world({SPOT: [4]})
    world.run(NOW + HOUR_S)
    assert on(world) == {SPOT: 4, ON_DEMAND: 0}
    assert world.made == 4
    assert pools_of(world) == PoolsStatus(pool=SPOT)


def test_waiting_workers_ask_in_the_next_pool_after_the_stated_time_and_the_others_stay() -> None:
    world = a_world({SPOT: [2]})
    world.run(NOW + WAIT_S - 1)
    assert on(world) == {SPOT: 2, ON_DEMAND: 0}
    waits = pools_of(world)
    assert (waits.pool, waits.waiting, waits.since) == (SPOT, 2, NOW)
    assert (waits.then, waits.then_at) == (ON_DEMAND, NOW + WAIT_S)
    world.run(NOW + WAIT_S + 90)
    assert on(world) == {SPOT: 2, ON_DEMAND: 2}
    assert world.job.status.interruptions == world.job.status.scalings == ()
    assert (pools_of(world).back_to, pools_of(world).back_at) == (SPOT, pytest.approx(NOW + WAIT_S + RETRY_S, abs=2))


def test_it_goes_back_when_the_better_pool_has_machines_and_no_worker_leaves_before() -> None:
    world = a_world({SPOT: [0] * 9 + [4]})
    world.run(NOW + 9 * TICK_S)
    assert on(world) == {SPOT: 0, ON_DEMAND: 4}
    while world.on(ON_DEMAND) == 4:
        least = min(len(world.members), 4)
        world.run(world.now + 5)
        assert len(world.members) >= least, "make before break"
        assert world.now < NOW + 4 * HOUR_S
    world.run(world.now + 60)
    assert on(world) == {SPOT: 4, ON_DEMAND: 0}
    assert world.most_at_once == 8
    assert world.job.status.scalings == (), "no other size was asked for"
    assert world.job.status.interruptions == ()
    assert pools_of(world) == PoolsStatus(pool=SPOT)


def test_a_try_in_vain_disturbs_no_worker() -> None:
    world = a_world({SPOT: [0]})
    world.run(NOW + WAIT_S + 120)
    groups = len(world.groups)
    world.run(NOW + 5 * HOUR_S)
    assert on(world) == {SPOT: 0, ON_DEMAND: 4}
    assert len(world.groups) == groups
    assert 4 * 5 * HOUR_S / (WAIT_S + RETRY_S) * 0.7 < world.made - 8 < 4 * 5 * HOUR_S / (WAIT_S + RETRY_S) * 1.3


class Quota(GoalWorld):
    """A namespace in which there may be four pods."""

    def _act(self, actions: Sequence[object]) -> None:
        room = 4 - len(self.machines)
        makes = [action for action in actions if isinstance(action, CreateWorker)]
        super()._act([action for action in actions if action not in makes[max(0, room) :]])


def test_a_try_ends_though_no_replacement_can_be_created() -> None:
    world = a_world({SPOT: [0] * 9 + [4]})
    world = Quota(world.job, world.spot, world.steps, world.rates)
    world.run(NOW + WAIT_S + 120)
    assert on(world) == {SPOT: 0, ON_DEMAND: 4}
    tried = set()
    while world.now < NOW + 1.5 * HOUR_S:
        world.run(world.now + 30)
        tried.add(pools_of(world).trying)
    assert on(world) == {SPOT: 0, ON_DEMAND: 4}
    assert None in tried
    assert 1.5 * HOUR_S / (WAIT_S + RETRY_S) * 0.6 < len(tried - {None}) < 1.5 * HOUR_S / (WAIT_S + RETRY_S) * 1.3


def test_as_many_go_back_as_there_are_machines() -> None:
    world = a_world({SPOT: [0] * 9 + [3]})
    world.run(NOW + 2 * HOUR_S)
    assert on(world) == {SPOT: 3, ON_DEMAND: 1}


def test_a_replacement_does_not_ask_in_a_pool_that_was_just_given_up() -> None:
    world = a_world({SPOT: [2, 1]})
    world.run(NOW + TICK_S + 90)
    assert on(world) == {SPOT: 1, ON_DEMAND: 3}


def test_after_the_last_pool_comes_the_first() -> None:
    world = a_world({SPOT: [0, 0, 4], ON_DEMAND: [0]})
    world.run(NOW + 2 * WAIT_S - 1)
    waits = pools_of(world)
    assert (waits.pool, waits.then) == (ON_DEMAND, SPOT)
    world.run(NOW + 2 * TICK_S + 90)
    assert on(world) == {SPOT: 4, ON_DEMAND: 0}


def test_no_worker_moves_for_less_than_it_costs() -> None:
    """Shortly before the end; and where the user says that no worker is to be disturbed."""
    often = replace(ORDER, retry_seconds=30.0)
    late = a_world({SPOT: [0] * 11 + [4]}, often, int((11 * TICK_S + 40 - 270) * RATES[-1]))
    late.run(NOW + 11 * TICK_S + 25)
    assert late.job.status.phase is Phase.RUNNING
    assert {one.pod.pool for one in late.machines.values()} == {ON_DEMAND}
    assert (pools_of(late).back_to, pools_of(late).stays, pools_of(late).back_at) == (SPOT, NOT_WORTH_IT, None)
    firm = a_world({SPOT: [0] * 9 + [4]})
    template = {**firm.job.template, "metadata": {"annotations": {DO_NOT_DISRUPT: "true"}}}
    firm.job = replace(firm.job, template=template)
    firm.run(NOW + 3 * HOUR_S)
    assert on(firm) == {SPOT: 0, ON_DEMAND: 4}
    assert pools_of(firm).stays == NOT_TO_DISRUPT


def test_fewer_workers_leave_the_last_pool_first() -> None:
    world = a_world({SPOT: [2]})
    world.run(NOW + WAIT_S + 90)
    assert on(world) == {SPOT: 2, ON_DEMAND: 2}
    world.job = replace(world.job, desired=2, generation=2)
    world.pass_at = world.now
    world.run(world.now + 60)
    assert on(world) == {SPOT: 2, ON_DEMAND: 0}


def test_a_job_without_an_order_asks_in_no_pool() -> None:
    world = a_world({SPOT: [0]})
    world.job = replace(world.job, pools=None)
    world.run(NOW + HOUR_S)
    assert world.job.status.pools is None
    assert {one.pod.pool for one in world.machines.values()} == {""}


counts = st.lists(st.integers(0, 4), min_size=1, max_size=24)


@settings(max_examples=2)
@given(counts, counts, counts)
def test_no_more_workers_train_than_wanted_for_long_with_any_machines(a: list[int], b: list[int], c: list[int]) -> None:
    """No worker is disturbed while nothing changes, no machine is left unused forever, and there is no worker too
    many."""
    order = PoolOrder((f"{SPOT}/zone-a", f"{SPOT}/zone-b", ON_DEMAND), WAIT_S, RETRY_S)
    machines = dict(zip(order.order, (a, b, c), strict=True))
    world = a_world(machines, order, 10**9)
    world.run(NOW + 25 * TICK_S)
    last = [counts[-1] for counts in machines.values()]
    world.run(world.now + 12 * (WAIT_S + RETRY_S))
    assert len(world.members) == min(4, sum(last))
    if sum(last) >= 4:
        held = [world.on(pool) for pool in order.order]
        assert held[0] == min(4, last[0])
        assert sum(held[:2]) == min(4, sum(last[:2]))
        assert world.job.status.active == 4
        groups = len(world.groups)
        world.run(world.now + 4 * (WAIT_S + RETRY_S))
        assert len(world.groups) == groups
