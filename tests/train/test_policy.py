"""When saves are due, and at which steps the ranks meet to agree on it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl_train.errors import TrainError
from elasticctl_train.policy import NOTICE_CHECK_S, Cadence, SavePolicy


def walk(cadence: Cadence, first_step: int, step_times_s: list[float]) -> tuple[list[int], list[int]]:
    """Take steps that last so long; returns the check steps and the steps at which a save was due."""
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
def test_by_steps_the_multiples_are_due(start: int, due: list[int]) -> None:
    assert walk(Cadence(SavePolicy(every_steps=5), start, 0.0), start, [1.0] * 15) == (due, due)


def test_by_time_saves_come_at_the_interval_with_few_checks() -> None:
    checks, due = walk(Cadence(SavePolicy(every_s=10.0), 0, 0.0), 0, [0.01] * 10_000)
    assert len(due) in (9, 10)
    assert all(980 <= b - a <= 1020 for a, b in pairwise(due))
    assert len(checks) < 300


def test_a_step_longer_than_the_interval_is_saved_each_time() -> None:
    _, due = walk(Cadence(SavePolicy(every_s=1.0), 0, 0.0), 0, [5.0] * 4)
    assert due == [1, 2, 3, 4]


def test_the_default_is_half_a_minute() -> None:
    _, due = walk(Cadence(SavePolicy(), 0, 0.0), 0, [1.0] * 100)
    assert due == [30, 60, 90]


@pytest.mark.parametrize("policy", [SavePolicy(every_s=10.0), SavePolicy(every_steps=1000)])
def test_where_notice_can_come_checks_are_close_and_saves_the_same(policy: SavePolicy) -> None:
    checks, due = walk(Cadence(policy, 0, 0.0, notice_possible=True), 0, [0.01] * 10_000)
    _, without = walk(Cadence(policy, 0, 0.0), 0, [0.01] * 10_000)
    gap = round(NOTICE_CHECK_S / 0.01)
    assert all(b - a <= gap for a, b in pairwise(checks))
    assert len(checks) < 2.2 * 10_000 / gap, "but not in every step"
    assert len(due) in (len(without), len(without) - 1, len(without) + 1)
    if policy.every_steps:
        assert due == without


@given(st.lists(st.floats(0.001, 0.1), max_size=300), st.floats(0.001, 0.1))
def test_a_save_is_never_due_too_early_nor_forgotten(noise_s: list[float], step_s: float) -> None:
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
    ],
)
def test_a_policy_that_cannot_be_is_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(TrainError, match=said):
        SavePolicy(**options)  # type: ignore[arg-type]
