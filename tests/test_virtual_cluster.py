"""The real controller, service and launcher states in simulated clusters, in virtual time: see docs/reliability.md."""

from __future__ import annotations

from tests.support.virtual.script import Script
from tests.support.virtual.story import Incident, Story, What, tell
from tests.support.virtual.world import Setup


def test_three_workers_outlive_their_losses() -> None:
    losses = (
        Incident(300.0, What.LOSE_NODE, 0.5, known_s=1.5),
        Incident(900.0, What.KILL, 0.0),
        Incident(1500.0, What.LOSE_NODE, 0.9, known_s=45.0),
    )
    world = tell(Story(1, Setup(nodes=4, script=Script(steps=6000)), losses))
    status = world.status
    assert dict(status.restarts) == {"Completed": 3, "Killed": 1, "NodeLost": 2}
    assert status.failures == 0
    assert all(item.recovered_at is not None for item in status.interruptions)
    assert world.storage.step == status.checkpoint.step == 6000
