"""The group of one job, driven by hand, and its state machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration, JobStatus, ProgressStatus, WorkerStatus
from elasticctl_controller.core.membership import (
    ADOPT_S,
    DRAIN_S,
    FIRST_SETTLE_S,
    FIRST_STEP_S,
    NEWCOMER_SETTLE_S,
    REJOIN_S,
    UNEXPLAINED_LIMIT,
    FormingGroup,
    Group,
    GroupEvent,
    GroupState,
    GroupWorld,
    ImpossibleGroupEvent,
    Member,
    RestoredGroup,
    transition,
)


def member(index: int) -> Member:
    return Member(uid=f"u{index}", name=f"job-worker-{index}", host="127.0.0.1", port=1000 + index, slots=1)


def alive(*indexes: int) -> dict[str, str]:
    return {f"u{i}": f"job-worker-{i}" for i in indexes}


def formed(*indexes: int, minimum: int = 1) -> Group:
    """A group that has formed at 0 s and has done its first step."""
    group = Group(job_uid="j")
    group.set_alive(alive(*indexes), minimum, 0.0)
    for i in indexes:
        group.join(member(i), 0, 0.0)
    group.note_step(1, ProgressStatus(step=1), 0.0)
    return group


def names(group: Group) -> list[str]:
    assert group.world is not None
    return [m.name for m in group.world.members]


def test_forms_as_soon_as_all_who_live_have_joined() -> None:
    group = Group(job_uid="j")
    group.set_alive(alive(0, 1), 1, 0.0)
    group.join(member(1), 0, 1.0)
    assert group.world is None
    group.join(member(0), 0, 1.5)
    assert names(group) == ["job-worker-0", "job-worker-1"]
    assert group.generation == 1


def test_first_generation_waits_a_bounded_time_for_a_worker_that_never_joins() -> None:
    group = Group(job_uid="j")
    group.set_alive(alive(0, 1), 1, 0.0)
    group.join(member(0), 0, 1.0)
    wait_s = group.settle(2.0)
    assert wait_s == pytest.approx(FIRST_SETTLE_S - 1.0)
    group.settle(1.0 + FIRST_SETTLE_S)
    assert names(group) == ["job-worker-0"]


def test_never_forms_below_the_minimum() -> None:
    group = Group(job_uid="j")
    group.set_alive(alive(0, 1, 2), 2, 0.0)
    group.join(member(0), 0, 0.0)
    group.settle(10_000.0)
    assert group.world is None


def test_losing_a_member_opens_and_survivors_form_at_once_without_the_replacement() -> None:
    group = formed(0, 1, 2)
    group.set_alive({"u0": "job-worker-0", "u2": "job-worker-2", "u9": "job-worker-1"}, 1, 10.0)
    assert group.world is None
    group.join(member(2), 1, 10.1)
    assert group.world is None
    group.join(member(0), 1, 10.2)
    assert names(group) == ["job-worker-0", "job-worker-2"]
    assert group.history.generations[-1].reason == "lost job-worker-1"
    assert group.history.generations[-1].opened_at == 10.0


def test_survivors_keep_their_order_when_rank_0_is_lost() -> None:
    group = formed(0, 1, 2)
    group.set_alive(alive(1, 2), 1, 5.0)
    group.join(member(2), 1, 5.0)
    group.join(member(1), 1, 5.0)
    assert names(group) == ["job-worker-1", "job-worker-2"]


def test_a_silent_survivor_is_left_out_after_a_bounded_time() -> None:
    group = formed(0, 1, 2)
    group.set_alive(alive(0, 1), 1, 5.0)
    group.join(member(0), 1, 5.0)
    assert group.settle(5.0) == pytest.approx(REJOIN_S)
    group.settle(5.0 + REJOIN_S)
    assert names(group) == ["job-worker-0"]


def test_newcomers_are_let_in_together() -> None:
    group = formed(0, 1)
    group.set_alive(alive(0, 1, 2, 3), 1, 5.0)
    group.join(member(2), 0, 6.0)
    assert group.world is not None, "training goes on while another newcomer is starting"
    group.join(member(3), 0, 6.5)
    assert group.drain is not None
    group.join(member(0), 1, 7.0)
    assert group.world is None, "a member that joins again has drained"
    group.join(member(1), 1, 7.0)
    assert names(group) == [f"job-worker-{i}" for i in range(4)]


def test_a_newcomer_lets_a_young_generation_do_its_first_step() -> None:
    group = formed(0, 1)
    group.set_alive(alive(0), 1, 10.0)
    group.join(member(0), 1, 10.0)
    group.set_alive(alive(0, 2), 1, 11.0)
    group.join(member(2), 0, 11.0)
    assert group.world is not None
    assert group.settle(11.0) == pytest.approx(FIRST_STEP_S - 1.0)
    assert group.drain is None
    group.note_step(2, ProgressStatus(step=2), 12.0)
    group.settle(12.0)
    assert group.drain is not None


def test_a_newcomer_does_not_wait_for_ever_for_a_first_step() -> None:
    group = formed(0, 1)
    group.set_alive(alive(0), 1, 10.0)
    group.join(member(0), 1, 10.0)
    group.set_alive(alive(0, 2), 1, 11.0)
    group.join(member(2), 0, 11.0)
    group.settle(10.0 + FIRST_STEP_S)
    assert group.drain is not None


def test_a_newcomer_does_not_wait_long_for_another_that_is_starting() -> None:
    group = formed(0)
    group.set_alive(alive(0, 1, 2), 1, 5.0)
    group.join(member(1), 0, 6.0)
    assert group.settle(6.0) == pytest.approx(NEWCOMER_SETTLE_S)
    group.settle(6.0 + NEWCOMER_SETTLE_S)
    assert group.drain is not None


def test_draining_has_a_deadline() -> None:
    group = formed(0, 1)
    group.notice("u1", "spot notice", 5.0)
    assert group.settle(6.0) == pytest.approx(DRAIN_S - 1.0)
    assert group.world is not None
    group.settle(5.0 + DRAIN_S)
    assert group.world is None
    assert group.reason == "spot notice"


def test_one_that_is_told_to_go_is_not_in_the_next_generation_and_not_waited_for() -> None:
    group = formed(0, 1, 2)
    group.set_alive(alive(0, 1, 2), 1, 5.0, frozenset({"u2"}))
    assert group.world is not None, "it is a member until it goes"
    group.notice("u2", "scaled in", 5.0)
    for i in range(3):
        group.join(member(i), 1, 6.0)
    assert names(group) == ["job-worker-0", "job-worker-1"]


def test_one_that_has_left_is_not_waited_for_while_its_pod_still_ends() -> None:
    group = formed(0, 1)
    group.leave("u1", "goes", 5.0)
    group.set_alive(alive(0, 1), 1, 5.1)
    group.join(member(0), 1, 5.2)
    assert names(group) == ["job-worker-0"]
    group.set_alive(alive(0), 1, 6.0)
    assert group.world is not None


def test_blame_goes_to_the_first_error_of_ones_own() -> None:
    group = formed(0, 1, 2)
    assert group.fail("u1", "job-worker-1", 1, of_peers=False, now=1.0)
    assert not group.fail("u0", "job-worker-0", 1, of_peers=False, now=1.1), "its peer had failed already"


def test_a_broken_connection_is_nobodys_fault_until_it_repeats_without_a_step() -> None:
    group = formed(0, 1)
    for round_number in range(UNEXPLAINED_LIMIT):
        assert not group.fail("u0", "job-worker-0", group.generation, of_peers=True, now=1.0), round_number
        group.join(member(0), group.generation, 1.0)
        group.join(member(1), group.generation, 1.0)
    assert group.fail("u0", "job-worker-0", group.generation, of_peers=True, now=1.0)


def test_a_step_clears_the_unexplained_failures() -> None:
    group = formed(0, 1)
    for _ in range(3 * UNEXPLAINED_LIMIT):
        assert not group.fail("u0", "job-worker-0", group.generation, of_peers=True, now=1.0)
        group.join(member(0), group.generation, 1.0)
        group.join(member(1), group.generation, 1.0)
        group.note_step(group.generation, ProgressStatus(step=7), 2.0)


def test_a_loss_explains_the_broken_connections_before_it() -> None:
    group = formed(0, 1, 2, 3)
    for lost in (3, 2):
        for _ in range(UNEXPLAINED_LIMIT):
            assert not group.fail("u0", "job-worker-0", group.generation, of_peers=True, now=1.0)
            for i in range(lost + 1):
                group.join(member(i), group.generation, 1.0)
        group.set_alive(alive(*range(lost)), 1, 2.0)
        for i in range(lost):
            group.join(member(i), group.generation, 2.0)
    assert not group.fail("u0", "job-worker-0", group.generation, of_peers=True, now=3.0)


def test_one_that_leaves_with_a_failure_of_its_own_explains_them_too() -> None:
    group = formed(0, 1)
    group.unexplained = UNEXPLAINED_LIMIT
    group.leave("u1", "its rank was killed", 1.0)
    group.join(member(0), 1, 1.0)
    assert not group.fail("u0", "job-worker-0", group.generation, of_peers=True, now=1.0)


def test_the_end_of_the_one_that_was_blamed_explains_nothing() -> None:
    group = formed(0, 1)
    group.unexplained = UNEXPLAINED_LIMIT
    assert group.fail("u1", "job-worker-1", 1, of_peers=True, now=1.0)
    group.leave("u1", "blamed", 1.0)
    group.set_alive(alive(0), 1, 1.5)
    group.join(member(0), 1, 2.0)
    assert group.fail("u0", "job-worker-0", group.generation, of_peers=True, now=2.0)


def test_a_restarted_service_takes_over_running_training() -> None:
    before = formed(0, 1)
    assert before.world is not None
    group = Group.restored("j", JobStatus(generation=1))
    group.set_alive(alive(0, 1), 1, 50.0)
    group.adopt(before.world, 50.0)
    assert names(group) == ["job-worker-0", "job-worker-1"]
    assert group.history.generations[-1].generation == 1


def test_a_restarted_service_does_not_take_an_old_world_once_a_member_joins_again() -> None:
    before = formed(0, 1)
    assert before.world is not None
    group = Group.restored("j", JobStatus(generation=1))
    group.set_alive(alive(0, 1), 1, 50.0)
    group.join(member(0), 1, 51.0)
    group.adopt(before.world, 50.0)
    assert group.world is None
    group.join(member(1), 1, 52.0)
    assert group.generation == 2


def test_a_member_that_was_lost_while_no_service_ran_is_not_trained_with() -> None:
    group = Group.restored("j", JobStatus(generation=4))
    group.set_alive(alive(0, 2), 1, 50.0)
    group.adopt(GroupWorld(4, (member(0), member(1), member(2))), 51.0)
    assert (group.world is None, group.reason) == (True, "lost job-worker-1")
    group.join(member(2), 4, 51.5)
    group.join(member(0), 4, 52.0)
    assert names(group) == ["job-worker-0", "job-worker-2"]
    assert group.generation == 5


def restored(*indexes: int) -> Group:
    """The group of these workers as a restarted service knows it, from generation 4, which formed at 40 s."""
    last = GroupGeneration(4, tuple(f"job-worker-{i}" for i in indexes), formed_at=Timestamp(40.0))
    roster = [WorkerStatus(f"job-worker-{i}", f"u{i}", i, started_at=Timestamp(30.0)) for i in indexes]
    roster.append(WorkerStatus("job-worker-0", "u9", 0, started_at=Timestamp(45.0)))
    return Group.restored("j", JobStatus(generation=4, generations=(last,), workers=tuple(roster)))


def test_newcomers_begin_no_group_beside_one_that_a_restarted_service_has_not_heard_of_yet() -> None:
    group = restored(0, 1)
    group.set_alive(alive(0, 1, 2), 1, 50.0)
    group.join(member(2), 0, 50.0)
    group.settle(50.0 + 2 * REJOIN_S)
    assert group.world is None
    group.adopt(GroupWorld(4, (member(0), member(1))), 75.0)
    group.settle(75.0)
    assert group.drain is not None, "it takes the newcomer in as ever"
    assert names(group) == ["job-worker-0", "job-worker-1"]


def test_a_group_that_is_never_heard_of_is_not_waited_for_for_ever() -> None:
    group = restored(0, 1)
    group.set_alive(alive(0, 2), 1, 50.0)
    group.join(member(2), 0, 50.0)
    assert group.settle(51.0) == pytest.approx(ADOPT_S - 1.0)
    group.settle(50.0 + ADOPT_S)
    assert names(group) == ["job-worker-2"]


def test_a_group_of_which_nobody_lives_is_not_waited_for() -> None:
    group = restored(0, 1)
    group.set_alive(alive(2), 1, 50.0)  # nor would the one be that has taken over a member's name
    assert group.situation == RestoredGroup(frozenset({"u0", "u1"}))
    group.join(member(2), 0, 50.0)
    assert names(group) == ["job-worker-2"]


def test_finish_waits_for_every_member_that_lives() -> None:
    group = formed(0, 1, 2)
    assert not group.finish("u0", 8.0)
    assert not group.finish("u1", 8.0)
    group.set_alive(alive(0, 1), 1, 9.0)
    assert group.world is None, "the third died before it was done"


def test_strangers_that_finish_or_leave_are_not_remembered() -> None:
    group = formed(0, 1)
    for number in range(1000):
        group.finish(f"stranger-{number}", 1.0)
        group.leave(f"stranger-{number}", "goes", 1.0)
    assert (group.finished, group.gone, group.world is None) == (set(), set(), False)


def test_steps_and_commits_are_recorded_by_generation() -> None:
    group = formed(0)
    group.history.note_resumed(1, 0)
    group.note_step(1, ProgressStatus(step=5, metrics={"loss": 1.0}), 3.0)
    group.note_step(1, ProgressStatus(step=9, metrics={"accuracy": 0.9}), 4.0)
    group.note_step(7, ProgressStatus(step=99), 4.0)  # another generation's report
    for number, step in [(1, 4), (2, 8), (1, 4), (2, 8)]:  # the launcher tells again what it saw no answer to
        group.history.note_commit(1, number, step, "file:///x", 10, 0.1, 5.0)
    record = group.history.generations[-1]
    assert (record.resumed_step, record.first_step_at, record.last_step) == (0, 0.0, 9)
    assert group.history.progress is not None
    assert group.history.progress.metrics == {"loss": 1.0, "accuracy": 0.9}
    assert (group.history.checkpoint.step, group.history.checkpoint.committed) == (8, 2)


def test_commits_are_numbered_anew_where_the_newest_was_removed() -> None:
    group = formed(0)
    group.history.note_commit(1, 7, 70, "file:///x", 10, 0.1, 5.0)
    group.history.note_commit(2, 7, 60, "file:///x", 10, 0.1, 6.0)
    assert (group.history.checkpoint.step, group.history.checkpoint.committed) == (60, 2)


def test_a_commit_told_to_the_service_before_counts_once() -> None:
    group = formed(0)
    group.history.note_commit(1, 1, 4, "file:///x", 10, 0.1, 5.0)
    again = Group.restored("j", JobStatus(generation=1, checkpoint=group.history.checkpoint))
    again.history.note_commit(1, 1, 4, "file:///x", 10, 0.1, 6.0)
    assert again.history.checkpoint == group.history.checkpoint
    again.history.note_commit(1, 2, 8, "file:///x", 10, 0.1, 7.0)
    assert (again.history.checkpoint.step, again.history.checkpoint.committed) == (8, 2)


# The state machine: each pair of state and event, and a real group driven through it.


def group_in(state: GroupState) -> Group:
    """A group of the workers 0 and 1 in this state, at 100 s."""
    if state is GroupState.STARTING:
        group = Group(job_uid="j")
        group.set_alive(alive(0, 1), 1, 100.0)
        return group
    if state is GroupState.RESTORED:
        group = restored(0, 1)
        group.set_alive(alive(0, 1), 1, 100.0)
        return group
    group = formed(0, 1)
    if state is GroupState.FORMING:
        group.fail("u0", "job-worker-0", 1, of_peers=False, now=100.0)
    elif state is GroupState.DRAINING:
        group.notice("u0", "spot notice", 100.0)
    return group


def newcomer_joins(group: Group, living: dict[str, str]) -> None:
    group.set_alive(living, 1, 101.0)
    group.join(member(2), 0, 101.0)


def group_is_reported(group: Group) -> None:
    group.adopt(GroupWorld(max(4, group.generation), (member(0), member(1))), 101.0)


def last_members_join(group: Group) -> None:
    for i in (0, 1):
        group.join(member(i), group.generation, 101.0)


CAUSES: dict[GroupEvent, Callable[[Group], object]] = {
    GroupEvent.WORKER_JOINED: lambda group: newcomer_joins(group, alive(0, 1, 2, 3)),
    GroupEvent.MEMBER_REJOINED: lambda group: group.join(member(0), max(1, group.generation), 101.0),
    GroupEvent.GROUP_REPORTED: group_is_reported,
    GroupEvent.MEMBER_LOST: lambda group: group.set_alive(alive(1), 1, 101.0),
    GroupEvent.MEMBER_LEFT: lambda group: group.leave("u0", "goes", 101.0),
    GroupEvent.MEMBER_FAILED: lambda group: group.fail(
        "u0", "job-worker-0", group.generation, of_peers=False, now=101.0
    ),
    GroupEvent.MEMBER_FINISHED: lambda group: group.finish("u0", 101.0),
    GroupEvent.REMOVAL_ANNOUNCED: lambda group: group.notice("u0", "scaled in", 101.0),
    GroupEvent.NEWCOMERS_DUE: lambda group: newcomer_joins(group, alive(0, 1, 2)),
    GroupEvent.DRAIN_EXPIRED: lambda group: group.settle(100.0 + DRAIN_S),
    GroupEvent.QUORUM_REACHED: last_members_join,
}
"""How each event is brought about from outside."""
PAIRS = [(state, event) for state in GroupState for event in GroupEvent]


def decided(state: GroupState, event: GroupEvent) -> GroupState | None:
    """What the transition function says of the pair; None: refused."""
    try:
        return transition(state, event)
    except ImpossibleGroupEvent:
        return None


@pytest.mark.parametrize("event", GroupEvent)
@pytest.mark.parametrize("state", GroupState)
def test_every_pair_of_state_and_event_is_decided(state: GroupState, event: GroupEvent) -> None:
    after = decided(state, event)
    formed_before = state in (GroupState.TRAINING, GroupState.DRAINING)
    if event in (GroupEvent.MEMBER_LOST, GroupEvent.MEMBER_LEFT, GroupEvent.MEMBER_FAILED):
        assert after is (GroupState.FORMING if formed_before else state), "only a formed generation has members to lose"
    elif event is GroupEvent.QUORUM_REACHED:
        assert after is (None if formed_before else GroupState.TRAINING), "a generation forms once"
    elif event in (GroupEvent.WORKER_JOINED, GroupEvent.MEMBER_FINISHED):
        assert after is state
    if after is GroupState.DRAINING:
        assert formed_before, "only who trains can commit a last step"
    assert after not in (GroupState.STARTING, GroupState.RESTORED) or after is state, "nothing leads back to the start"


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if decided(*pair) is not None])
def test_a_group_goes_where_the_transition_function_says(state: GroupState, event: GroupEvent) -> None:
    group = group_in(state)
    assert group.state is state
    CAUSES[event](group)
    assert group.state is decided(state, event)


def test_who_joins_completes_a_group_that_waits_for_nobody_else() -> None:
    group = group_in(GroupState.FORMING)
    group.set_alive(alive(0), 1, 101.0)
    group.join(member(0), 1, 102.0)
    assert group.state is GroupState.TRAINING, "two events in one call: joined again, quorum reached"


def test_a_drain_keeps_its_first_reason_and_deadline() -> None:
    group = group_in(GroupState.DRAINING)
    group.notice("u1", "scaled in", 105.0)
    assert group.drain is not None
    assert (group.drain.reason, group.drain.deadline) == ("spot notice", 100.0 + DRAIN_S)
    group.settle(100.0 + DRAIN_S)
    assert group.situation == FormingGroup(100.0 + DRAIN_S, "spot notice")


KINDS = ["live", "die", "join", "fail", "leave", "notice", "wait"]


class Story:
    """Six workers that come, go, join and fail in any order; checks the group after each step."""

    def __init__(self, minimum: int) -> None:
        self.group, self.minimum, self.now = Group(job_uid="j"), minimum, 0.0
        self.slots = list(range(6))  # which worker is in which slot: one that has gone never comes back
        self.living: set[int] = set()
        self.last_seen: dict[int, int] = {}
        self.highest = 0

    def act(self, kind: str, slot: int) -> None:
        self.now += 60.0 if kind == "wait" else 0.5
        i = self.slots[slot]
        if kind == "live":
            self.living.add(i)
        elif kind == "die" and i in self.living:
            self.go(slot)
        elif i in self.living and f"u{i}" in self.group.alive:
            self.speak(kind, i)
            if kind == "leave":
                self.go(slot)
        self.group.set_alive(alive(*self.living), self.minimum, self.now)
        self.group.settle(self.now)
        self.check()

    def go(self, slot: int) -> None:
        self.living.discard(self.slots[slot])
        self.slots[slot] += 6

    def speak(self, kind: str, i: int) -> None:
        if kind == "join":
            self.group.join(member(i), self.last_seen.get(i, 0), self.now)
        elif kind == "fail":
            self.group.fail(f"u{i}", f"job-worker-{i}", self.group.generation, of_peers=False, now=self.now)
        elif kind == "notice":
            self.group.notice(f"u{i}", "has to go", self.now)
        elif kind == "leave":
            self.group.leave(f"u{i}", "goes", self.now)

    def check(self) -> None:
        assert self.group.generation >= self.highest
        self.highest = self.group.generation
        if self.group.world is None:
            return
        members = {m.uid for m in self.group.world.members}
        assert len(members) == len(self.group.world.members) >= self.minimum
        assert members <= set(self.group.alive)
        for uid in members:
            self.last_seen[int(uid[1:])] = self.group.generation


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=60), st.integers(1, 3))
@settings(deadline=None, max_examples=300)
def test_whatever_happens_generations_grow_and_hold_live_workers_only(
    events: list[tuple[str, int]], minimum: int
) -> None:
    story = Story(minimum)
    for kind, i in events:
        story.act(kind, i)
    for _ in range(4):  # a newcomer may open the group once more; its members then join again
        for i in story.living:
            story.speak("join", i)
        story.now += 1000.0
        story.group.settle(story.now)
        story.check()
    assert (story.group.world is not None) == (len(story.living) >= minimum)
