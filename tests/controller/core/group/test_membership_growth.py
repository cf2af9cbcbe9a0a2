"""What a group knows of its own cost and pace, and how one of automatic size takes newcomers in."""

from __future__ import annotations

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration, ProgressStatus
from elasticctl_controller.core.group.group_rules import GroupRules
from elasticctl_controller.core.group.group_states import Member
from elasticctl_controller.core.group.growth import UNMEASURED_COST_S, measure_growth, reform_cost_s
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.history import WARMUP_S

NOW = 1_000.0


def record(number: int, workers: str, opened: float, stepped: float | None = None) -> GroupGeneration:
    return GroupGeneration(
        number,
        tuple(workers),
        opened_at=Timestamp(opened),
        formed_at=Timestamp(opened + 1),
        first_step_at=None if stepped is None else Timestamp(stepped),
        resumed_step=0,
    )


def test_a_re_forming_costs_what_the_last_ones_did() -> None:
    first = record(1, "ab", 0.0, 50.0)
    assert reform_cost_s([record(1, "ab", 0.0)]) == UNMEASURED_COST_S
    assert reform_cost_s([first]) == 49.0, "as long as its ranks took to their first step"
    records = [first, *(record(n, "ab", n * 100.0, n * 100.0 + n) for n in range(2, 6))]
    assert reform_cost_s([*records, record(6, "ab", 600.0)]) == (3 + 4 + 5) / 3


def test_changes_are_those_in_which_somebody_was_missing() -> None:
    records = [record(1, "ab", 0.0), record(2, "abc", 100.0), record(3, "ac", 200.0), record(4, "acd", 300.0)]
    found = measure_growth(records, {2: 10.0}, None, NOW)
    assert (found.size, found.changes, found.watched_s, found.rates) == (3, 1, NOW - 1.0, {2: 10.0})


@pytest.mark.parametrize(
    ("progress", "remaining_s"),
    [
        (None, None),
        (ProgressStatus(step=101), None),
        (ProgressStatus(step=101, total_steps=301), 200.0),
        (ProgressStatus(step=1, total_steps=301), None),
    ],
)
def test_what_remains_is_known_where_there_is_an_end_and_a_pace(
    progress: ProgressStatus, remaining_s: float | None
) -> None:
    assert measure_growth([record(1, "ab", 0.0, NOW - 100.0)], {}, progress, NOW).remaining_s == remaining_s


def member(name: str) -> Member:
    return Member(f"uid-{name}", name, "host", 1, 1)


def formed(names: str, *, automatic: bool) -> Group:
    """A group that has done its first steps as generation 1."""
    group = Group("job", rules=GroupRules(automatic=automatic))
    group.set_alive({f"uid-{name}": name for name in names}, 1, 0.0)
    for name in names:
        group.join(member(name), 0, 0.0)
    group.history.note_resumed(1, 0)
    for second in range(1, 11):
        group.note_step(1, ProgressStatus(step=second * 10, total_steps=100_000, samples_per_s=100.0), float(second))
    return group


def joins(group: Group, name: str, now: float, alive: str) -> float | None:
    group.set_alive({f"uid-{one}": one for one in alive}, 1, now)
    group.join(member(name), 0, now)
    return group.settle(now)


def test_an_automatic_group_waits_for_those_on_their_way_as_long_as_it_pays() -> None:
    group = formed("ab", automatic=True)
    again_s = joins(group, "c", 100.0, "abcd")
    assert group.drain is None
    assert 0 < again_s <= 30.0
    assert group.growth.startswith("1 ready to join; waits at most ")
    said = group.growth
    group.settle(101.0)
    assert group.growth == said, "said once: what is left to wait is no news"
    joins(group, "d", 102.0, "abcd")
    assert group.drain is not None
    assert group.drain.reason == "c, d joined"
    assert group.growth == ""


def test_it_does_not_wait_for_ever() -> None:
    group = formed("ab", automatic=True)
    again_s = joins(group, "c", 100.0, "abcd")
    group.settle(100.0 + again_s)
    assert group.drain is not None


def test_it_does_not_stop_for_newcomers_just_before_the_end() -> None:
    group = formed("ab", automatic=True)
    group.note_step(1, ProgressStatus(step=99_990, total_steps=100_000, samples_per_s=100.0), 100.0)
    joins(group, "c", 101.0, "abc")
    assert group.drain is None
    assert "training ends in" in group.growth


def test_a_loss_is_never_weighed_and_takes_in_who_is_ready() -> None:
    group = formed("ab", automatic=True)
    joins(group, "c", 100.0, "abcd")
    group.set_alive({"uid-a": "a", "uid-c": "c", "uid-d": "d"}, 1, 101.0)
    assert group.world is None
    group.join(member("a"), 1, 101.5)
    assert group.world is not None
    assert [one.name for one in group.world.members] == ["a", "c"]


def test_a_size_that_somebody_asked_for_is_not_weighed() -> None:
    group = formed("ab", automatic=False)
    group.note_step(1, ProgressStatus(step=99_990, total_steps=100_000, samples_per_s=100.0), 100.0)
    joins(group, "c", 101.0, "abc")
    assert group.drain is not None


def test_more_workers_that_make_it_no_faster_are_not_taken_in() -> None:
    group = formed("ab", automatic=True)
    group.history.rates |= {2: 100.0, 3: 90.0}
    joins(group, "c", 100.0, "abc")
    assert group.drain is None
    assert "would not make training faster" in group.growth


def test_the_first_seconds_say_nothing_about_a_size() -> None:
    group = formed("ab", automatic=True)
    first = group.history.generations[-1].first_step_at
    assert first is not None
    for after_s in (0.1, 1.0, WARMUP_S - 0.1):
        group.note_step(1, ProgressStatus(step=100, total_steps=100_000, samples_per_s=10.0), first + after_s)
    assert group.history.rates == {}
    group.note_step(1, ProgressStatus(step=200, total_steps=100_000, samples_per_s=100.0), first + WARMUP_S)
    assert group.history.rates == {2: 100.0}
