"""Pace and end of training, goodput, and the curve: bounded, and spread evenly in time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.observed.history import (
    MAX_METRICS,
    MAX_POINTS,
    Goodput,
    add_point,
    fraction_done,
    goodput,
    remaining_s,
    steps_per_s,
    unkept_s,
)
from elasticctl.api.status import Curve, GroupGeneration, JobStatus, Phase, ProgressStatus

GROUP = GroupGeneration(generation=2, first_step_at=Timestamp(100.0), resumed_step=40)
STATUS = JobStatus(
    phase=Phase.RUNNING,
    generations=(GroupGeneration(generation=1, first_step_at=Timestamp(1.0)), GROUP),
    progress=ProgressStatus(at=Timestamp(110.0), step=61, total_steps=161),
)


def test_the_pace_is_that_of_the_group_that_trains_now() -> None:
    assert steps_per_s(STATUS) == pytest.approx(2.0)  # 20 steps after its first, in 10 s
    assert remaining_s(STATUS) == pytest.approx(50.0)
    assert fraction_done(STATUS) == pytest.approx(61 / 161)


def test_a_silent_script_would_repeat_the_time_that_its_group_has_run() -> None:
    silent = JobStatus(phase=Phase.RUNNING, generations=(GroupGeneration(2, formed_at=Timestamp(100.0)),))
    assert unkept_s(silent, 160.0) == pytest.approx(60.0)
    assert unkept_s(dataclasses.replace(silent, phase=Phase.SUSPENDED), 160.0) is None
    assert unkept_s(JobStatus(phase=Phase.RUNNING), 160.0) is None
    assert unkept_s(STATUS, 160.0) is None


@pytest.mark.parametrize(
    "change",
    [
        {"phase": Phase.RESTARTING},
        {"generations": ()},
        {"generations": (dataclasses.replace(GROUP, first_step_at=None),)},
        {"progress": ProgressStatus(step=61, total_steps=161)},
        {"progress": ProgressStatus(at=Timestamp(100.5), step=61, total_steps=161)},
        {"progress": ProgressStatus(at=Timestamp(110.0), step=41, total_steps=161)},
    ],
)
def test_unknown_values_are_not_shown(change: dict[str, object]) -> None:
    status = dataclasses.replace(STATUS, **change)  # type: ignore[arg-type]
    assert steps_per_s(status) is None
    assert remaining_s(status) is None


def test_without_an_end_there_is_no_share() -> None:
    for total in (None, 0, -3):
        progress = dataclasses.replace(STATUS.progress, total_steps=total)
        assert fraction_done(dataclasses.replace(STATUS, progress=progress)) is None
    assert remaining_s(dataclasses.replace(STATUS, progress=ProgressStatus(at=Timestamp(110.0), step=61))) is None


def group(
    number: int, opened: float, first: float | None, resumed: int = 0, last: int | None = None
) -> GroupGeneration:
    return GroupGeneration(
        generation=number,
        opened_at=Timestamp(opened),
        formed_at=Timestamp(opened + 0.5),
        first_step_at=None if first is None else Timestamp(first),
        resumed_step=resumed,
        last_step=last,
    )


def status(*groups: GroupGeneration, reported: float | None = None, **fields: Any) -> JobStatus:
    at = None if reported is None else Timestamp(reported)
    return JobStatus(start_time=Timestamp(0.0), generations=groups, progress=ProgressStatus(at=at), **fields)


def test_starting_is_time_without_progress() -> None:
    assert goodput(status(group(1, 15.0, 20.0, 0, 80), reported=99.0), 100.0) == Goodput(100.0, 79.0, 0.0)


def test_the_time_of_repeated_steps_is_subtracted() -> None:
    """80 steps in 80 s; 20 of them were lost; 2 s until the next step; then 18 s more."""
    history = status(group(1, 0.0, 0.0, 0, 80), group(2, 80.0, 82.0, 60, 78), reported=100.0)
    assert goodput(history, 100.0) == Goodput(100.0, 78.0, 20.0)


def test_a_group_without_a_step_hides_no_loss() -> None:
    """The second group was cut off before its first step; what the third resumed at is what the first lost."""
    cut_off = GroupGeneration(2, opened_at=Timestamp(40.0))
    history = status(group(1, 0.0, 0.0, 0, 40), cut_off, group(3, 45.0, 50.0, 30, 80), reported=100.0)
    found = goodput(history, 100.0)
    assert found == Goodput(100.0, 80.0, 10.0)
    assert found.share == pytest.approx(0.8)


def test_an_ended_job_counts_up_to_its_end() -> None:
    history = status(group(1, 0.0, 10.0, 0, 50), reported=60.0, phase=Phase.SUCCEEDED, completion_time=Timestamp(61.0))
    assert goodput(history, 5000.0) == Goodput(61.0, 50.0, 0.0)


def test_a_resumed_job_counts_from_its_first_group() -> None:
    resumed = status(group(1, 5.0, 10.0, 0, 9), group(2, 50.0, 52.0, 9, 12), reported=60.0)
    found = goodput(resumed, 60.0)
    assert found is not None
    assert found.wall_s == 60.0
    later = JobStatus(start_time=Timestamp(49.0), generations=resumed.generations, progress=resumed.progress)
    assert goodput(later, 60.0) == Goodput(55.0, 48.0, 0.0)


def test_a_truncated_history_counts_only_known_entries() -> None:
    assert goodput(status(group(7, 70.0, 75.0, 700, 800), reported=100.0), 100.0) == Goodput(30.0, 25.0, 0.0, False)


def test_before_the_first_step_there_is_none() -> None:
    assert goodput(status(), 100.0) is None
    assert goodput(status(group(1, 1.0, None)), 100.0) is None


AT = 1_700_000_000.0


def grown(points: list[tuple[float, int]], curve: Curve | None = None) -> Curve:
    """A curve through (seconds, step), with a loss."""
    curve = curve or Curve()
    for at_s, step in points:
        curve = add_point(curve, Timestamp(AT + at_s), step, 100.0 + step, {"loss": 1 / (1 + step)})
    return curve


def test_few_points_are_all_kept() -> None:
    curve = grown([(0, 0), (1, 10), (2.54, 20)])
    assert curve == Curve(
        Timestamp(AT), (0.0, 1.0, 2.5), (0, 10, 20), (100.0, 110.0, 120.0), {"loss": (1.0, 0.090909, 0.047619)}
    )


def test_old_values_change_nothing() -> None:
    curve = grown([(0, 0), (1, 10)])
    assert grown([(1, 10)], curve) == curve
    assert grown([(0.5, 99)], curve) == curve
    assert add_point(curve, None, 3, None, {}) == curve
    assert add_point(curve, Timestamp(AT + 9), None, 1.0, {"loss": 2.0}) == curve


def test_a_tenth_of_a_second_later_is_the_same_point() -> None:
    assert grown([(1.04, 12)], grown([(0, 0), (1, 10)])).step == (0, 12)


def test_the_largest_numbers_stay_numbers() -> None:
    curve = add_point(Curve(), Timestamp(AT), 1, None, {"best": sys.float_info.max, "loss": 0.123456})
    assert curve.metrics == {"best": (sys.float_info.max,), "loss": (0.12346,)}
    json.dumps(to_json(curve), allow_nan=False)


def test_where_a_number_was_not_finite_there_is_a_gap() -> None:
    curve = grown([(0, 0), (1, 10)])
    curve = add_point(curve, Timestamp(AT + 2), 20, None, {"n": 1.0}, {"loss", "new"})
    curve = add_point(curve, Timestamp(AT + 3), 30, None, {})
    curve = add_point(curve, Timestamp(AT + 4), 40, None, {"loss": 0.5}, {"new"})
    assert curve.metrics == {"loss": (1.0, 0.090909, None, None, 0.5), "n": (1.0, 1.0, 1.0), "new": (None, None, None)}
    assert from_json(Curve, json.loads(json.dumps(to_json(curve)))) == curve
    stored = {"metrics": {"loss": [1, "x", None, True, 2**60, 0.5]}}
    assert from_json(Curve, stored).metrics == {"loss": (1.0, None, 0.5)}


def test_a_long_run_is_spread_evenly() -> None:
    curve = grown([(float(t), t) for t in range(10_000)])
    assert len(curve.at_s) == MAX_POINTS
    assert (curve.at_s[0], curve.at_s[-1]) == (0.0, 9_999.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(curve.at_s)]
    assert max(gaps[:-2]) <= 4 * min(gaps[:-2])
    assert all(step == at_s for step, at_s in zip(curve.step, curve.at_s, strict=True))


def test_a_metric_that_comes_later_belongs_to_the_last_points() -> None:
    curve = grown([(0, 0), (1, 1)])
    curve = add_point(curve, Timestamp(AT + 2), 2, None, {"accuracy": 0.5})
    curve = add_point(curve, Timestamp(AT + 3), 3, None, {"loss": 0.1, "accuracy": 0.75})
    assert curve.metrics == {"loss": (1.0, 0.5, 0.5, 0.1), "accuracy": (0.5, 0.75)}
    assert curve.samples_per_s == (100.0, 101.0, 101.0, 101.0)


def test_its_size_in_a_status_is_bounded() -> None:
    curve = Curve()
    for t in range(3 * MAX_POINTS):
        many = {f"metric-{n}": 1.234567e-5 * (t + n + 1) for n in range(20)}
        curve = add_point(curve, Timestamp(AT + 100 * t), 1_000 * t, 12_345.678, many)
    assert len(curve.metrics) == MAX_METRICS
    assert len(json.dumps(to_json(curve))) < 20_000


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**12).map(lambda us: us / 1e6),
            st.integers(0, 10**9),
            st.dictionaries(st.sampled_from("abc"), st.floats(-9, 9)),
        ),
        max_size=400,
    )
)
def test_whatever_comes_columns_fit_and_survive_being_stored(points: list[tuple[float, int, dict[str, float]]]) -> None:
    curve = Curve()
    for at_s, step, metrics in points:
        curve = add_point(curve, Timestamp(round(AT + at_s, 6)), step, None, metrics)
        assert len(curve.step) == len(curve.at_s) <= MAX_POINTS
        assert all(len(column) <= len(curve.at_s) for column in curve.metrics.values())
    assert list(curve.at_s) == sorted(set(curve.at_s))
    assert from_json(Curve, to_json(curve)) == curve
