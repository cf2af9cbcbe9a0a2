"""When a group admits newcomers: the rule against its formula, and what a group knows of its own cost and pace."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration, ProgressStatus
from elasticctl_controller.core.group.failures import GroupRules
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.group.newcomers import (
    UNMEASURED_COST_S,
    Batching,
    GrowthOption,
    decide_growth,
    expected_quiet_s,
    measure_growth,
    reform_cost_s,
    speedup,
)
from elasticctl_controller.core.history import WARMUP_S
from elasticctl_protocol.requests import Member

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


def test_a_change_is_a_generation_in_which_a_member_is_missing() -> None:
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
def test_the_remaining_time_is_known_with_a_last_step_and_a_pace(
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
    return group.act_if_due(now)


def test_an_automatic_group_waits_for_those_on_their_way_as_long_as_it_pays() -> None:
    group = formed("ab", automatic=True)
    again_s = joins(group, "c", 100.0, "abcd")
    assert group.drain is None
    assert 0 < again_s <= 30.0
    assert group.next_generation.growth.startswith("1 ready to join; waits at most ")
    said = group.next_generation.growth
    group.act_if_due(101.0)
    assert group.next_generation.growth == said, "said once: what is left to wait is no news"
    joins(group, "d", 102.0, "abcd")
    assert group.drain is not None
    assert group.drain.reason == "c, d joined"
    assert group.next_generation.growth == ""


def test_it_does_not_wait_forever() -> None:
    group = formed("ab", automatic=True)
    again_s = joins(group, "c", 100.0, "abcd")
    group.act_if_due(100.0 + again_s)
    assert group.drain is not None


def test_it_does_not_stop_for_newcomers_just_before_the_end() -> None:
    group = formed("ab", automatic=True)
    group.note_step(1, ProgressStatus(step=99_990, total_steps=100_000, samples_per_s=100.0), 100.0)
    joins(group, "c", 101.0, "abc")
    assert group.drain is None
    assert "training ends in" in group.next_generation.growth


def test_a_loss_is_never_weighed_and_takes_in_who_is_ready() -> None:
    group = formed("ab", automatic=True)
    joins(group, "c", 100.0, "abcd")
    group.set_alive({"uid-a": "a", "uid-c": "c", "uid-d": "d"}, 1, 101.0)
    assert group.world is None
    group.join(member("a"), 1, 101.5)
    assert group.world is not None
    assert [one.name for one in group.world.members] == ["a", "c"]


def test_a_size_that_was_asked_for_is_not_weighed() -> None:
    group = formed("ab", automatic=False)
    group.note_step(1, ProgressStatus(step=99_990, total_steps=100_000, samples_per_s=100.0), 100.0)
    joins(group, "c", 101.0, "abc")
    assert group.drain is not None


def test_more_workers_that_make_it_no_faster_are_not_taken_in() -> None:
    group = formed("ab", automatic=True)
    group.history.rates |= {2: 100.0, 3: 90.0}
    joins(group, "c", 100.0, "abc")
    assert group.drain is None
    assert "would not make training faster" in group.next_generation.growth


def test_the_first_seconds_say_nothing_about_a_size() -> None:
    group = formed("ab", automatic=True)
    first = group.history.generations[-1].first_step_at
    assert first is not None
    for after_s in (0.1, 1.0, WARMUP_S - 0.1):
        group.note_step(1, ProgressStatus(step=100, total_steps=100_000, samples_per_s=10.0), first + after_s)
    assert group.history.rates == {}
    group.note_step(1, ProgressStatus(step=200, total_steps=100_000, samples_per_s=100.0), first + WARMUP_S)
    assert group.history.rates == {2: 100.0}


GROUP = GrowthOption(size=4, ready=4, coming=0, ready_since=0.0, reform_cost_s=10.0)
LINEAR = {4: 400.0, 8: 800.0}


def test_it_pays_back_as_the_formula_says() -> None:
    """Twice as fast: half of the time is gained, so 10 s of standstill are paid back after 20 s."""
    verdict = decide_growth(replace(GROUP, rates=LINEAR), now=0.0)
    assert verdict.grow
    assert verdict.pays_back_s == pytest.approx(20.0)
    assert verdict.words == "joining costs 10s and pays for itself after 20s; the next change is expected in 1h00m"


@given(
    size=st.integers(1, 50),
    ready=st.integers(1, 50),
    cost_s=st.floats(0.1, 1000.0),
    quiet_s=st.floats(1.0, 1e5),
    slope=st.floats(0.1, 1.0),
)
def test_it_grows_exactly_where_that_is_more_work_until_the_next_change(size, ready, cost_s, quiet_s, slope) -> None:
    growth = GrowthOption(size, ready, 0, 0.0, cost_s)
    verdict = decide_growth(growth, 0.0, Batching(typical_quiet_s=quiet_s, exponent=slope))
    staying, growing = size**slope * quiet_s, (size + ready) ** slope * (quiet_s - cost_s)
    assert verdict.grow == (growing > staying) or math.isclose(growing, staying, rel_tol=1e-6)


def test_it_does_not_grow_before_a_change_that_comes_sooner() -> None:
    restless = replace(GROUP, rates=LINEAR, changes=9, watched_s=90.0)
    verdict = decide_growth(restless, 1000.0, Batching(typical_quiet_s=100.0))
    assert not verdict.grow
    assert verdict.words == "joining costs 10s and pays for itself after 20s, but the next change is expected in 19s"
    assert verdict.again_at == pytest.approx(1010.0)
    later = replace(restless, watched_s=90.0 + 10.1)  # when it is due to ask again, with nothing changed
    assert decide_growth(later, 1010.1, Batching(typical_quiet_s=100.0)).grow


def test_it_does_not_grow_just_before_the_end() -> None:
    ending = replace(GROUP, rates=LINEAR, remaining_s=15.0)
    verdict = decide_growth(ending, 0.0)
    assert (verdict.grow, verdict.again_at) == (False, None)
    assert verdict.words.endswith("but training ends in 15s")
    assert decide_growth(replace(ending, remaining_s=25.0), 0.0).grow


def test_it_waits_for_those_on_their_way_until_that_costs_as_much_as_another_joining() -> None:
    batch = replace(GROUP, rates=LINEAR, ready_since=100.0, coming=2)
    waiting = decide_growth(batch, 110.0)
    assert (waiting.grow, waiting.again_at) == (False, 120.0)
    assert waiting.words == "4 ready to join; waits at most 10s for 2 more to start"
    assert decide_growth(batch, 120.0).grow
    assert decide_growth(replace(batch, coming=0), 110.0).grow
    assert decide_growth(batch, 105.0, Batching(window_s=5.0)).grow


def test_more_workers_that_are_not_faster_do_not_join() -> None:
    verdict = decide_growth(replace(GROUP, rates={4: 400.0, 8: 390.0}), 0.0)
    assert (verdict.grow, verdict.again_at, verdict.pays_back_s) == (False, None, math.inf)
    assert verdict.words == "4 more workers would not make training faster, as measured"


def test_a_group_grows_only_if_it_exists_and_workers_are_ready() -> None:
    assert not decide_growth(replace(GROUP, ready=0), 0.0).grow
    assert decide_growth(replace(GROUP, size=0), 0.0).grow


def test_a_group_left_in_peace_is_trusted_more() -> None:
    batching = Batching(typical_quiet_s=600.0)
    assert expected_quiet_s(0, 0.0, batching) == 600.0
    assert expected_quiet_s(0, 6000.0, batching) == 6600.0
    assert expected_quiet_s(9, 6000.0, batching) == 660.0


def test_what_was_measured_counts_more_than_what_is_usual() -> None:
    assert speedup(4, 64, {}, 0.8) == pytest.approx(16**0.8)
    assert speedup(4, 8, {4: 10.0, 8: 15.0}, 0.8) == pytest.approx(1.5)
    assert speedup(4, 16, {2: 10.0, 4: 15.0}, 0.8) == pytest.approx(1.5**2)  # half as much again by each doubling
    assert speedup(4, 8, {2: 10.0, 4: 5.0}, 0.8) == 1.0  # never slower than it is, where that was not measured
    assert speedup(4, 8, {0: 1.0, 4: 0.0, 2: 7.0}, 1.0) == pytest.approx(2.0)
