"""Groups whose ranks stay in their processes: workers that start ranks do so while the others train."""

from __future__ import annotations

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration, JobStatus, ProgressStatus, RankFailure, WorkerStatus
from elasticctl_controller.core.group.failures import RanksEnd
from elasticctl_controller.core.group.group_states import GroupState, GroupWorld
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.group.signs_of_life import SILENT_S
from tests.support.controller.groups import fail, formed, join_all, member


def staying(*indexes: int) -> Group:
    """A group that has formed at 0 s, has made a step, and whose ranks stay."""
    group = formed(*indexes)
    group.reports.set_stays(True)
    return group


def killed(signal: str) -> Group:
    """Worker 1's rank has ended, the others' have lost it and joined again."""
    group = staying(0, 1, 2)
    fail(group, 1, 10.0, verdict="killed", signal=signal)
    for index in (0, 2):
        fail(group, index, 10.0, of_peers=True)
    assert group.verdict("u1", 1) == "rejoin"
    join_all(group, 0, 2, now=10.0)
    return group


def test_a_worker_whose_ranks_were_killed_is_not_waited_for() -> None:
    group = killed("SIGKILL")
    assert group.state is GroupState.FORMING, "it may join at any moment"
    assert group.has_to_prepare(member(1), 1, 10.1)
    assert (group.generation, list(group.members.ranked)) == (2, ["u0", "u2"])
    assert not group.signs.overdue
    group.note_step(2, ProgressStatus(step=2), 10.2)
    group.join(member(1), 1, 20.0)
    assert group.drain is not None, "it is ready, and taken in at the end of a step"


def test_a_script_that_fails_by_itself_is_waited_for_at_its_size() -> None:
    group = killed("")
    assert group.has_to_prepare(member(1), 1, 10.1)
    assert group.state is GroupState.FORMING
    for second in range(11, 60, 3):
        for index in range(3):
            group.note_sign(f"u{index}", float(second))
        group.act_if_due(float(second))
    assert group.state is GroupState.FORMING, "it gives signs of life"
    group.join(member(1), 1, 60.0)
    assert list(group.members.ranked) == ["u0", "u1", "u2"]


def test_a_worker_that_gets_ready_is_not_taken_for_a_silent_one() -> None:
    group = killed("SIGKILL")
    group.has_to_prepare(member(1), 1, 10.1)
    group.act_if_due(10.1 + 5 * SILENT_S)
    assert not group.signs.silent


def test_a_member_that_has_to_restart_its_ranks_ends_the_generation() -> None:
    group = staying(0, 1)
    assert group.has_to_prepare(member(1), 1, 5.0)
    assert (group.state, group.reason) == (GroupState.FORMING, "job-worker-1 starts again")
    assert group.failures.count == 0


def test_a_newcomer_prepares_first_and_a_member_gets_the_world() -> None:
    group = staying(0, 1)
    group.set_alive({**group.members.alive, "u2": "job-worker-2"}, 1, 5.0)
    assert group.has_to_prepare(member(2), 0, 5.0)
    assert group.state is GroupState.TRAINING
    assert not group.has_to_prepare(member(1), 0, 5.0), "the answer to its join has been lost: it is a member"


def test_where_no_member_is_left_or_ranks_do_not_stay_ranks_start_in_the_group() -> None:
    group = staying(0)
    assert not group.has_to_prepare(member(0), 1, 5.0)
    group = staying(0, 1)
    group.reports.set_stays(False)
    assert not group.has_to_prepare(member(1), 1, 5.0)


def test_a_restarted_service_has_newcomers_prepare_before_it_knows_the_running_group() -> None:
    last = GroupGeneration(4, ("job-worker-0", "job-worker-1"), formed_at=Timestamp(40.0), stays=True)
    roster = tuple(WorkerStatus(f"job-worker-{i}", f"u{i}", i, started_at=Timestamp(30.0)) for i in range(2))
    group = Group.restored("j", JobStatus(generation=4, generations=(last,), workers=roster))
    group.set_alive({f"u{i}": f"job-worker-{i}" for i in range(3)}, 1, 50.0)
    assert group.has_to_prepare(member(2), 0, 50.0)
    assert group.ranks_of_others(member(2)) == 2
    group.adopt(GroupWorld(4, (member(0), member(1))), 51.0)
    assert group.has_to_prepare(member(2), 0, 52.0), "before any rank has reported to this service"
    assert group.state is GroupState.TRAINING


def lose_connections(group: Group, now: float) -> None:
    """Workers 0 and 2 lose their connections, and no cause is reported in time; all continue in a new generation."""
    for index in (0, 2):
        fail(group, index, now, of_peers=True)
    group.note_sign("u1", now + 999.0, "stopping")
    group.act_if_due(now + 1000.0)
    for index in range(3):
        group.join(member(index), group.generation, now + 1000.0)
    assert group.state is GroupState.TRAINING


def test_a_rank_that_is_still_cleaning_up_when_it_gets_a_place_is_counted_once() -> None:
    group = staying(0, 1, 2)
    lose_connections(group, 10.0)
    fail(group, 1, 1030.0, verdict="killed")
    for index in (0, 2):
        fail(group, index, 1030.0, of_peers=True)
    join_all(group, 0, 1, 2, now=1031.0)
    assert (group.generation, group.failures.count) == (3, 1)
    failures = [item.failure for item in group.history.generations]
    assert failures[0] is not None
    assert (failures[0].verdict, failures[1:]) == ("killed", [None, None])


def test_once_the_ranks_have_begun_a_failure_explains_none_before() -> None:
    group = staying(0, 1, 2)
    lose_connections(group, 10.0)
    group.note_step(2, ProgressStatus(step=2), 1020.0)
    fail(group, 1, 1030.0, verdict="killed")
    for index in (0, 2):
        fail(group, index, 1030.0, of_peers=True)
    join_all(group, 0, 1, 2, now=1031.0)
    assert group.failures.count == 2


def hang(group: Group, now: float) -> None:
    """The ranks of all members wait for each other."""
    failure = RankFailure("collateral", error="the group hangs: rank 0 waits in all_reduce", at=Timestamp(now))
    generation = group.generation
    for uid, each in list(group.members.ranked.items()):
        group.fail(RanksEnd(uid, each.name, now, failure, of_peers=True), generation, now)
    assert group.verdict("u0", generation) == "rejoin"


def join_again(group: Group, *indexes: int, now: float) -> GroupWorld:
    generation = group.generation
    for index in indexes:
        group.join(member(index), generation, now, stay=True)
    assert group.world is not None
    return group.world


def test_all_ranks_of_a_group_that_hangs_twice_without_a_step_restart() -> None:
    """A worker does not start its ranks while others that could train wait: they would hang again."""
    group = staying(0, 1)
    hang(group, 60.0)
    assert not join_again(group, 0, 1, now=61.0).from_start
    fail(group, 1, 70.0, verdict="killed")
    assert not join_again(group, 0, 1, now=71.0).from_start, "a failure in between is no step"
    hang(group, 130.0)
    assert not group.has_to_prepare(member(1), group.generation, 130.5)
    assert join_again(group, 0, 1, now=131.0).from_start
    assert not group.has_to_prepare(member(2), 0, 131.5), "not before a step"
    group.note_step(group.generation, ProgressStatus(step=2), 140.0)
    hang(group, 200.0)
    assert not join_again(group, 0, 1, now=201.0).from_start
