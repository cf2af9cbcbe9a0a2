"""The metrics page: Prometheus' format, and numbers that are true."""

from __future__ import annotations

import re

from elasticctl_controller.kube.metrics import Metrics, jobs_by_phase, workers_by_state
from elasticctl_controller.kube.prometheus import Counter, Gauge, Histogram, render

LINE = re.compile(r'[a-z_]+(\{[a-z_]+="[^"\n]*"(,[a-z_]+="[^"\n]*")*\})? -?[0-9.e+-]+')


def test_every_line_is_a_comment_or_a_sample() -> None:
    metrics = Metrics()
    metrics.note_pass(0.02, "ok")
    metrics.note_pass(7.0, "conflict")
    metrics.note_request("GET", "ok")
    metrics.note_replaced(0.4)
    metrics.watch(lambda: [{"status": {"phase": "Running", "desired": 3, "active": 2}}, {}], lambda: 4, lambda: True)
    lines = metrics.page().splitlines()
    assert all(line.startswith("# ") or LINE.fullmatch(line) for line in lines)
    for line in (
        'elasticctl_reconcile_seconds_bucket{le="0.05"} 1',
        'elasticctl_reconcile_seconds_bucket{le="+Inf"} 2',
        "elasticctl_reconcile_seconds_sum 7.02",
        'elasticctl_reconcile_errors_total{kind="conflict"} 1',
        'elasticctl_api_requests_total{verb="GET",outcome="ok"} 1',
        "elasticctl_replacement_seconds_count 1",
        'elasticctl_jobs{phase="Running"} 1',
        'elasticctl_jobs{phase="Pending"} 1',
        'elasticctl_workers{state="active"} 2',
        "elasticctl_workqueue_depth 4",
        "elasticctl_leader 1",
    ):
        assert line in lines
    assert len([line for line in lines if line.startswith("# TYPE")]) == len(
        {line.split()[2] for line in lines if line.startswith("# HELP")}
    )


def test_buckets_are_cumulative_and_bounds_belong_to_theirs() -> None:
    histogram = Histogram("h", "help", (1.0, 2.0))
    for value in (1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.samples()) == [
        'h_bucket{le="1"} 1',
        'h_bucket{le="2"} 2',
        'h_bucket{le="+Inf"} 3',
        "h_sum 11.5",
        "h_count 3",
    ]


def test_labels_are_escaped() -> None:
    counter = Counter("c", "help", "what")
    counter.add('a"b\\c\nd')
    assert list(counter.samples()) == ['c{what="a\\"b\\\\c\\nd"} 1']
    assert render((Counter("z", "help"), Gauge("g", "help", "", lambda: {"": 0.5}))).splitlines()[-1] == "g 0.5"


def test_jobs_of_any_content_are_counted() -> None:
    jobs = [{}, {"status": "text"}, {"status": {"phase": "Failed", "desired": 5}}, {"status": {"phase": "Mystery"}}]
    assert jobs_by_phase(jobs)["Pending"] == 2
    assert workers_by_state(jobs) == {"desired": 0, "active": 0}
