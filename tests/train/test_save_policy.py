"""When saves are due, and at which steps the ranks meet."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_store.checkpoints.entries import Retention
from elasticctl_store.errors import TrainError
from elasticctl_train.interruptions import QUIET_S, Hazard
from elasticctl_train.save_policy import (
    LONGEST_S,
    NOTICE_CHECK_S,
    SHORTEST_S,
    Cadence,
    SavePolicy,
    interval_s,
)


def lost_every(between_s: float) -> Hazard:
    """Interruptions at a constant rate."""
    return Hazard((), 1 / between_s, ())


def walk(cadence: Cadence, first_step: int, step_times_s: list[float]) -> tuple[list[int], list[int]]:
    """Make steps of this duration; return the steps of checks and of due saves."""
    checks, due_at, now_s, check = [], [], 0.0, cadence.first_check
    for step, took_s in enumerate(step_times_s, start=first_step + 1):
        now_s += took_s
        if step >= check:
            checks.append(step)
            due, check = cadence.check(step, now_s)
            due_at += [step] if due else []
            assert check > step
    return checks, due_at


@pytest.mark.parametrize(("start", "due"), [(0, [5, 10, 15]), (3, [5, 10, 15]), (5, [10, 15, 20])])
def test_multiples_of_every_steps_are_due(start: int, due: list[int]) -> None:
    assert walk(Cadence(SavePolicy(every_steps=5), start, 0.0), start, [1.0] * 15) == (due, due)


@pytest.mark.parametrize("notice_possible", [False, True])
def test_a_missed_multiple_is_made_up_for(notice_possible: bool) -> None:
    cadence = Cadence(SavePolicy(every_steps=5), 0, 0.0, notice_possible=notice_possible)
    dues = {step: cadence.check(step, float(step))[0] for step in (3, 4, 6, 7, 9, 11, 15, 16)}
    if notice_possible:
        assert [step for step, due in dues.items() if due] == [6, 11, 15]
    assert dues[6]
    assert dues[15]


def test_saves_by_time_follow_the_interval_with_few_checks() -> None:
    checks, due = walk(Cadence(SavePolicy(every_s=10.0), 0, 0.0), 0, [0.01] * 10_000)
    assert len(due) in (9, 10)
    assert all(980 <= b - a <= 1020 for a, b in pairwise(due))
    assert len(checks) < 300


def test_a_step_longer_than_the_interval_is_saved_each_time() -> None:
    _, due = walk(Cadence(SavePolicy(every_s=1.0), 0, 0.0), 0, [5.0] * 4)
    assert due == [1, 2, 3, 4]


def test_the_interval_is_chosen_by_default() -> None:
    assert SavePolicy().auto
    assert SavePolicy("auto").auto
    assert not SavePolicy(30.0).auto
    assert not SavePolicy(every_steps=5).auto
    _, due = walk(Cadence(SavePolicy(), 0, 0.0), 0, [1.0] * 16)
    assert due == [5, 10, 15], "frequent until a save has been measured"


def test_the_cost_of_a_save_sets_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    cadence = Cadence(SavePolicy(), 0, 0.0, hazard=lambda: lost_every(20_000.0))
    with caplog.at_level(logging.INFO):
        cadence.saved(0.25)  # sqrt(2 x 0.25 s x 20,000 s) = 100 s
        assert caplog.messages == [
            "saving every 100 s: a save stops training for 250 ms, an interruption is expected every 5.6 h"
        ]
        _, due = walk(cadence, 0, [10.0] * 31)
        assert due == [10, 20, 30]
        cadence.saved(0.01)
        for _ in range(3):
            cadence.saved(0.25)
        assert len(caplog.messages) == 1, "one cheap save does not change the interval enough to log it"
        for _ in range(3):
            cadence.saved(0.01)
        assert caplog.messages[1].startswith("saving every 20 s: a save stops training for 10 ms")


def test_only_rank_0_logs_the_interval(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Cadence(SavePolicy(), 0, 0.0).saved(0.25, quietly=True)
    assert caplog.messages == []


def test_a_given_interval_does_not_depend_on_the_cost() -> None:
    cadence = Cadence(SavePolicy(10.0), 0, 0.0)
    cadence.saved(100.0)
    assert walk(cadence, 0, [1.0] * 30)[1] == [10, 20, 30]


positive = st.floats(1e-3, 1e5)


@given(positive, positive, st.floats(1e-3, QUIET_S))
def test_the_chosen_interval_loses_the_least_time(cost_s: float, write_s: float, between_s: float) -> None:
    chosen = interval_s(cost_s, write_s, lost_every(between_s))
    assert SHORTEST_S <= chosen <= LONGEST_S

    def lost(every_s: float) -> float:
        return cost_s / every_s + every_s / 2 / between_s

    within = [every_s for every_s in (chosen * 0.9, chosen * 1.1) if max(SHORTEST_S, 2 * write_s) < every_s < LONGEST_S]
    assert all(lost(chosen) <= lost(every_s) for every_s in within)
    assert chosen >= min(2 * write_s, LONGEST_S)


def test_the_interval_follows_the_ages_of_machines() -> None:
    between_s = [20_000.0]
    cadence = Cadence(SavePolicy(), 0, 0.0, hazard=lambda: lost_every(between_s[0]))
    cadence.saved(0.25)
    assert walk(cadence, 0, [10.0] * 31)[1] == [10, 20, 30]
    between_s[0] /= 4
    cadence.saved(0.25)
    assert walk(cadence, 31, [10.0] * 10)[1] == []
    assert cadence.check(42, 310.0 + 50.0)[0]


def test_retention_is_passed_on() -> None:
    assert SavePolicy().retention == Retention(3)
    policy = SavePolicy(keep_last=2, keep_every_h=0.5, keep_best=4, metric="accuracy", mode="max")
    assert policy.retention == Retention(2, 1800.0, 4, "accuracy", "max")


@pytest.mark.parametrize("policy", [SavePolicy(every_s=10.0), SavePolicy(every_steps=1000)])
def test_possible_notice_makes_checks_frequent_but_not_saves(policy: SavePolicy) -> None:
    checks, due = walk(Cadence(policy, 0, 0.0, notice_possible=True), 0, [0.01] * 10_000)
    _, without = walk(Cadence(policy, 0, 0.0), 0, [0.01] * 10_000)
    gap = round(NOTICE_CHECK_S / 0.01)
    assert all(b - a <= gap for a, b in pairwise(checks))
    assert len(checks) < 2.2 * 10_000 / gap, "but not in every step"
    assert len(due) in (len(without), len(without) - 1, len(without) + 1)
    if policy.every_steps:
        assert due == without


@given(st.lists(st.floats(0.001, 0.1), max_size=300), st.floats(0.001, 0.1))
def test_saves_are_never_due_too_early_or_missed(noise_s: list[float], step_s: float) -> None:
    times_s = [*noise_s, *[step_s] * 400]
    _, due = walk(Cadence(SavePolicy(every_s=1.0), 0, 0.0), 0, times_s)
    ends_s = [sum(times_s[:step]) for step in (0, *due)]
    assert all(b - a >= 1.0 - 1e-9 for a, b in pairwise(ends_s))
    assert sum(times_s) < 2.2 or due


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every_s": 1.0, "every_steps": 1}, "not both"),
        ({"every_s": 0.0}, "every_s=0.0 must be greater than 0"),
        ({"every_steps": -1}, "every_steps=-1"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"every_s": float("nan")}, "every_s=nan"),
        ({"every_s": "often"}, "every_s=often"),
        ({"keep_every_h": 0}, "keep_every_h=0"),
        ({"keep_best": 2}, "keep_best and metric go together"),
        ({"metric": "loss"}, "keep_best and metric go together"),
        ({"keep_best": 2, "metric": "loss", "mode": "least"}, "mode='least'"),
    ],
)
def test_an_invalid_policy_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TrainError, match=said):
        SavePolicy(**options)
