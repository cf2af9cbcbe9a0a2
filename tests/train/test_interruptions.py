"""What a run observes of its interruptions, and the intervals that follow."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_store.checkpoints.run_records import INTERRUPTIONS
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train.interruptions import (
    AGES_S,
    PRIOR_S,
    QUIET_S,
    UNSEEN_S,
    Hazard,
    Interruptions,
    RankMachine,
    Record,
    decode,
    encode,
    machines_of,
    this_machine,
)

HOUR_S = 3600.0
BATHTUB = (1 / (4 * HOUR_S), 1 / (20 * HOUR_S), 1 / (100 * HOUR_S), 1 / (100 * HOUR_S), 1 / (2 * HOUR_S))


def group(*names: str, booted_at: float = 0.0) -> tuple[RankMachine, ...]:
    return tuple(RankMachine(name, booted_at) for name in names)


def test_without_observations_an_interruption_is_expected_every_four_hours() -> None:
    for size in (1, 8):
        record = Record().followed_by(group(*map(str, range(size))), 0.0, committed_at=None, work_lost=True)
        assert record.hazard(0.0).between_s() == pytest.approx(PRIOR_S)
        assert not any(record.losses)
        assert not record.others


def test_losses_are_counted_by_the_age_of_the_lost_machine() -> None:
    first = Record().followed_by(
        (*group("old"), *group("new", booted_at=5 * HOUR_S)), 6 * HOUR_S, committed_at=None, work_lost=True
    )
    now = 7 * HOUR_S
    second = first.followed_by(group("old", "newer", booted_at=0.0), now, committed_at=now - 5, work_lost=True)
    assert list(second.losses) == [0, 1, 0, 0, 0], "`new` was two hours old"
    assert list(second.machine_s) == [0, HOUR_S, HOUR_S, 0, 0]
    assert (second.others, second.group_s) == (0, HOUR_S)
    third = second.followed_by(group("x", "y"), now + HOUR_S, committed_at=now + HOUR_S, work_lost=True)
    assert sum(third.losses) == pytest.approx(2), "two simultaneous losses are one interruption"
    assert third.followed_by(group("x", "y"), now + 2 * HOUR_S, committed_at=now, work_lost=True).others == 1


def test_scaling_and_suspension_are_not_observations() -> None:
    record = Record().followed_by(group("a"), 0.0, committed_at=None, work_lost=True)
    at = 0.0
    for size in range(2, 40):  # added and removed, every ten minutes, all day
        at += 600
        record = decode(encode(replace(record, ended_at=at)))
        record = record.followed_by(group(*map(str, range(size))), at, committed_at=at, work_lost=True)
    assert not any(record.losses)
    assert not record.others
    assert record.group_s == pytest.approx(at)
    suspended = replace(record, ended_at=at + 60)
    later = suspended.followed_by(group("b"), at + 7 * 86_400, committed_at=at + 60, work_lost=True)
    assert later.group_s == pytest.approx(at + 60)
    killed = record.followed_by(group("b"), at + 7 * 86_400, committed_at=at + 100, work_lost=True)
    assert killed.group_s == pytest.approx(at + 100 + UNSEEN_S)
    assert sum(killed.losses) == pytest.approx(1)


def test_a_group_that_keeps_its_state_is_not_interrupted() -> None:
    record = Record().followed_by(group("a", "b"), 0.0, committed_at=None, work_lost=True)
    record = record.followed_by(group("a"), HOUR_S, committed_at=0.9 * HOUR_S, work_lost=False)
    assert not any(record.losses)
    assert record.hazard(HOUR_S).between_s() > PRIOR_S


def test_no_machine_is_expected_to_last_longer_than_a_day() -> None:
    record = Record(machine_s=(1e9,) * 5, group_s=5e9, machines=group("a"))
    assert record.hazard(0.0).between_s() == QUIET_S


ages = st.lists(st.floats(0, 1e6), min_size=1, max_size=5)
moments = st.lists(st.tuples(st.floats(0, 1e5), ages, st.booleans(), st.booleans(), st.floats(-1e4, 1e5)), max_size=8)


@given(moments)
def test_time_and_losses_always_add_up(events: list[tuple[float, list[float], bool, bool, float]]) -> None:
    record, now, interruptions = Record(), 1e6, 0
    for number, (wait_s, ages_s, lost, planned, commit_s) in enumerate(events):
        now += wait_s
        if planned and record.machines:
            record = replace(record, ended_at=now)
        interruptions += lost and bool(record.machines) and record.ended_at is None
        machines = [RankMachine(f"{number}-{one}", now - age_s) for one, age_s in enumerate(ages_s)]
        record = decode(encode(record.followed_by(machines, now, committed_at=now + commit_s, work_lost=lost)))
        assert sum(record.losses) + record.others == pytest.approx(interruptions)
        assert 0 <= record.group_s <= now - 1e6 + 1e-6
        assert min(*record.machine_s, *record.losses) >= 0
        assert 0 < record.hazard(now + 1e5).between_s() <= QUIET_S


@pytest.mark.parametrize(
    "data",
    [
        *[b"", b"[]", b"null", b"{}", b'{"machines": [1]}', b"[" * 100_000, encode(Record(others=math.nan))],
        *[encode(Record(group_s=-1)), encode(Record(losses=(1.0,)))],
        encode(Record(machines=group("a", booted_at=math.inf))),
    ],
)
def test_an_invalid_record_is_ignored(data: bytes) -> None:
    assert decode(data) == Record()


def test_each_machine_counts_once_and_keeps_its_age() -> None:
    before = Record(machines=(RankMachine("a", 100.0),))
    found = [("a", 5.0), ("b", 50.0), ("b", 50.0), ("", None)]
    assert machines_of(found, before, 1000.0) == [
        RankMachine("a", 100.0),
        RankMachine("b", 950.0),
        RankMachine("", 1000.0),
    ]
    name, age_s = this_machine()
    again, later_s = this_machine()
    assert name == again
    assert age_s is None or (later_s is not None and later_s >= age_s)


def test_the_record_is_stored_next_to_the_checkpoints(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for _ in range(3):
        seen = Interruptions(storage)
        seen.begin_group([("here", 0.0)], work_lost=True)
        seen.join()
    assert decode(storage.get(INTERRUPTIONS)).others == 2
    seen.end_group(10.0)
    seen = Interruptions(storage)
    seen.begin_group([("here", 0.0)], work_lost=True)
    seen.join()
    assert decode(storage.get(INTERRUPTIONS)).others == 2
    assert seen.hazard().between_s() == pytest.approx(PRIOR_S / 3, rel=0.01)
    storage.put(INTERRUPTIONS, [b"\0" * 100])
    seen.begin_group([("here", 0.0)], work_lost=True)
    seen.join()
    assert seen.hazard().between_s() == pytest.approx(PRIOR_S, rel=0.01)


@given(st.lists(st.floats(0, 1e-3), min_size=5, max_size=5), ages, st.floats(1e-3, 100.0))
def test_the_best_interval_follows_the_expected_rates(by_age: list[float], ages_s: list[float], cost_s: float) -> None:
    hazard = Hazard(by_age, 1e-6, ages_s)
    best_s = hazard.best_interval_s(cost_s)
    parts = 500
    at_risk = (
        best_s / parts * part_s / Hazard(by_age, 1e-6, [age_s + part_s for age_s in ages_s]).between_s()
        for part_s in (best_s * (part + 0.5) / parts for part in range(parts))
    )
    in_a_part = best_s * best_s / parts * max(by_age) * len(ages_s)  # where the rate changes within it
    assert sum(at_risk) == pytest.approx(cost_s, rel=0.01, abs=2 * in_a_part)


def life_s(rates: Sequence[float], chance: random.Random) -> float:
    """How long a machine with these hazards lasts."""
    left = chance.expovariate(1.0)
    for (start, end), rate in zip(itertools.pairwise((*AGES_S, math.inf)), rates, strict=True):
        if left < (end - start) * rate:
            return start + left / rate
        left -= (end - start) * rate
    raise AssertionError


def learn(rates: Sequence[float], losses: int, chance: random.Random) -> Record:
    """One machine after another, each lost without warning right after a commit."""
    record, now = Record(), 0.0
    for number in range(losses + 1):
        record = record.followed_by(group(str(number), booted_at=now), now, committed_at=now - 1, work_lost=True)
        now += life_s(rates, chance)
    return record


def test_a_bathtub_curve_is_recognized() -> None:
    hazard = learn(BATHTUB, 200, random.Random(1)).hazard(0.0)
    assert hazard.by_age == pytest.approx(BATHTUB, rel=0.7)
