"""Members whose host has stopped answering: left out once the group stands still, and not before."""

from __future__ import annotations

import pytest

from elasticctl.api.status import ProgressStatus
from elasticctl_controller.core.group.generations import STILL_S
from elasticctl_controller.core.group.group_states import GroupState
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.group.signs_of_life import ADOPT_S, HUNG_UP_S, SILENT_S, UNREACHABLE_S
from elasticctl_protocol.reports import RankPlace
from tests.support.controller.groups import fail, formed, join_all, member


def training(*indexes: int, minimum: int = 1) -> Group:
    """A group that has formed at 0 s, and has made a step each second until 10 s."""
    group = formed(*indexes, minimum=minimum, steps=False)
    for second in range(11):
        group.note_step(1, ProgressStatus(step=second), float(second))
        for i in indexes:
            group.note_sign(f"u{i}", float(second))
    return group


def next_event(group: Group, now: float) -> float:
    """Settle when the group has asked for it; returns when that was (or `now`, if it does not ask)."""
    wait_s = group.act_if_due(now)
    if wait_s is None:
        return now
    group.act_if_due(now + wait_s)
    return now + wait_s


def test_a_group_that_stands_still_leaves_out_the_member_whose_host_does_not_answer() -> None:
    group = training(0, 1, 2)
    group.lose_contact("u1", 11.0)
    assert group.state is GroupState.TRAINING, "the last step was a second ago"
    assert next_event(group, 11.0) == 10.0 + STILL_S, "it comes again by itself"
    assert (group.state, group.reason) == (GroupState.FORMING, "cannot reach job-worker-1")
    join_all(group, 0, 2, now=12.1)
    assert list(group.members.ranked) == ["u0", "u2"], "it is not waited for"
    assert group.failures.count == 0
    assert not group.signs.silent, "it has called 2 s ago: it is left out, not deleted"


def test_a_worker_that_turns_out_to_be_alive_returns_as_a_newcomer() -> None:
    group = training(0, 1, 2)
    group.lose_contact("u1", 11.0)
    next_event(group, 11.0)
    join_all(group, 0, 2, now=12.1)
    group.note_step(2, ProgressStatus(step=11), 12.2)
    group.join(member(1), 1, 13.0)
    assert not group.signs.overdue
    assert not group.signs.unreachable
    assert group.failures.count == 0
    assert group.drain is not None, "it is taken in"


def test_ranks_that_reach_each_other_continue_to_train_without_the_service() -> None:
    group = training(0, 1, 2)
    group.lose_contact("u1", 10.5)
    for second in range(11, 200):
        group.note_step(1, ProgressStatus(step=second), float(second))
        group.act_if_due(second + 0.5)
        assert group.state is GroupState.TRAINING


def test_long_steps_are_not_taken_for_a_standstill() -> None:
    group = training(0, 1, 2)
    group.note_step(1, ProgressStatus(step=11), 110.0)  # an evaluation, say
    group.lose_contact("u1", 150.0)
    group.act_if_due(250.0)
    assert group.state is GroupState.TRAINING
    group.act_if_due(310.0)
    assert group.state is GroupState.FORMING


def test_nothing_is_concluded_while_no_member_can_be_reached_or_ranks_wait_for_the_storage() -> None:
    group = training(0, 1)
    for uid in ("u0", "u1"):
        group.lose_contact(uid, 11.0)
    assert group.act_if_due(500.0) is None
    assert group.state is GroupState.TRAINING, "their steps cannot be reported"
    group = training(0, 1)
    group.reports.obstacle = "the storage does not answer"
    group.lose_contact("u1", 11.0)
    group.act_if_due(500.0)
    assert group.state is GroupState.TRAINING


def test_a_first_step_may_take_as_long_as_it_likes_unless_its_ranks_are_seen_not_to_move() -> None:
    group = formed(0, 1, steps=False)
    group.lose_contact("u1", 1.0)
    assert group.act_if_due(2000.0) is None
    assert group.state is GroupState.TRAINING
    group.reports.places[0] = RankPlace(0, "all_reduce", waits=True)
    group.act_if_due(2001.0)
    assert group.state is GroupState.FORMING


def test_a_worker_that_calls_again_in_time_is_no_longer_unreachable() -> None:
    group = training(0, 1)
    group.lose_contact("u1", 11.0)
    group.note_sign("u1", 11.0 + UNREACHABLE_S / 2)
    group.act_if_due(500.0)
    assert group.state is GroupState.TRAINING


