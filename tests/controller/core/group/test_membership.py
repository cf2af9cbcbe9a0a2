"""The group of one job, driven by hand, and its state machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration, JobStatus, ProgressStatus, RankFailure, WorkerStatus
from elasticctl_controller.core.group.failures import CULPRIT_S, VICTIMS_S, GroupRules, RanksEnd
from elasticctl_controller.core.group.generations import FIRST_SETTLE_S
from elasticctl_controller.core.group.group_states import (
    FormingGroup,
    GroupEvent,
    GroupState,
    GroupWorld,
    ImpossibleGroupEvent,
    transition,
)
from elasticctl_controller.core.group.membership import MAX_RECALLED, Group
from elasticctl_controller.core.group.newcomers import NEWCOMER_SETTLE_S
from elasticctl_controller.core.group.signs_of_life import ADOPT_S, SILENT_S
from elasticctl_protocol.reports import RankPlace
from tests.support.controller.groups import alive, fail, formed, join_all, member


def all_fail(group: Group, now: float, **how: bool) -> None:
    """The ranks of all members end like that, one after the other, and all join again."""
    generation, indexes = group.generation, [int(uid[1:]) for uid in group.members.ranked]
    for index in indexes:
        fail(group, index, now, **how)
    for index in indexes:
        group.join(member(index), generation, now)


def failure_of(group: Group, index: int) -> RankFailure:
    found = group.history.generations[index].failure
    assert found is not None
    return found


def names(group: Group) -> list[str]:
    assert group.world is not None
    return [m.name for m in group.world.members]


def test_first_generation_waits_a_bounded_time_for_a_worker_that_never_joins() -> None:
    group = Group(job_uid="j")
    group.set_alive(alive(0, 1), 1, 0.0)
    group.join(member(0), 0, 1.0)
    wait_s = group.act_if_due(2.0)
    assert wait_s == pytest.approx(FIRST_SETTLE_S - 1.0)
    group.act_if_due(1.0 + FIRST_SETTLE_S)
    assert names(group) == ["job-worker-0"]


def test_never_forms_below_the_minimum() -> None:
    group = Group(job_uid="j")
    group.set_alive(alive(0, 1, 2), 2, 0.0)
    group.join(member(0), 0, 0.0)
    group.act_if_due(10_000.0)
    assert group.world is None


def test_after_a_loss_survivors_form_immediately_without_the_replacement() -> None:
    group = formed(0, 1, 2)
    group.set_alive({"u0": "job-worker-0", "u2": "job-worker-2", "u9": "job-worker-1"}, 1, 10.0)
    assert group.world is None
    group.join(member(2), 1, 10.1)
    assert group.world is None
    group.join(member(0), 1, 10.2)
    assert names(group) == ["job-worker-0", "job-worker-2"]
    assert group.history.generations[-1].reason == "lost job-worker-1"
    assert group.history.generations[-1].opened_at == 10.0


def test_the_reason_names_few_of_many_workers_so_that_twenty_of_them_fit_a_status() -> None:
    group = formed(*range(500))
    group.set_alive(alive(0, 1), 1, 10.0)
    join_all(group, 0, 1, now=10.1)
    reason = group.history.generations[-1].reason
    assert reason == "lost job-worker-2, job-worker-3, job-worker-4 and 495 more workers"


def test_a_survivor_without_a_sign_of_life_is_left_out_and_replaced() -> None:
    group = formed(0, 1, 2)
    group.set_alive(alive(0, 1), 1, 5.0)
    group.join(member(0), 1, 5.0)
    assert group.act_if_due(5.0) == pytest.approx(SILENT_S)
    group.act_if_due(5.0 + SILENT_S)
    assert names(group) == ["job-worker-0"]
    assert group.signs.silent == {"u1"}


def test_a_worker_that_takes_long_to_stop_is_in_the_next_generation() -> None:
    group = formed(*range(64))
    group.set_alive(alive(*range(1, 64)), 1, 100.0)
    for second in range(101, 161):
        for i in range(1, 64):
            group.note_sign(f"u{i}", float(second), "stopping", second - 100.0)
        group.act_if_due(float(second))
        assert group.world is None
    for i in range(1, 64):
        group.join(member(i), 1, 160.0)
    assert len(names(group)) == 63
    assert not group.signs.silent


def test_few_workers_are_replaced_at_a_time_when_many_fall_silent() -> None:
    group = formed(*range(40))
    group.set_alive(alive(*range(1, 40)), 1, 100.0)
    for i in range(1, 20):
        group.join(member(i), 1, 100.0)
    group.act_if_due(100.0 + SILENT_S)
    assert len(names(group)) == 19, "the others continue to train"
    assert len(group.signs.silent) == 3, "a tenth of 39 in the first minute"
    group.act_if_due(130.0)
    assert len(group.signs.silent) == 3
    group.act_if_due(171.0)
    assert len(group.signs.silent) == 6
    silent = set(group.signs.silent)
    back = next(i for i in range(20, 40) if f"u{i}" not in silent)
    group.join(member(back), 1, 180.0)
    group.act_if_due(1000.0)
    assert f"u{back}" not in group.signs.silent


def test_newcomers_are_admitted_together() -> None:
    group = formed(0, 1)
    group.set_alive(alive(0, 1, 2, 3), 1, 5.0)
    group.join(member(2), 0, 6.0)
    assert group.world is not None, "training continues while another newcomer is starting"
    group.join(member(3), 0, 6.5)
    assert group.drain is not None
    group.join(member(0), 1, 7.0)
    assert group.world is None, "a member that joins again has drained"
    group.join(member(1), 1, 7.0)
    assert names(group) == [f"job-worker-{i}" for i in range(4)]


def test_a_newcomer_waits_for_the_first_step_however_long_it_takes_and_then_until_stopping_pays() -> None:
    group = formed(0, 1)
    group.set_alive(alive(0), 1, 10.0)
    group.join(member(0), 1, 10.0)
    group.set_alive(alive(0, 2), 1, 11.0)
    group.join(member(2), 0, 11.0)
    for now in (11.0, 100.0, 10_000.0):
        assert group.act_if_due(now) is None, "there is nothing to wait for but the step"
        assert group.drain is None
    group.note_step(2, ProgressStatus(step=2), 10_010.0)
    wait_s = group.act_if_due(10_010.0)
    assert wait_s is not None
    assert wait_s >= 10_000.0, "the re-forming took 10,000 s, so the next one has to be worth it"
    group.act_if_due(10_010.0 + wait_s)
    assert group.drain is not None


def test_the_last_newcomer_is_admitted_immediately_where_stopping_has_cost_little() -> None:
    group = formed(0, 1, steps=False)
    group.note_step(1, ProgressStatus(step=1), 10.0)
    group.set_alive(alive(0, 1, 2), 1, 30.0)
    group.join(member(2), 0, 30.0)
    assert group.drain is not None, "10 s of 30"
    group = formed(0, 1, steps=False)
    group.note_step(1, ProgressStatus(step=1), 10.0)
    group.set_alive(alive(0, 1, 2, 3), 1, 30.0)
    group.join(member(2), 0, 30.0)
    group.act_if_due(30.0 + NEWCOMER_SETTLE_S)
    assert group.drain is None, "another is to come: 36 s of training pay for stopping twice"
    group.act_if_due(50.0)
    assert group.drain is not None


@pytest.mark.slow
def test_a_newcomer_each_minute_does_not_keep_a_group_with_long_first_steps_from_training() -> None:
    group = formed(0, steps=False)
    group.history.note_resumed(1, 0)
    first_step_s, trained, generation_at, workers = 600.0, 0.0, 0.0, [0]
    for now in map(float, range(5, 12 * 3600, 5)):
        if now % 60 == 0 and len(workers) < 32:
            workers.append(len(workers))
            group.set_alive(alive(*workers), 1, now)
            group.join(member(workers[-1]), 0, now)
        if now - generation_at >= first_step_s:
            trained += 5 * len(group.members.ranked) ** 0.8
            group.note_step(group.generation, ProgressStatus(step=int(now)), now)
        group.act_if_due(now)
        if group.drain is not None:
            generation, members = group.generation, list(group.members.ranked)
            for uid in members:
                group.join(member(int(uid[1:])), generation, now)
            assert group.world is not None
            generation_at = now
            group.history.note_resumed(group.generation, int(now))
    assert len(group.members.ranked) == 32, "all of them are admitted"
    assert trained >= 0.9 * (12 * 3600 - first_step_s), "as much as without newcomers"


def test_a_script_that_reports_nothing_is_left_alone_for_longer_each_time() -> None:
    group = formed(0, steps=False)
    now, waits = 0.0, []
    for i in range(1, 5):
        group.set_alive(alive(*range(i + 1)), 1, now)
        group.join(member(i), 0, now)
        wait_s = group.act_if_due(now)
        assert wait_s is not None
        now, waits = now + wait_s, [*waits, wait_s]
        group.act_if_due(now)
        assert group.drain is not None
        for j in range(i):
            group.join(member(j), group.generation, now)
    assert waits == pytest.approx([NEWCOMER_SETTLE_S * 2**i for i in range(4)])


@pytest.mark.parametrize(
    ("newcomers", "trained_s", "taken_in"),
    [(1, 600.0, True), (1, 1200.0, False), (2, 1500.0, True), (2, 2000.0, False), (4, 1e5, True)],
)
def test_hours_of_a_script_that_saves_nothing_are_not_lost_for_a_newcomer(
    newcomers: int, trained_s: float, taken_in: bool
) -> None:
    """Two workers and one more are 1.4 times as fast, four 1.7 times, six 2.4 times."""
    group = formed(0, 1, steps=False)
    coming = range(2, 2 + newcomers)
    group.set_alive(alive(0, 1, *coming), 1, trained_s)
    for i in coming:
        group.join(member(i), 0, trained_s)
    wait_s = group.act_if_due(trained_s)
    assert (group.drain is not None) == taken_in
    if not taken_in:
        assert wait_s is None
        assert group.next_generation.growth.startswith("newcomers wait: the script reports no steps")


def test_unless_they_were_asked_for() -> None:
    group = formed(0, 1, steps=False)
    group.set_rules(GroupRules(asked=True))
    group.set_alive(alive(0, 1, 2), 1, 1e5)
    group.join(member(2), 0, 1e5)
    group.act_if_due(1e5)
    assert group.drain is not None


def test_or_the_group_re_forms_anyway() -> None:
    group = formed(0, 1, steps=False)
    group.set_alive(alive(0, 1, 2), 1, 1e5)
    group.join(member(2), 0, 1e5)
    group.act_if_due(1e5)
    group.set_alive(alive(0, 2), 1, 1e5 + 1)
    group.join(member(0), 1, 1e5 + 2)
    assert group.members.ranked.keys() == {"u0", "u2"}


@pytest.mark.parametrize("name", ["obstacle", "unsaved"])
def test_no_newcomer_is_admitted_while_the_storage_does_not_answer(name: str) -> None:
    group = formed(0, 1)
    group.reports.set_obstacle(**{"obstacle": "", name: "s3://b: 503 for 4m"})
    group.set_alive(alive(0, 1, 2), 1, 101.0)
    group.join(member(2), 0, 101.0)
    assert group.act_if_due(10_000.0) is None
    group.reports.set_obstacle("")
    group.act_if_due(10_001.0)
    assert group.drain is not None


def test_workers_that_serve_commands_admit_newcomers_immediately_each_time() -> None:
    group = Group(job_uid="j", rules=GroupRules(automatic=True))
    for count in range(1, 9):
        now = float(count)
        group.set_alive(alive(*range(count)), 1, now)
        for index in reversed(range(count)):  # the newcomer first; for it the others join again
            group.join(member(index), group.generation, now, serves_commands=True)
        assert group.world is not None
        assert [each.uid for each in group.world.members] == [f"u{index}" for index in range(count)]


def test_one_member_finishes_for_all() -> None:
    group = formed(0, 1, 2)
    group.finish("u0", 1, 5.0)
    assert group.state is GroupState.TRAINING
    group.finish("u0", 1, 6.0, for_all=True)
    assert group.state is GroupState.OVER
    assert group.verdict("u1", 1) == "rejoin"


def test_no_member_finishes_for_all_with_a_generation_that_has_ended() -> None:
    group = formed(0, 1)
    group.set_alive(alive(0), 1, 5.0)
    group.finish("u0", 1, 6.0, for_all=True)
    assert group.state is GroupState.FORMING


@pytest.mark.parametrize("doing", ["exporting", "hung", "finishing", "stopping"])
def test_an_export_is_not_stopped_for_newcomers_nor_when_it_stands_still_or_has_just_ended(doing: str) -> None:
    group = formed(0, 1)
    group.note_sign("u0", 100.0, "exporting")
    group.note_sign("u0", 160.0, doing)
    group.set_alive(alive(0, 1, 2), 1, 161.0)
    group.join(member(2), 0, 161.0)
    assert group.act_if_due(10_000.0) is None
    assert group.drain is None
    group.note_sign("u0", 10_001.0, "running")
    group.act_if_due(10_002.0)
    assert group.drain is not None, "it trains after all"


def test_a_newcomer_does_not_wait_long_for_another_that_is_starting() -> None:
    group = formed(0)
    group.set_alive(alive(0, 1, 2), 1, 5.0)
    group.join(member(1), 0, 6.0)
    assert group.act_if_due(6.0) == pytest.approx(NEWCOMER_SETTLE_S)
    group.act_if_due(6.0 + NEWCOMER_SETTLE_S)
    assert group.drain is not None


def test_draining_takes_as_long_as_a_step_takes() -> None:
    group = formed(0, 1)
    group.stop_member("u1", "spot notice", 5.0)
    assert group.act_if_due(10_000.0) is None
    assert group.world is not None
    group.set_alive(alive(0), 1, 10_001.0)
    assert (group.world, group.reason) == (None, "lost job-worker-1"), "the one with the notice is gone"


def test_after_the_loss_of_all_members_the_first_to_join_waits_for_the_others() -> None:
    group = formed(0, 1, 2)
    group.set_alive({}, 1, 10.0)
    group.set_alive(alive(3, 4, 5), 1, 11.0)
    group.join(member(3), 0, 12.0)
    assert group.world is None
    group.join(member(5), 0, 14.0)
    assert group.act_if_due(14.0) == pytest.approx(12.0 + FIRST_SETTLE_S - 14.0)
    group.join(member(4), 0, 20.0)
    assert len(names(group)) == 3


def test_a_worker_that_is_removed_is_not_in_the_next_generation_and_not_waited_for() -> None:
    group = formed(0, 1, 2)
    group.set_alive(alive(0, 1, 2), 1, 5.0, frozenset({"u2"}))
    assert group.world is not None, "it is a member until it goes"
    assert group.drain is not None
    assert group.drain.reason == "job-worker-2 has to stop: it is removed", "though SIGTERM may not reach its launcher"
    assert group.notices.departing == {"u2"}
    join_all(group, 0, 1, 2, now=6.0)
    assert names(group) == ["job-worker-0", "job-worker-1"]


def test_a_worker_that_has_left_is_not_waited_for_while_its_pod_still_ends() -> None:
    group = formed(0, 1)
    group.leave("u1", "goes", 5.0)
    group.set_alive(alive(0, 1), 1, 5.1)
    group.join(member(0), 1, 5.2)
    assert names(group) == ["job-worker-0"]
    group.set_alive(alive(0), 1, 6.0)
    assert group.world is not None


# Broken generations


def test_the_first_error_of_a_ranks_own_is_to_blame_in_any_order_of_reports() -> None:
    group = formed(0, 1, 2)
    fail(group, 0, 1.2, of_peers=True)
    fail(group, 2, 1.1, error="ValueError: also")
    assert group.state is GroupState.BREAKING
    assert group.verdict("u0", 1) == "pending", "not decided: the third has not ended"
    end = RanksEnd("u1", "job-worker-1", 1.0, RankFailure("application", error="ValueError: first"))
    group.fail(end, 1, 1.3)
    assert (group.state, group.reason) == (GroupState.FORMING, "job-worker-1 failed")
    assert group.failures.judged is not None
    assert group.failures.judged.end == end
    assert {group.verdict(f"u{i}", 1) for i in range(3)} == {"rejoin"}, "all are started again where they are"


def test_a_failed_generation_forms_again_at_the_same_size_and_says_why_it_ended() -> None:
    group = formed(0, 1)
    fail(group, 1, 1.0, error="ValueError: no")
    fail(group, 0, 1.1, of_peers=True)
    group.join(member(0), 1, 2.0)
    assert group.world is None, "the one that failed is alive and will be back"
    group.join(member(1), 1, 3.0)
    assert names(group) == ["job-worker-0", "job-worker-1"]
    assert failure_of(group, -2).error == "ValueError: no"
    assert group.failures.count == 1


def test_a_worker_that_is_slow_to_end_may_still_turn_out_to_be_to_blame() -> None:
    group = formed(0, 1)
    fail(group, 0, 1.0, of_peers=True)
    group.note_sign("u1", VICTIMS_S, "stopping")
    group.act_if_due(1.0 + VICTIMS_S)
    assert group.reason == "job-worker-0 lost a connection"
    group.join(member(0), 1, 12.0)
    for second in range(12, 60):
        group.note_sign("u1", float(second), "stopping")
        group.act_if_due(float(second))
    fail(group, 1, 60.0, error="ValueError: cleaned up for a minute")
    group.join(member(1), 1, 61.0)
    assert failure_of(group, -2).worker == "job-worker-1"
    assert group.failures.count == 1


def test_a_silent_worker_explains_the_lost_connections_of_the_others() -> None:
    """Its machine is gone, and the API server that would say so cannot be reached."""
    group = formed(0, 1, 2)
    group.set_rules(GroupRules(limit=0))
    group.note_sign("u1", 99.0, "running")
    for index in (0, 2):
        fail(group, index, 100.0, of_peers=True)
    now = 100.0
    while wait_s := group.act_if_due(now):
        now += wait_s
        for uid in ("u0", "u2"):
            group.note_sign(uid, now, "stopping")
    assert (group.state, group.failures.count) == (GroupState.FORMING, 0)
    assert group.reason == "nothing is heard from job-worker-1"
    assert group.verdict("u0", 1) == "rejoin"


def test_the_ends_of_others_are_waited_for_but_not_for_long_after_a_ranks_own_error() -> None:
    group = formed(0, 1)
    fail(group, 0, 1.0)
    assert group.act_if_due(1.0) == pytest.approx(CULPRIT_S)
    group.act_if_due(1.0 + CULPRIT_S)
    assert group.state is GroupState.FORMING


def test_each_unexplained_broken_connection_is_waited_out_for_longer() -> None:
    waits = []
    group = formed(0, 1)
    for _ in range(3):
        fail(group, 0, 1.0, of_peers=True)
        waits.append(group.act_if_due(1.0))
        fail(group, 1, 1.0, of_peers=True)
        for i in (0, 1):
            group.join(member(i), group.generation, 1.0)
    assert waits == pytest.approx([VICTIMS_S, 4 * VICTIMS_S, 16 * VICTIMS_S])


def test_broken_connections_end_no_job_while_the_report_of_who_broke_them_may_have_been_lost() -> None:
    group = formed(0, 1)
    group.set_rules(GroupRules(limit=0))
    fail(group, 0, 1.0, of_peers=True)
    group.act_if_due(41.0)
    fail(group, 1, 41.0, error="ValueError: the bug")
    assert (group.verdict("u0", 1), group.verdict("u1", 1)) == ("rejoin", "exit")


@pytest.mark.parametrize("of_peers", [False, True])
def test_a_member_that_loses_draining_peers_before_it_hears_of_the_drain_has_not_failed(of_peers: bool) -> None:
    group = formed(0, 1)
    group.stop_member("u1", "spot notice", 5.0)
    fail(group, 0, 6.0, of_peers=of_peers)
    group.act_if_due(6.0 + VICTIMS_S)
    assert group.reason == ("spot notice" if of_peers else "job-worker-0 failed")
    join_all(group, 0, 1, now=20.0)
    assert group.failures.count == (not of_peers)


@pytest.mark.parametrize("of_peers", [False, True])
def test_after_the_budget_the_one_to_blame_exits(of_peers: bool) -> None:
    group = formed(0, 1)
    group.set_rules(GroupRules(limit=3))
    for attempt in range(3):
        all_fail(group, 10.0 * attempt, of_peers=of_peers)
        group.note_step(group.generation, ProgressStatus(step=attempt), 10.0 * attempt + 1)
        assert group.world is not None, "steps alone refill nothing"
    generation = group.generation
    fail(group, 0, 100.0, of_peers=of_peers)
    fail(group, 1, 100.5, of_peers=of_peers)
    assert (group.verdict("u0", generation), group.verdict("u1", generation)) == ("exit", "rejoin")
    group.join(member(1), generation, 101.0)
    group.leave("u0", "blamed", 102.0)
    group.act_if_due(1000.0)
    assert group.world is None, "the job ends: the others do not start again without the one to blame"


def test_the_worker_to_blame_is_waited_for_only_if_it_will_be_replaced() -> None:
    group = formed(0, 1, 2)
    group.set_rules(GroupRules(desired=3, limit=0))
    all_fail(group, 10.0)
    group.leave("u0", "blamed", 11.0)
    group.set_alive(alive(1, 2, 3), 1, 12.0)
    join_all(group, 1, 2, now=13.0)
    group.act_if_due(100.0)
    assert group.world is None, "worker 3 comes in its place"
    group.set_rules(GroupRules(desired=2, limit=0))
    group.set_alive(alive(1, 2), 1, 101.0)
    assert names(group) == ["job-worker-1", "job-worker-2"]


def test_a_new_checkpoint_refills_the_budget() -> None:
    group = formed(0, 1)
    group.set_rules(GroupRules(limit=1))
    for attempt in range(5):
        all_fail(group, 10.0 * attempt)
        assert group.world is not None
        group.note_commit(group.generation, 1, 7 * attempt, "file:///x", 10, 0.1, 10.0 * attempt + 1)
    group.note_commit(group.generation, 2, 3, "file:///x", 10, 0.1, 60.0)
    all_fail(group, 70.0)
    all_fail(group, 80.0)
    assert group.world is None, "a checkpoint of an older step is no progress"


def test_a_worker_may_find_a_better_explanation_than_its_first() -> None:
    group = formed(0, 1)
    fail(group, 0, 1.0, of_peers=True)
    fail(group, 0, 2.0, error="ValueError: its other rank")
    fail(group, 1, 2.5, of_peers=True)
    assert group.failures.judged is not None
    assert group.failures.judged.end.failure.error == "ValueError: its other rank"


def test_ranks_that_got_sigterm_are_to_blame_for_the_broken_connections_of_others() -> None:
    group = formed(0, 1, 2)
    group.finish("u1", 1, 5.0, terminated=True)
    group.finish("u2", 1, 5.0)
    fail(group, 0, 5.1, of_peers=True, error="Connection closed by peer")
    assert group.failures.judged is not None
    found = group.failures.judged.end.failure
    assert (found.worker, found.signal, found.verdict, found.exit_code) == (
        "job-worker-1", "SIGTERM", "application", None,
    )  # fmt: skip
    assert found.error == (
        "the ranks of job-worker-1 got SIGTERM, not from their launcher, and ended with exit code 0: "
        "Connection closed by peer"
    )


def test_the_failure_of_other_ranks_names_ranks_that_had_ended_with_0() -> None:
    group = formed(0, 1, 2)
    group.set_rules(GroupRules(limit=0))
    group.finish("u1", 1, 5.0)
    fail(group, 0, 5.1, of_peers=True, error="Connection closed by peer")
    fail(group, 2, 5.2, of_peers=True, error="Connection closed by peer")
    assert group.failures.judged is not None
    assert group.failures.judged.end.failure.verdict == "application", "no machine was lost"
    text = "the ranks of job-worker-1 had ended with exit code 0 by then: Connection closed by peer"
    assert (group.verdict("u0", 1), group.failures.error_of("u0", 1), group.failures.error_of("u2", 1)) == (
        "exit",
        text,
        "",
    )


def test_a_hang_is_reported_with_the_places_of_the_ranks_of_other_workers() -> None:
    group = formed(0, 1, 2)
    group.reports.places = {rank: RankPlace(rank, "all_reduce no. 6", waits=True) for rank in (0, 2)}
    group.reports.places[1] = RankPlace(1, "load (data.py:40)")
    fail(group, 1, 9.0, error="the group hangs: rank 1 has been in load (data.py:40) for 5m00s")
    group.act_if_due(11.0)
    assert group.failures.error_of("u1", 1) == (
        "the group hangs: rank 1 has been in load (data.py:40) for 5m00s; ranks 0, 2 wait in all_reduce no. 6"
    )


def test_the_pause_before_another_try_grows() -> None:
    group = formed(0)
    group.set_rules(GroupRules(limit=9, pause_s=1.0, longest_pause_s=3.0))
    now, pauses = 0.0, []
    for _ in range(5):
        all_fail(group, now)
        wait_s = group.act_if_due(now) or 0.0
        pauses.append(wait_s)
        now += wait_s
        group.act_if_due(now)
        assert group.world is not None
    assert pauses == pytest.approx([0.0, 1.0, 2.0, 3.0, 3.0])


def test_a_script_that_cannot_be_imported_is_tried_once_unless_it_has_made_a_step() -> None:
    group = formed(0, steps=False)
    fail(group, 0, 1.0, error="SyntaxError: invalid syntax", permanent=True)
    assert group.verdict("u0", 1) == "exit"
    group = formed(0)
    fail(group, 0, 1.0, error="ImportError: a flaky disk", permanent=True)
    assert group.verdict("u0", 1) == "rejoin"


def test_a_loss_explains_the_failures_of_the_others() -> None:
    group = formed(0, 1, 2)
    fail(group, 0, 1.0, of_peers=True)
    group.set_alive(alive(0, 1), 1, 1.5)
    assert (group.state, group.reason, group.failures.count) == (GroupState.FORMING, "lost job-worker-2", 0)
    assert group.verdict("u0", 1) == "rejoin"


@pytest.mark.parametrize("lost", ["by the controller", "by silence", "it leaves"])
def test_a_loss_that_is_known_later_excuses_the_failure(lost: str) -> None:
    group = formed(0, 1, 2)
    fail(group, 0, 1.0)
    fail(group, 1, 1.0)
    group.act_if_due(1.0 + CULPRIT_S)
    assert group.failures.count == 1
    join_all(group, 0, 1, now=3.0)
    if lost == "by the controller":
        group.set_alive(alive(0, 1), 1, 4.0)
    elif lost == "it leaves":
        group.leave("u2", "spot notice", 4.0)
    else:
        group.act_if_due(2.0 + SILENT_S)
    assert names(group) == ["job-worker-0", "job-worker-1"]
    assert (group.failures.count, group.history.generations[-2].failure) == (0, None)


def test_a_late_failure_of_a_generation_that_ended_otherwise_counts_nothing() -> None:
    group = formed(0, 1, 2)
    group.set_alive(alive(0, 1), 1, 5.0)
    fail(group, 0, 5.1, of_peers=True)
    assert (group.verdict("u0", 1), group.failures.count) == ("rejoin", 0)
    join_all(group, 0, 1, now=6.0)
    group.fail(RanksEnd("u0", "job-worker-0", 6.0), 1, 7.0)
    assert group.state is GroupState.TRAINING


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


def test_a_member_that_was_lost_while_no_service_ran_is_left_out() -> None:
    group = Group.restored("j", JobStatus(generation=4))
    group.set_alive(alive(0, 2), 1, 50.0)
    group.adopt(GroupWorld(4, (member(0), member(1), member(2))), 51.0)
    assert (group.world is None, group.reason) == (True, "lost job-worker-1")
    group.join(member(2), 4, 51.5)
    group.join(member(0), 4, 52.0)
    assert names(group) == ["job-worker-0", "job-worker-2"]
    assert group.generation == 5


HANG = RankFailure("application", "job-worker-0", error="the group hangs: rank 0 has been in x for 30m00s")


@pytest.mark.parametrize("adopted", [True, False])
@pytest.mark.parametrize(
    ("found_at", "heard", "failures"),
    [(40.0, True, 0), (60.0, False, 0), (60.0, True, 1)],
)
def test_a_hang_is_no_failure_if_no_service_could_hear_a_member(
    adopted: bool, found_at: float, heard: bool, failures: int
) -> None:
    """Its machine may have been cut off, which looks the same to its peers."""
    workers = tuple(WorkerStatus(name=f"job-worker-{i}", uid=f"u{i}") for i in (0, 1))
    newest = GroupGeneration(1, tuple(worker.name for worker in workers))
    group = Group.restored("j", JobStatus(generation=1, generations=(newest,), workers=workers))
    group.set_rules(GroupRules(limit=0))
    group.set_alive(alive(0, 1), 1, 50.0)
    if heard:
        group.note_sign("u1", 55.0, "running")
    if adopted:
        group.adopt(GroupWorld(1, (member(0), member(1))), 56.0)
    group.fail(RanksEnd("u0", "job-worker-0", found_at, HANG), 1, 61.0)
    group.act_if_due(61.0 + CULPRIT_S)
    assert group.failures.count == failures
    assert group.verdict("u0", 1) == ("exit" if failures else "rejoin")


def test_a_failure_that_is_reported_before_and_after_the_group_is_known_counts_once() -> None:
    group = Group.restored("j", JobStatus(generation=1, generations=(GroupGeneration(1, ("job-worker-0",)),)))
    group.set_alive(alive(0), 1, 50.0)
    fail(group, 0, 50.1, error="ValueError: the bug")
    group.adopt(GroupWorld(1, (member(0),)), 50.2)
    fail(group, 0, 50.3, error="ValueError: the bug")
    assert group.failures.judged is not None
    assert group.failures.count == 1


@pytest.mark.parametrize(("limit", "verdict"), [(0, "exit"), (1, "rejoin")])
def test_a_failure_while_no_service_ran_counts(limit: int, verdict: str) -> None:
    group = Group.restored("j", JobStatus(generation=4, generations=(GroupGeneration(4, ("job-worker-0",)),)))
    group.set_rules(GroupRules(limit=limit))
    group.set_alive(alive(0, 1), 1, 50.0)
    fail(group, 1, 50.5, of_peers=True)
    assert (group.verdict("u1", 4), group.failures.count) == ("rejoin", 0)
    fail(group, 0, 51.0, error="ValueError: the bug")
    fail(group, 0, 51.0, error="ValueError: the bug")
    assert (group.verdict("u0", 4), group.failures.count) == (verdict, 1)
    group.join(member(0), 4, 52.0)
    group.join(member(1), 4, 52.0)
    assert failure_of(group, 0).error == "ValueError: the bug"


@pytest.mark.parametrize("first", ["fails", "joins", "watches"])
def test_a_failure_while_no_service_ran_counts_in_any_order_of_calls(first: str) -> None:
    group = restored(0, 1, 2)
    group.set_alive(alive(0, 1, 2), 1, 50.0)
    if first == "watches":
        group.adopt(GroupWorld(4, (member(0), member(1), member(2))), 50.2)
        fail(group, 0, 50.5, error="ValueError: the bug")
    if first == "fails":
        fail(group, 1, 50.2, of_peers=True)
        group.adopt(GroupWorld(4, (member(0), member(1), member(2))), 50.3)
    group.join(member(1), 4, 50.6)
    fail(group, 0, 50.7, error="ValueError: the bug")
    group.join(member(0), 4, 51.0)
    group.join(member(2), 4, 51.0)
    assert (failure_of(group, 0).error, group.failures.count) == ("ValueError: the bug", 1)


@pytest.mark.parametrize("limit", [0, 3])
def test_a_failure_that_was_judged_but_not_stored_counts_when_its_worker_joins_again(limit: int) -> None:
    """The service was restarted in the pause before the next generation."""
    bug = RankFailure("application", "job-worker-0", 0, 1, error="ValueError: the bug", at=Timestamp(40.0))
    victim = RanksEnd("u1", "job-worker-1", 39.0, RankFailure(error="Connection closed"), of_peers=True)
    group = restored(0, 1)
    group.set_rules(GroupRules(limit=limit))
    group.set_alive(alive(0, 1), 1, 50.0)
    for index, end in ((1, victim), (0, RanksEnd("u0", "job-worker-0", 40.0, bug))):
        group.recall(end, 4, 51.0)
        group.join(member(index), 4, 51.0)
    assert (group.generation, group.failures.count) == (5, 1), "its answer was to rejoin, so it does"
    assert failure_of(group, 0).error == "ValueError: the bug"


BUG = RankFailure("application", "job-worker-0", 0, 1, error="ValueError: the bug", at=Timestamp(45.0))


@pytest.mark.parametrize("calls", ["watches", "fails", "joins", "joins late"])
def test_failures_that_an_earlier_service_judged_and_did_not_store_count_after_further_generations(calls: str) -> None:
    """It was restarted when two more generations had formed: 4 is the last that is stored."""
    group = restored(0, 1)
    group.set_alive(alive(0, 1), 1, 50.0)
    ends = [(generation, RanksEnd("u0", "job-worker-0", 45.0, BUG)) for generation in (3, 4, 5)]

    def recall() -> None:
        for generation, end in ends:
            group.recall(end, generation, 51.0, newest=6)

    if calls == "watches":
        group.adopt(GroupWorld(6, (member(0), member(1))), 50.5)
        recall()
        assert [item.generation for item in group.history.generations] == [4, 5, 6]
    elif calls == "fails":
        recall()
        group.fail(RanksEnd("u0", "job-worker-0", 50.0, BUG), 6, 51.0)
        assert group.history.has_failed(6) is False, "it is noted when the next one forms"
    elif calls == "joins":
        recall()
    group.join(member(1), 6, 51.0)
    if calls == "joins late":
        group.act_if_due(51.0 + ADOPT_S)
        assert names(group) == ["job-worker-1"]
        recall()
    else:
        group.join(member(0), 6, 51.0)
    for _ in range(2):  # a launcher that has had no answer says so again
        recall()
    assert group.generation == 7
    assert [item.generation for item in group.history.generations if item.failure is not None] == (
        [4, 5, 6] if calls == "fails" else [4, 5]
    ), "the failure of the third was stored, or excused"
    assert group.failures.count == (3 if calls == "fails" else 2)


def test_a_failure_that_a_loss_has_excused_is_not_counted_when_it_is_reported_again() -> None:
    group = restored(0, 1)
    group.set_alive(alive(0, 1), 1, 50.0)
    group.join(member(1), 4, 50.5)
    group.recall(RanksEnd("u0", "job-worker-0", 45.0, BUG), 4, 51.0)
    assert group.failures.count == 1
    group.excuse_failure()
    group.recall(RanksEnd("u0", "job-worker-0", 45.0, BUG), 4, 52.0)
    assert group.failures.count == 0


def test_a_worker_cannot_fill_the_history_with_failures_of_generations_that_never_were() -> None:
    group = restored(0, 1)
    group.set_alive(alive(0, 1), 1, 50.0)
    for generation in range(1000, 2000):
        group.recall(RanksEnd("u0", "job-worker-0", 45.0, BUG), generation, 51.0, newest=3000)
    assert len(group.restored_service.recalled) == len(group.history.generations) == MAX_RECALLED


def test_a_service_that_knows_the_failure_does_not_count_it_again() -> None:
    group = formed(0, 1)
    fail(group, 0, 5.0, error="ValueError: the bug")
    fail(group, 1, 5.1, of_peers=True)
    assert group.failures.judged is not None
    group.recall(group.failures.judged.end, 1, 6.0)
    join_all(group, 0, 1, now=6.0)
    group.recall(RanksEnd("u0", "job-worker-0", 5.0), 1, 7.0)
    assert group.failures.count == 1


def restored(*indexes: int) -> Group:
    """The group of these workers as a restarted service knows it, from generation 4, which formed at 40 s."""
    last = GroupGeneration(4, tuple(f"job-worker-{i}" for i in indexes), formed_at=Timestamp(40.0))
    roster = [WorkerStatus(f"job-worker-{i}", f"u{i}", i, started_at=Timestamp(30.0)) for i in indexes]
    roster.append(WorkerStatus("job-worker-0", "u9", 0, started_at=Timestamp(45.0)))
    return Group.restored("j", JobStatus(generation=4, generations=(last,), workers=tuple(roster)))


def test_newcomers_form_no_second_group_while_a_restarted_service_does_not_know_the_first() -> None:
    group = restored(0, 1)
    group.set_alive(alive(0, 1, 2), 1, 50.0)
    group.join(member(2), 0, 50.0)
    group.act_if_due(50.0 + 2 * SILENT_S)
    assert group.world is None
    group.adopt(GroupWorld(4, (member(0), member(1))), 75.0)
    group.act_if_due(75.0)
    assert group.drain is not None, "it admits the newcomer as usual"
    assert names(group) == ["job-worker-0", "job-worker-1"]


def test_a_group_that_never_reports_is_not_waited_for_forever() -> None:
    group = restored(0, 1)
    group.set_alive(alive(0, 2), 1, 50.0)
    group.join(member(2), 0, 50.0)
    assert group.act_if_due(51.0) == pytest.approx(ADOPT_S - 1.0)
    group.act_if_due(50.0 + ADOPT_S)
    assert names(group) == ["job-worker-2"]


def test_a_worker_that_has_not_called_a_restarted_service_is_left_out_before_it_is_replaced() -> None:
    """Its request may be waiting for an answer of the service that has gone."""
    group = restored(0, 1, 2)
    group.set_alive(alive(0, 1, 2), 1, 50.0)
    group.adopt(GroupWorld(4, (member(0), member(1), member(2))), 51.0)
    group.set_alive(alive(0, 1), 1, 52.0)
    group.join(member(0), 4, 52.5)
    group.act_if_due(52.0 + SILENT_S)
    assert names(group) == ["job-worker-0"]
    assert not group.signs.silent
    assert group.act_if_due(63.0) == pytest.approx(50.0 + ADOPT_S - 63.0), "it comes again by itself"
    group.act_if_due(50.0 + ADOPT_S)
    assert group.signs.silent == {"u1"}


@pytest.mark.parametrize("stored", [True, False])
def test_a_newcomer_prepares_while_a_restarted_service_only_knows_that_the_ranks_of_others_stay(stored: bool) -> None:
    """Even if the one before could not store that there was a group, or that its ranks stay."""
    group = restored(0, 1, 2) if stored else Group("uid-1")
    group.set_alive(alive(0, 1, 3), 3, 50.0)
    assert not group.has_to_prepare(member(3), 0, 50.5)
    group.join(member(3), 0, 50.5)
    group.join(member(0), 4, 51.0, stay=True)
    assert group.has_to_prepare(member(3), 0, 51.0)
    group.join(member(1), 4, 52.0, stay=True)
    assert group.has_to_prepare(member(3), 0, 52.0)
    assert group.state is GroupState.FORMING
    group.join(member(3), 0, 60.0)
    assert names(group) == ["job-worker-0", "job-worker-1", "job-worker-3"]


def test_a_group_without_live_members_is_not_waited_for() -> None:
    group = restored(0, 1)
    group.set_alive(alive(2), 1, 50.0)  # nor would the one be that has taken over a member's name
    assert (group.state, group.restored_service.remembered) == (GroupState.RESTORED, {"u0", "u1"})
    group.join(member(2), 0, 50.0)
    assert names(group) == ["job-worker-2"]


def test_the_group_is_over_once_every_member_has_finished_and_is_not_started_again() -> None:
    group = formed(0, 1)
    group.finish("u0", 1, 8.0)
    assert group.state is GroupState.TRAINING
    group.finish("u1", 1, 9.0)
    assert group.state is GroupState.OVER
    group.set_alive(alive(0, 2), 1, 10.0)
    group.join(member(2), 0, 11.0)
    group.act_if_due(1000.0)
    assert (group.state, group.generation) == (GroupState.OVER, 1)


def test_a_worker_that_is_lost_before_it_has_finished_does_not_count_as_finished() -> None:
    group = formed(0, 1, 2)
    for uid in ("u0", "u1"):
        group.finish(uid, 1, 8.0)
    group.set_alive(alive(0, 1), 1, 9.0)
    assert (group.state, group.reason) == (GroupState.FORMING, "lost job-worker-2")
    join_all(group, 0, 1, now=10.0)
    assert group.state is GroupState.TRAINING
    assert not group.members.finished


def test_a_restarted_service_is_notified_that_the_group_has_finished() -> None:
    group = restored(0, 1)
    group.set_alive(alive(0, 1), 1, 50.0)
    group.finish("u0", 4, 51.0)
    assert group.state is GroupState.RESTORED
    group.finish("u1", 4, 52.0)
    assert group.state is GroupState.OVER


def test_unknown_workers_that_finish_or_leave_are_not_recorded() -> None:
    group = formed(0, 1)
    for number in range(1000):
        group.finish(f"unknown-{number}", 1, 1.0)
        group.leave(f"unknown-{number}", "goes", 1.0)
    assert (group.members.finished, group.members.gone, group.world is None) == (set(), set(), False)


def test_steps_and_commits_are_recorded_by_generation() -> None:
    group = formed(0)
    group.history.note_resumed(1, 0)
    group.note_step(1, ProgressStatus(step=5, metrics={"loss": 1.0}), 3.0)
    group.note_step(1, ProgressStatus(step=9, metrics={"accuracy": 0.9}), 4.0)
    group.note_step(7, ProgressStatus(step=99), 4.0)  # another generation's report
    for number, step in [(1, 4), (2, 8), (1, 4), (2, 8)]:  # the launcher repeats what was not answered
        group.history.note_commit(1, number, step, "file:///x", 10, 0.1, 5.0)
    record = group.history.generations[-1]
    assert (record.resumed_step, record.first_step_at, record.last_step) == (0, 0.0, 9)
    assert group.history.progress is not None
    assert group.history.progress.metrics == {"loss": 1.0, "accuracy": 0.9}
    assert (group.history.checkpoint.step, group.history.checkpoint.committed) == (8, 2)


def test_numbers_of_commits_may_repeat_after_the_newest_was_removed() -> None:
    group = formed(0)
    group.history.note_commit(1, 7, 70, "file:///x", 10, 0.1, 5.0)
    group.history.note_commit(2, 7, 60, "file:///x", 10, 0.1, 6.0)
    assert (group.history.checkpoint.step, group.history.checkpoint.committed) == (60, 2)


def test_a_commit_that_was_reported_before_a_restart_of_the_service_counts_once() -> None:
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
    if state in (GroupState.FORMING, GroupState.BREAKING):
        fail(group, 0, 100.0, of_peers=True)
    if state is GroupState.FORMING:
        fail(group, 1, 100.0, of_peers=True)
    elif state is GroupState.DRAINING:
        group.stop_member("u0", "spot notice", 100.0)
    elif state is GroupState.OVER:
        for uid in ("u0", "u1"):
            group.finish(uid, 1, 100.0)
    return group


def newcomer_joins(group: Group, living: dict[str, str]) -> None:
    group.set_alive(living, 1, 101.0)
    group.join(member(2), 0, 101.0)


def rejoin(group: Group) -> None:
    group.set_alive(alive(0, 1), 2, 101.0)  # so that nothing forms without the other
    group.join(member(1), max(1, group.generation), 101.0)


def group_is_reported(group: Group) -> None:
    group.adopt(GroupWorld(max(4, group.generation), (member(0), member(1))), 101.0)


def last_members_join(group: Group) -> None:
    join_all(group, 0, 1, now=101.0)


CAUSES: dict[GroupEvent, Callable[[Group], object]] = {
    GroupEvent.WORKER_JOINED: lambda group: newcomer_joins(group, alive(0, 1, 2, 3)),
    GroupEvent.MEMBER_REJOINED: rejoin,
    GroupEvent.GROUP_REPORTED: group_is_reported,
    GroupEvent.MEMBER_LOST: lambda group: group.set_alive(alive(1), 1, 101.0),
    GroupEvent.MEMBER_LEFT: lambda group: group.leave("u0", "goes", 101.0),
    GroupEvent.MEMBER_FAILED: lambda group: fail(group, 0, 101.0, of_peers=True),
    GroupEvent.MEMBER_FINISHED: lambda group: group.finish("u0", group.generation, 101.0),
    GroupEvent.ALL_FINISHED: lambda group: [group.finish(uid, group.generation, 101.0) for uid in ("u0", "u1")],
    GroupEvent.REMOVAL_ANNOUNCED: lambda group: group.stop_member("u0", "scaled in", 101.0),
    GroupEvent.NEWCOMERS_DUE: lambda group: newcomer_joins(group, alive(0, 1, 2)),
    GroupEvent.FAILURE_JUDGED: lambda group: group.act_if_due(100.0 + VICTIMS_S),
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
    formed_before = state in (GroupState.TRAINING, GroupState.DRAINING, GroupState.BREAKING)
    if event in (GroupEvent.MEMBER_LOST, GroupEvent.MEMBER_LEFT):
        assert after is (GroupState.FORMING if formed_before else state), "only a formed generation has members to lose"
    elif event is GroupEvent.MEMBER_FAILED:
        assert after is (GroupState.BREAKING if formed_before else state)
    elif event is GroupEvent.QUORUM_REACHED:
        may_form = state in (GroupState.STARTING, GroupState.RESTORED, GroupState.FORMING)
        assert after is (GroupState.TRAINING if may_form else None), "a generation forms once, and none after the end"
    elif event in (GroupEvent.WORKER_JOINED, GroupEvent.MEMBER_FINISHED):
        assert after is state
    if after is GroupState.DRAINING:
        assert formed_before, "only who trains can commit a last step"
    if state is GroupState.OVER:
        assert after in (state, None), "what is over stays over"
    assert after not in (GroupState.STARTING, GroupState.RESTORED) or after is state, "nothing leads back to the start"


@pytest.mark.parametrize(("state", "event"), [pair for pair in PAIRS if decided(*pair) is not None])
def test_a_group_goes_where_the_transition_function_says(state: GroupState, event: GroupEvent) -> None:
    group = group_in(state)
    assert group.state is state
    CAUSES[event](group)
    assert group.state is decided(state, event)


def test_a_worker_that_joins_completes_a_group_that_waits_for_no_other() -> None:
    group = group_in(GroupState.FORMING)
    group.set_alive(alive(0), 1, 101.0)
    group.join(member(0), 1, 102.0)
    assert group.state is GroupState.TRAINING, "two events in one call: joined again, quorum reached"


def test_a_drain_keeps_its_first_reason() -> None:
    group = group_in(GroupState.DRAINING)
    group.stop_member("u1", "scaled in", 105.0)
    assert group.drain is not None
    assert group.drain.reason == "spot notice"
    group.leave("u0", "SIGTERM", 106.0)
    assert group.situation == FormingGroup(106.0, "spot notice", 106.0)


KINDS = ["live", "die", "join", "fail", "leave", "notice", "wait"]


class GroupScenario:
    """Six workers that come, go, join and fail in any order; checks the group after each step."""

    def __init__(self, minimum: int) -> None:
        self.group, self.minimum, self.now = Group(job_uid="j", rules=GroupRules(limit=10**6)), minimum, 0.0
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
        elif i in self.living and f"u{i}" in self.group.members.alive:
            self.speak(kind, i)
            if kind == "leave":
                self.go(slot)
        self.group.set_alive(alive(*self.living), self.minimum, self.now)
        self.group.act_if_due(self.now)
        self.check()

    def go(self, slot: int) -> None:
        self.living.discard(self.slots[slot])
        self.slots[slot] += 6

    def speak(self, kind: str, i: int) -> None:
        if kind == "join":
            self.group.join(member(i), self.last_seen.get(i, 0), self.now)
        elif kind == "fail":
            fail(self.group, i, self.now, of_peers=i % 2 == 0)
        elif kind == "notice":
            self.group.stop_member(f"u{i}", "has to go", self.now)
        elif kind == "leave":
            self.group.leave(f"u{i}", "goes", self.now)

    def check(self) -> None:
        assert self.group.generation >= self.highest
        self.highest = self.group.generation
        if self.group.world is None:
            return
        members = {m.uid for m in self.group.world.members}
        assert len(members) == len(self.group.world.members) >= self.minimum
        assert members <= set(self.group.members.alive)
        for uid in members:
            self.last_seen[int(uid[1:])] = self.group.generation


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), max_size=60), st.integers(1, 3))
@example([("live", 0), ("live", 1), ("join", 0), ("join", 1), ("notice", 0)], 2)
@settings(max_examples=100)
def test_generations_always_grow_and_have_live_workers_only(events: list[tuple[str, int]], minimum: int) -> None:
    scenario = GroupScenario(minimum)
    for kind, i in events:
        scenario.act(kind, i)
    scenario.living -= {int(uid[1:]) for uid in scenario.group.notices.departing}  # workers with notice leave
    scenario.act("wait", 0)
    for _ in range(4):  # a newcomer may open the group once more; its members then join again
        for i in scenario.living:
            scenario.speak("join", i)
        scenario.now += 1000.0
        scenario.group.act_if_due(scenario.now)
        scenario.check()
    assert (scenario.group.world is not None) == (len(scenario.living) >= minimum)
