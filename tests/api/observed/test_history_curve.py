"""The curve in a job's status: bounded, spread evenly in time, and unchanged by what it knows already."""

from __future__ import annotations

import itertools
import json
import sys

from hypothesis import given
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.observed.history import MAX_METRICS, MAX_POINTS, add_point
from elasticctl.api.status import Curve

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


def test_what_is_known_already_changes_nothing() -> None:
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
