"""Machines in use over time: bounded, spread evenly in time, and unchanged by what it knows already."""

from __future__ import annotations

import json
from dataclasses import replace

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.observed.history import MAX_POINTS
from elasticctl.api.observed.usage import add_usage, fitted
from elasticctl.api.usage import JobUsage, UsageHistory, WorkerUsage
from elasticctl_protocol.reports import GpuUsage, StepShares

AT = 1_700_000_000.0


def measured(at_s: float, *, cpus: float | None = 1.5, **more: object) -> JobUsage:
    """Two workers alike."""
    worker = WorkerUsage("j-worker-0", Timestamp(AT + at_s), cpus, 4.0, 2**30)
    worker = replace(worker, **more)  # type: ignore[arg-type]
    return JobUsage.of([worker, replace(worker, worker="j-worker-1")])


def test_usage_of_all_workers_and_since_when_it_is_known() -> None:
    history = add_usage(UsageHistory(), measured(0))
    gpus = GpuUsage((90.0, 50.0), (2.0, 2.0), (4.0, 4.0), (100.0, None), (), (0.0, 0.0))
    history = add_usage(history, measured(10.04, cpus=None, gpus=gpus, step_times=StepShares(0.1, 0.9)))
    assert history == UsageHistory(
        Timestamp(AT),
        (0.0, 10.0),
        {
            "cpusUsed": (3.0, None),
            "memoryBytes": (2147500000.0, 2147500000.0),
            "gpuPercent": (None, 70.0),
            "gpuMemoryBytes": (None, 8.0),
            "powerW": (None, 200.0),
            "data": (None, 0.1),
            "compute": (None, 0.9),
        },
    )
    assert from_json(UsageHistory, json.loads(json.dumps(to_json(history)))) == history


def test_old_values_change_nothing() -> None:
    history = add_usage(UsageHistory(), measured(10))
    assert add_usage(history, measured(10)) is history
    assert add_usage(history, measured(5)) is history
    assert add_usage(history, None) is history
    assert add_usage(history, JobUsage()) is history


def test_a_long_job_keeps_about_a_hundred_evenly_spread_moments() -> None:
    history = UsageHistory()
    for at_s in range(0, 20_000, 10):
        history = add_usage(history, measured(at_s, received_bytes_per_s=1.5e9, sent_bytes_per_s=1.5e9))
    assert len(history.at_s) == MAX_POINTS
    assert (history.at_s[0], history.at_s[-1]) == (0.0, 19_990.0)
    assert max(later - at for at, later in zip(history.at_s, history.at_s[1:], strict=False)) <= 4 * 20_000 / MAX_POINTS
    assert {len(column) for column in history.columns.values()} == {MAX_POINTS}
    assert len(json.dumps(to_json(history))) < 12_000


def test_a_column_of_another_length_is_made_to_fit() -> None:
    assert fitted((1.0,), 3) == (None, None, 1.0)
    assert fitted((1.0, 2.0, 3.0), 2) == (2.0, 3.0)
    assert fitted((), 2) == (None, None)
    odd = UsageHistory(Timestamp(AT), (0.0, 1.0), {"cpusUsed": (1.0,) * 9})
    assert add_usage(odd, measured(60)).columns["cpusUsed"] == (1.0, 1.0, 3.0)
