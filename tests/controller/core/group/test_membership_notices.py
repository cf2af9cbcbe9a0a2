"""A member of the group that has to go and has time: it trains on until its place is taken, and leaves in time."""

from __future__ import annotations

import pytest

from elasticctl.api.status import JobStatus, ProgressStatus, WorkerStatus
from elasticctl_controller.core.group.group_states import GroupState
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.interruption_notices import LEAVE_S, LeaveNotice
from tests.support.controller.groups import alive, formed, join_all, member

WORDS = "AWS spot interruption"


def warned(*indexes: int, deadline: float | None = 130.0) -> Group:
    """A group of three that has formed at 0 s; those members have to go, as their launchers say at 10 s."""
    group = formed(0, 1, 2)
    for index in indexes:
        group.add_notice(f"u{index}", LeaveNotice(WORDS, deadline), 10.0)
    return group


def come(group: Group, *indexes: int, now: float) -> None:
    group.set_alive({**group.members.alive, **alive(*indexes)}, 1, now)
    for index in indexes:
        group.join(member(index), 0, now)


def test_it_trains_on_until_its_place_is_taken() -> None:
    group = warned(1)
    assert (group.state, group.stay_s("u1", 10.0)) == (GroupState.TRAINING, 120.0 - LEAVE_S)
    come(group, 3, now=40.0)
    assert group.drain is not None
    assert group.drain.reason == f"job-worker-1 has to stop: {WORDS}"
    assert group.notices.departing == {"u1"}
    group.leave("u1", "SIGTERM", 41.0)
    join_all(group, 0, 2, now=41.0)
    assert group.world is not None
    assert [each.uid for each in group.world.members] == ["u0", "u2", "u3"], "one re-forming for both"


def test_it_leaves_without_a_successor_before_its_deadline() -> None:
    group = warned(1)
    assert group.act_if_due(20.0) == 130.0 - LEAVE_S - 20.0
    group.act_if_due(130.0 - LEAVE_S)
    assert group.state is GroupState.DRAINING
    assert group.stay_s("u1", 116.0) == 0.0


def test_a_worker_without_a_deadline_waits_for_its_replacement() -> None:
    group = warned(1, deadline=None)
    assert group.act_if_due(1e6) is None
    assert group.state is GroupState.TRAINING
    come(group, 3, now=1e6)
    assert group.state is GroupState.DRAINING


def test_two_with_notice_cost_the_group_one_stop() -> None:
    group = warned(1, 2)
    group.set_alive(alive(0, 1, 2, 3, 4), 1, 20.0)
    group.join(member(3), 0, 20.0)
    assert group.state is GroupState.TRAINING, "another is starting"
    group.join(member(4), 0, 25.0)
    assert group.notices.departing == {"u1", "u2"}


def test_a_notice_of_the_cluster_can_be_withdrawn() -> None:
    group = formed(0, 1)
    group.notices.given = {"u1": LeaveNotice("Karpenter is removing its node")}
    group.act_if_due(10.0)
    assert group.stay_s("u1", 10.0) > 1e9
    group.notices.given = {}
    assert group.stay_s("u1", 11.0) == 0.0
    group.next_generation.growth = ""
    come(group, 2, now=20.0)
    assert group.drain is not None
    assert group.drain.reason == "job-worker-2 joined", "it is an ordinary newcomer"


def test_a_worker_in_the_group_has_taken_its_place() -> None:
    group = warned(1)
    group.set_alive(alive(0, 1, 2, 3), 1, 20.0)
    group.note_sign("u0", 20.0, "exporting")
    group.join(member(3), 0, 20.0)
    assert group.state is GroupState.TRAINING, "what is nearly done is not stopped"
    group.set_alive(alive(0, 1, 3), 1, 21.0)  # another is lost
    join_all(group, 0, 1, now=21.0)
    assert group.world is not None
    assert {each.uid for each in group.world.members} == {"u0", "u1", "u3"}
    group.note_sign("u0", 22.0, "running")
    group.note_step(2, ProgressStatus(step=2), 23.0)
    group.act_if_due(24.0)
    assert group.notices.departing == {"u1"}


@pytest.mark.parametrize("state", ["draining", "forming", "no notice", "asked to stop"])
def test_it_may_not_stay_where_there_is_nothing_to_stay_in(state: str) -> None:
    group = formed(0, 1) if state == "no notice" else warned(1)
    if state == "draining":
        group.stop_member("u0", "scaled in", 20.0)
    elif state == "forming":
        group.leave("u0", "goes", 20.0)
    elif state == "asked to stop":
        group.set_alive(alive(0, 1), 1, 20.0, frozenset({"u1"}))
    assert group.stay_s("u1", 20.0) == 0.0


def test_a_group_is_not_stopped_for_it_before_its_first_step() -> None:
    group = formed(0, 1, steps=False)
    group.add_notice("u1", LeaveNotice(WORDS, 500.0), 1.0)
    come(group, 2, now=2.0)
    assert group.state is GroupState.TRAINING
    assert group.act_if_due(2.0) is not None, "ranks that report nothing are asked later"
    group.note_step(1, ProgressStatus(step=1), 3.0)
    group.act_if_due(3.0)
    assert group.state is GroupState.DRAINING


def test_a_restarted_service_still_knows_the_notice() -> None:
    workers = tuple(WorkerStatus(f"job-worker-{i}", f"u{i}", i, notice=WORDS if i else "") for i in (0, 1))
    group = Group.restored("j", JobStatus(workers=workers))
    assert group.notices.reported == {"u1": LeaveNotice(WORDS)}


def test_what_is_known_of_workers_that_are_gone_is_dropped() -> None:
    group = warned(1)
    group.act_if_due(120.0)
    group.set_alive(alive(0, 2), 1, 121.0)
    assert (group.notices.reported, group.notices.departing) == ({}, set())
    group.add_notice("unknown", LeaveNotice(WORDS), 122.0)
    assert group.notices.reported == {}
