"""Curves of metrics: thinning loses no spike, repeated steps count once, and gaps are reported."""

from __future__ import annotations

import csv
import math
import random

from elasticctl.api.spec import ElasticJob
from elasticctl.operations.curves import RATE, SAMPLES, STEP, TIME, Curves, Series, curves_of_status
from tests.support.job_samples import at, job


def rows(*points: tuple[int, float, object]) -> list[dict[str, object]]:
    return [{"step": step, "at": moment, "loss": value} for step, moment, value in points]


def test_no_spike_is_lost_at_any_size() -> None:
    numbers = random.Random(5)
    series = Series(replaces=True)
    values = [numbers.random() for _ in range(10_000)]
    values[7_777] = 99.0
    for step, value in enumerate(values):
        series.add(step, 2.0 * step, value)
    for points in (1, 3, 40, 600, 4_000):
        for low, high in ((-math.inf, math.inf), (7_000, 8_000), (63, 9_999)):
            seen = series.picture(low, high, points)
            part = values[max(0, math.ceil(max(low, 0))) : int(min(high, 9_999)) + 1]
            assert max(seen["high"] or seen["y"]) == 99.0
            assert min(seen["low"] or seen["y"]) <= min(part)
            assert seen["x"] == sorted(seen["x"])
            assert len(seen["x"]) <= 2 * points + 4
    exact = series.picture(7_770, 7_780, 600)
    assert (exact["x"], exact["low"]) == (list(range(7_769, 7_782)), None)
    assert exact["other"] == [2 * step for step in exact["x"]]
    found = series.summary()
    assert (found["last"], found["max"], found["min"]) == (values[-1], 99.0, min(values))


def test_steps_that_are_repeated_count_once_by_step_and_all_by_time() -> None:
    curves = Curves()
    curves.add(rows(*((step, float(step), 100.0 + step) for step in range(200))))
    curves.add(rows((150, 300.0, 1.0), (151, 301.0, 2.0)))
    by_step, by_time = curves.series("loss", STEP), curves.series("loss", TIME)
    assert by_step is not None
    assert by_time is not None
    assert list(by_step.x) == [float(step) for step in range(152)]
    assert list(by_step.y)[-2:] == [1.0, 2.0]
    assert len(by_time.x) == 202
    for step in range(152, 300):
        by_step.add(step, 400.0, 0.0)
    assert by_step.summary()["max"] == 249.0
    assert by_step.summary()["min"] == 0.0


def test_a_value_that_is_no_number_is_a_gap_and_a_word() -> None:
    curves = Curves()
    curves.add(rows((1, 1.0, 2.0), (2, 2.0, "NaN"), (3, 3.0, "NaN"), (4, 4.0, "-Infinity"), (5, 5.0, 1.0)))
    curves.add([{"step": 6, "at": 6.0, "loss": "no number", "flag": True, "none": None, "lr": 0.1}])
    series = curves.series("loss", STEP)
    assert series is not None
    picture = series.picture(-math.inf, math.inf, 100)
    assert (picture["x"], picture["y"]) == ([1, 2, 5], [2.0, None, 1.0])
    assert picture["lost"] == [(2, "NaN")]
    assert (series.summary()["lostNow"], curves.names) == (None, ["loss", "lr"])
    curves.add(rows((7, 7.0, "Infinity")))
    assert series.summary()["lostNow"] == (7, "inf")
    curves.add(rows((7, 8.0, 0.5)))  # repeated from a checkpoint, and finite now
    assert series.summary()["lostNow"] is None
    assert series.picture(-math.inf, math.inf, 100)["y"] == [2.0, None, 1.0, 0.5]


def test_a_million_points_are_read_by_groups() -> None:
    """Of the whole only the groups' extremes are read: what is asked of the rest is a few groups' worth."""
    series = Series(replaces=True)
    for step in range(200_000):
        series.add(step, step, float(step % 1000))
    series.y[100] = 5e9  # behind the groups' back: not looked at
    assert max(series.picture(-math.inf, math.inf, 600)["high"]) == 999.0


def test_every_column_of_a_status_ends_with_the_last_point() -> None:
    curve = {
        "since": at(2), "atS": [0, 20, 40], "step": [0, 40, 80], "samplesPerS": [8000, 8100, 8050],
        "metrics": {"loss": [2.3, 0.9, None], "accuracy": [0.5]},
    }  # fmt: skip
    lost = {"step": 80, "notFinite": {"loss": {"value": "inf", "step": 60, "at": at(30)}}}
    status = ElasticJob.from_manifest(job(curve=curve, progress=lost)).status
    curves = curves_of_status(status)
    loss, accuracy, rate = (curves.series(name, STEP) for name in ("loss", "accuracy", RATE))
    assert loss is not None
    assert accuracy is not None
    assert rate is not None
    assert (list(loss.x), loss.lost) == ([0, 40], [(80, "inf")])
    assert (list(accuracy.x), list(rate.y)) == ([80], [8000, 8100, 8050])
    assert curves_of_status(ElasticJob.from_manifest(job(curve={})).status).names == []


def test_the_table_is_csv() -> None:
    curves = Curves()
    curves.add([{"step": 1, "at": 1.5, 'a "b", c': 0.25}, {"step": 2, "at": 2.5, 'a "b", c': "NaN"}])
    assert list(csv.reader(curves.table())) == [["metric", "step", "at", "value"], ['a "b", c', "1", "1.500", "0.25"]]


def test_over_samples_each_step_is_at_its_samples() -> None:
    curves = Curves()
    curves.add([{"step": 0, "at": 0.0, "loss": 9.0}])  # of a version that did not say so
    curves.add([{"step": step, "at": float(step), "samples": 8 * step, "loss": 1 / step} for step in range(1, 101)])
    curves.add([{"step": 51, "at": 200.0, "samples": 500, "loss": 0.5}])  # repeated by a group twice as large
    curves.add([{"step": 53, "at": 202.0, "samples": 532, "loss": "NaN"}, {"step": 54, "at": 203.0, "loss": 0.25}])
    assert curves.names == ["loss"]
    whole = curves.picture("loss", SAMPLES, -math.inf, math.inf, 600)
    assert whole is not None
    assert whole["x"] == [*(8 * step for step in range(1, 51)), 500, 532, 532]
    assert whole["y"][-3:] == [0.5, None, 0.25]
    assert whole["lost"] == [(532, "NaN")]
    part = curves.picture("loss", SAMPLES, 41, 63, 600)
    assert part is not None
    assert [at for at in part["x"] if 41 <= at <= 63] == [48, 56]
    assert part["other"][part["x"].index(48)] == 6.0
    between = Curves()
    between.add([{"step": 10, "at": 0.0, "samples": 100}, {"step": 15, "at": 1.0, "loss": 1.0}])
    between.add([{"step": 20, "at": 2.0, "samples": 300}])
    assert (between.picture("loss", SAMPLES, 0, 999, 9) or {})["x"] == [200]
    assert (curves_of_status(ElasticJob.from_manifest(job()).status).picture("loss", SAMPLES, 0, 1, 9)) is None


def test_without_samples_there_is_nothing_over_them() -> None:
    curves = Curves()
    curves.add(rows((1, 1.0, 2.0)))
    assert not curves.has_samples
    assert (curves.picture("loss", SAMPLES, 0, 9, 9) or {})["x"] == []
