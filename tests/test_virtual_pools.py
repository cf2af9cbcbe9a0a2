"""An order of pools with the real controller, service and launcher states, in simulated clusters, in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from elasticctl.api.goal import ON_DEMAND, SPOT, PoolOrder
from elasticctl.api.status import Phase
from tests.support.virtual.script import Script
from tests.support.virtual.world import Setup, World

LABEL = "karpenter.sh/capacity-type"
SPOT_NODE, ON_DEMAND_NODE = {LABEL: "spot"}, {LABEL: "on-demand"}
ORDER = PoolOrder((SPOT, ON_DEMAND), 120.0, 300.0)
STEPS = 6000


def a_world(seed: int = 1, *, stays: bool = True) -> World:
    """A job of three workers that asks for spot machines first; there are none of any kind yet."""
    world = World(Setup(nodes=0, script=Script(steps=STEPS, stays=stays), pools=ORDER), seed)
    world.start()
    return world


@pytest.fixture(params=[True, False], ids=["stays", "restarts"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = a_world(stays=request.param)
    yield world
    world.close()


def held(world: World) -> Counter[str]:
    """The workers that train, by pool."""
    members = world.status.generations[-1].workers if world.status.generations else ()
    return Counter(worker.pool for worker in world.status.workers if worker.name in members and not worker.removal)


def test_workers_fall_back_to_the_next_pool_and_come_back_without_a_step_made_twice(world: World) -> None:
    for _ in range(3):
        world.add_node(ON_DEMAND_NODE)
    world.run(ORDER.wait_seconds - 5.0)
    assert not world.trainings
    world.run(ORDER.wait_seconds + 60.0)
    assert held(world) == {ON_DEMAND: 3}
    world.run(1000.0)
    assert held(world) == {ON_DEMAND: 3}
    assert len(world.trainings) == 1, "tries in vain disturb no worker"
    for _ in range(3):
        world.add_node(SPOT_NODE)
    world.run(1000.0 + ORDER.wait_seconds + ORDER.retry_seconds + 60.0)
    assert held(world) == {SPOT: 3}
    assert len(world.trainings) <= 4, "they join, and the others leave"
    world.run(STEPS * 2.0)
    status = world.status
    assert status.phase is Phase.SUCCEEDED
    assert status.interruptions == status.scalings == ()
    assert world.storage.step == STEPS
    if world.script.stays:
        assert world.figures.steps_made == STEPS, "no step is made twice"
    reasons = [reason for _, reason, _ in world.cluster.events]
    assert reasons.count("PoolGivenUp") == reasons.count("PoolRegained") == 1


def test_a_restarted_controller_goes_on_where_it_was(world: World) -> None:
    for _ in range(3):
        world.add_node(ON_DEMAND_NODE)
    world.run(60.0)
    world.crash_service(30.0)
    world.run(ORDER.wait_seconds + 60.0)
    assert held(world) == {ON_DEMAND: 3}
    world.run(ORDER.wait_seconds + ORDER.retry_seconds + 30.0)
    world.crash_service(5.0)
    world.add_node(SPOT_NODE)
    world.run(1200.0)
    assert held(world) == {ON_DEMAND: 2, SPOT: 1}
    assert world.status.interruptions == ()


@pytest.mark.seeds(3, search=100)
def test_whatever_comes_and_goes_the_work_is_done(seed: int) -> None:
    dice = random.Random(seed)
    world = a_world(seed, stays=dice.random() < 0.5)
    try:
        for _ in range(3):
            world.add_node(ON_DEMAND_NODE)
        for _ in range(12):
            labels = dice.choice((SPOT_NODE, SPOT_NODE, ON_DEMAND_NODE))
            at_s = dice.uniform(0.0, 3000.0)
            name = f"extra-{at_s:.0f}"
            world.loop.at(at_s, world.cluster.add_node, name, labels)
            world.loop.at(at_s + dice.uniform(30.0, 1500.0), world.lose_node, name, 1.0)
        for _ in range(dice.randint(0, 2)):
            world.loop.at(dice.uniform(0.0, 3000.0), world.crash_service, 10.0)
        world.run(STEPS * 4.0)
        status = world.status
        assert status.phase is Phase.SUCCEEDED, (status.phase, status.message, status.pools)
        assert world.storage.step == STEPS
        assert status.failures == 0
    finally:
        world.close()
