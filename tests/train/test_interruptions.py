"""What a run learns of its interruptions, and whether the intervals that follow from it are near the best there are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import pytest
from hypothesis import given, settings
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
    Machine,
    Record,
    decode,
    encode,
    machines_of,
    this_machine,
)
from elasticctl_train.save_policy import LONGEST_S, SHORTEST_S, interval_s

HOUR_S = 3600.0
BATHTUB = (1 / (4 * HOUR_S), 1 / (20 * HOUR_S), 1 / (100 * HOUR_S), 1 / (100 * HOUR_S), 1 / (2 * HOUR_S))


def group(*names: str, booted_at: float = 0.0) -> tuple[Machine, ...]:
    return tuple(Machine(name, booted_at) for name in names)


def test_a_run_that_knows_nothing_expects_an_interruption_every_four_hours() -> None:
    for size in (1, 8):
        record = Record().followed_by(group(*map(str, range(size))), 0.0, committed_at=None, work_lost=True)
        assert record.hazard(0.0).between_s() == pytest.approx(PRIOR_S)
        assert not any(record.losses)
        assert not record.others


def test_losses_are_counted_by_the_age_of_the_machine_that_is_gone() -> None:
    first = Record().followed_by(
        (*group("old"), *group("new", booted_at=5 * HOUR_S)), 6 * HOUR_S, committed_at=None, work_lost=True
    )
    now = 7 * HOUR_S
    second = first.followed_by(group("old", "newer", booted_at=0.0), now, committed_at=now - 5, work_lost=True)
    assert list(second.losses) == [0, 1, 0, 0, 0], "`new` was two hours old"
    assert list(second.machine_s) == [0, HOUR_S, HOUR_S, 0, 0]
    assert (second.others, second.group_s) == (0, HOUR_S)
    third = second.followed_by(group("x", "y"), now + HOUR_S, committed_at=now + HOUR_S, work_lost=True)
    assert sum(third.losses) == pytest.approx(2), "two at once are one interruption"
    assert third.followed_by(group("x", "y"), now + 2 * HOUR_S, committed_at=now, work_lost=True).others == 1


def test_neither_scalings_nor_time_suspended_teach_anything() -> None:
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


def test_a_group_whose_state_lives_on_is_not_interrupted() -> None:
    record = Record().followed_by(group("a", "b"), 0.0, committed_at=None, work_lost=True)
    record = record.followed_by(group("a"), HOUR_S, committed_at=0.9 * HOUR_S, work_lost=False)
    assert not any(record.losses)
    assert record.hazard(HOUR_S).between_s() > PRIOR_S


def test_no_machine_is_taken_to_last_longer_than_a_day() -> None:
    record = Record(machine_s=(1e9,) * 5, group_s=5e9, machines=group("a"))
    assert record.hazard(0.0).between_s() == QUIET_S


ages = st.lists(st.floats(0, 1e6), min_size=1, max_size=5)
moments = st.lists(st.tuples(st.floats(0, 1e5), ages, st.booleans(), st.booleans(), st.floats(-1e4, 1e5)), max_size=8)


@given(moments)
def test_whatever_happens_time_and_losses_add_up(events: list[tuple[float, list[float], bool, bool, float]]) -> None:
    record, now, interruptions = Record(), 1e6, 0
    for number, (wait_s, ages_s, lost, planned, commit_s) in enumerate(events):
        now += wait_s
        if planned and record.machines:
            record = replace(record, ended_at=now)
        interruptions += lost and bool(record.machines) and record.ended_at is None
        machines = [Machine(f"{number}-{one}", now - age_s) for one, age_s in enumerate(ages_s)]
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
def test_what_is_no_record_is_forgotten(data: bytes) -> None:
    assert decode(data) == Record()


def test_each_machine_counts_once_and_keeps_its_age() -> None:
    before = Record(machines=(Machine("a", 100.0),))
    found = [("a", 5.0), ("b", 50.0), ("b", 50.0), ("", None)]
    assert machines_of(found, before, 1000.0) == [Machine("a", 100.0), Machine("b", 950.0), Machine("", 1000.0)]
    name, age_s = this_machine()
    again, later_s = this_machine()
    assert name == again
    assert age_s is None or (later_s is not None and later_s >= age_s)


def test_it_is_kept_beside_the_checkpoints(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    for _ in range(3):
        seen = Interruptions(storage)
        seen.begin([("here", 0.0)], work_lost=True)
        seen.join()
    assert decode(storage.get(INTERRUPTIONS)).others == 2
    seen.end(10.0)
    seen = Interruptions(storage)
    seen.begin([("here", 0.0)], work_lost=True)
    seen.join()
    assert decode(storage.get(INTERRUPTIONS)).others == 2
    assert seen.hazard().between_s() == pytest.approx(PRIOR_S / 3, rel=0.01)
    storage.put(INTERRUPTIONS, [b"\0" * 100])
    seen.begin([("here", 0.0)], work_lost=True)
    seen.join()
    assert seen.hazard().between_s() == pytest.approx(PRIOR_S, rel=0.01)


# How much the intervals lose, compared with the best there are: in closed form, on machines whose hazards are known.

Rates = Sequence[float]
GRID_S = 20.0
LIFE_S = 30 * HOUR_S


def hazard_at(rates: Rates, age_s: float) -> float:
    return rates[max(span for span, edge in enumerate(AGES_S) if age_s >= edge)]


@lru_cache(maxsize=8)
def _integrals(rates: Rates) -> tuple[list[float], list[float], list[float]]:
    """At each grid point of age: the chance to live so long, and the sums of deaths and of deaths times age so far."""
    alive, deaths, moments = [1.0], [0.0], [0.0]
    for point in range(int(LIFE_S / GRID_S)):
        lives_on = alive[-1] * math.exp(-hazard_at(rates, point * GRID_S) * GRID_S)
        dies = alive[-1] - lives_on
        alive.append(lives_on)
        deaths.append(deaths[-1] + dies)
        moments.append(moments[-1] + dies * (point + 0.5) * GRID_S)
    return alive, deaths, moments


def lost_s(rates: Rates, cost_s: float, interval: Callable[[float], float]) -> float:
    """What one life of a machine costs on average, in saves and in work that is lost."""
    alive, deaths, moments = _integrals(rates)
    total, point = 0.0, 0
    while point < len(alive) - 1:
        until = min(len(alive) - 1, point + max(1, round(interval(point * GRID_S) / GRID_S)))
        total += moments[until] - moments[point] - (deaths[until] - deaths[point]) * point * GRID_S
        total += alive[until] * cost_s
        point = until
    return total


def least_lost_s(rates: Rates, cost_s: float) -> float:
    """The same with the best of all intervals, each chosen anew, within the same bounds: by dynamic programming."""
    alive, deaths, moments = _integrals(rates)
    last = len(alive) - 1
    steps = range(max(1, round(SHORTEST_S / GRID_S)), round(LONGEST_S / GRID_S) + 1)
    least = [0.0] * (last + 1)
    for point in range(last - 1, -1, -1):
        ends = {min(last, point + step) for step in steps}
        least[point] = min(
            moments[end] - moments[point] - (deaths[end] - deaths[point]) * point * GRID_S
            + alive[end] * cost_s + least[end]
            for end in ends
        )  # fmt: skip
    return least[0]


def intervals_of(hazard_at: Callable[[float], Hazard], cost_s: float) -> Callable[[float], float]:
    return lambda age_s: interval_s(cost_s, 0.0, hazard_at(age_s))


@given(st.lists(st.floats(0, 1e-3), min_size=5, max_size=5), ages, st.floats(1e-3, 100.0))
def test_the_best_interval_weighs_the_rates_that_it_will_see(
    by_age: list[float], ages_s: list[float], cost_s: float
) -> None:
    hazard = Hazard(by_age, 1e-6, ages_s)
    best_s = hazard.best_interval_s(cost_s)
    parts = 2000
    at_risk = (
        best_s / parts * part_s / Hazard(by_age, 1e-6, [age_s + part_s for age_s in ages_s]).between_s()
        for part_s in (best_s * (part + 0.5) / parts for part in range(parts))
    )
    in_a_part = best_s * best_s / parts * max(by_age) * len(ages_s)  # where the rate changes within it
    assert sum(at_risk) == pytest.approx(cost_s, rel=0.01, abs=2 * in_a_part)


rates_per_h = st.tuples(*[st.floats(0.05, 4.0)] * len(AGES_S))


@settings(max_examples=15)
@given(rates_per_h, st.floats(0.05, 10.0))
def test_where_the_hazards_are_known_hardly_anything_is_lost_over_the_best_there_is(
    per_h: tuple[float, ...], cost_s: float
) -> None:
    rates = tuple(rate / HOUR_S for rate in per_h)
    chosen = lost_s(rates, cost_s, intervals_of(lambda age_s: Hazard(rates, 0.0, [age_s]), cost_s))
    assert chosen <= 1.03 * least_lost_s(rates, cost_s) + 0.1


def life_s(rates: Rates, chance: random.Random) -> float:
    """How long a machine with these hazards lasts."""
    left = chance.expovariate(1.0)
    for (start, end), rate in zip(itertools.pairwise((*AGES_S, math.inf)), rates, strict=True):
        if left < (end - start) * rate:
            return start + left / rate
        left -= (end - start) * rate
    raise AssertionError


def learn(rates: Rates, losses: int, chance: random.Random) -> Record:
    """One machine after another, each lost without warning just behind a commit."""
    record, now = Record(), 0.0
    for number in range(losses + 1):
        record = record.followed_by(group(str(number), booted_at=now), now, committed_at=now - 1, work_lost=True)
        now += life_s(rates, chance)
    return record


def _hazard_at(record: Record, booted_at: float, age_s: float) -> Hazard:
    return record.hazard(booted_at + age_s)


def _constant(rate: float, age_s: float) -> Hazard:
    return Hazard((), rate, ())


def lost_while_learning_s(rates: Rates, cost_s: float, losses: int, chance: random.Random) -> tuple[float, float]:
    """What a run loses from its first start on, as it learns, and as a constant rate from the same events would."""
    record, now, by_age, constant = Record(), 0.0, 0.0, 0.0
    for number in range(losses):
        machines = group(str(number), booted_at=now)
        record = record.followed_by(machines, now, committed_at=now - 1, work_lost=True)
        ages_apart = intervals_of(partial(_hazard_at, record, now), cost_s)
        rate = (1 + number) / (PRIOR_S + now)
        by_age += lost_s(rates, cost_s, ages_apart)
        constant += lost_s(rates, cost_s, intervals_of(partial(_constant, rate), cost_s))
        now += life_s(rates, chance)
    return by_age, constant


@settings(max_examples=10)
@given(rates_per_h, st.floats(0.5, 10.0), st.integers(0, 2**32))
def test_a_run_that_has_to_learn_them_loses_little_more(per_h: tuple[float, ...], cost_s: float, seed: int) -> None:
    rates, losses = tuple(rate / HOUR_S for rate in per_h), 20
    lost, _ = lost_while_learning_s(rates, cost_s, losses, random.Random(seed))
    assert lost <= 1.4 * losses * least_lost_s(rates, cost_s)


def test_a_bathtub_is_seen() -> None:
    by_age = constant = 0.0
    for seed in range(10):
        lost = lost_while_learning_s(BATHTUB, 2.0, 30, random.Random(seed))
        by_age, constant = by_age + lost[0], constant + lost[1]
    best = 10 * 30 * least_lost_s(BATHTUB, 2.0)
    print(f"over the best: {by_age / best:.3f} by age, {constant / best:.3f} at a constant rate")
    assert by_age < 1.15 * best
    assert by_age < constant
    hazard = learn(BATHTUB, 200, random.Random(1)).hazard(0.0)
    assert hazard.by_age == pytest.approx(BATHTUB, rel=0.7)