def test_a_worker_that_has_hung_up_and_does_not_call_again_is_left_out() -> None:
    """All processes of its machine have ended, and its kernel has closed their connections."""
    group = training(0, 1, 2)
    group.lose_contact("u1", 11.0, hung_up=True)
    assert next_event(group, 11.0) == 11.0 + HUNG_UP_S
    assert (group.state, group.failures.count) == (GroupState.FORMING, 0)
    join_all(group, 0, 2, now=13.1)
    assert list(group.members.ranked) == ["u0", "u2"], "it is not waited for"


def test_several_that_hang_up_together_are_not_unreachable() -> None:
    group = training(0, 1, 2, 3)
    for index in (0, 1, 2):
        group.lose_contact(f"u{index}", 11.0 + index / 10, hung_up=True)
    group.act_if_due(30.0)
    assert group.state is GroupState.TRAINING
    group.note_sign("u0", 40.0)
    group.lose_contact("u0", 40.0, hung_up=True)
    group.act_if_due(40.0 + HUNG_UP_S)
    assert group.reason == "cannot reach job-worker-0", "it has been alone"


def test_a_launcher_that_calls_again_after_a_broken_connection_is_not_unreachable() -> None:
    group = training(0, 1, 2)
    group.lose_contact("u1", 11.0, hung_up=True)
    group.note_sign("u1", 11.0 + HUNG_UP_S / 2)
    group.act_if_due(500.0)
    assert group.state is GroupState.TRAINING


def test_broken_connections_are_explained_by_a_member_that_cannot_be_reached() -> None:
    group = training(0, 1, 2)
    for index in (0, 2):
        fail(group, index, 11.0, of_peers=True)
    assert group.state is GroupState.BREAKING
    group.lose_contact("u1", 11.2)
    assert next_event(group, 11.2) == pytest.approx(11.2 + UNREACHABLE_S)
    assert (group.state, group.failures.count) == (GroupState.FORMING, 0)


def test_a_member_that_is_stopping_its_ranks_is_still_waited_for() -> None:
    group = training(0, 1)
    group.join(member(0), 1, 11.0)
    for second in range(11, 80, 3):
        group.note_sign("u1", float(second), "stopping")
        group.act_if_due(second + 1.0)
    assert group.state is GroupState.FORMING


def test_a_group_that_is_too_small_without_a_silent_member_has_it_replaced() -> None:
    group = training(0, 1, minimum=2)
    group.lose_contact("u1", 11.0)
    next_event(group, 11.0)
    group.join(member(0), 1, 12.0)
    assert group.state is GroupState.FORMING
    assert not group.signs.silent
    again_at = next_event(group, 12.0)
    assert again_at == 12.0 + SILENT_S, "from the end of the generation on"
    assert group.signs.silent == {"u1"}


def test_a_group_that_is_too_small_waits_for_a_member_that_gives_signs_of_life() -> None:
    group = training(0, 1, minimum=2)
    group.join(member(0), 1, 11.0)
    for second in range(11, 300, 3):
        group.note_sign("u1", float(second), "stopping")
        group.act_if_due(second + 1.0)
    assert not group.signs.silent
    assert not group.signs.overdue


def test_a_silent_worker_is_left_out_once_the_others_report_that_they_stand_still() -> None:
    """Its host has vanished while no call of its launcher was open, so that no connection could break."""
    group = training(0, 1, 2)
    for index in (0, 2):
        group.note_sign(f"u{index}", 15.0)
    assert group.act_if_due(15.0) is None
    group.reports.places = {0: RankPlace(0, "all_reduce", waits=True)}
    assert group.act_if_due(15.0) == pytest.approx(10.0 + ADOPT_S - 15.0)
    for index in (0, 2):
        group.note_sign(f"u{index}", 54.0)
    group.act_if_due(10.0 + ADOPT_S)
    assert group.state is GroupState.FORMING
    assert group.reason == "cannot reach job-worker-1"


def test_if_no_worker_is_heard_it_is_the_service_that_is_cut_off() -> None:
    group = training(0, 1)
    group.reports.places = {0: RankPlace(0, "all_reduce", waits=True)}
    assert group.act_if_due(100.0) is None
    assert group.state is GroupState.TRAINING
