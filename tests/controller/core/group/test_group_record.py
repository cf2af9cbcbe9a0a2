"""Machines in use: kept small however many workers there are, and shown no more often than it is measured."""

from __future__ import annotations

import json

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.status import JobStatus
from elasticctl.api.usage import MOST_WORKERS, JobUsage, WorkerUsage
from elasticctl_controller.core.group.group_record import SHOW_EVERY_S, UsageReports
from elasticctl_protocol.reports import GpuUsage, StepShares


def of_worker(index: int, percent: float) -> WorkerUsage:
    gpus, times = (
        GpuUsage((99.0,) * 7 + (percent,), *((1e9,) * 8 for _ in range(5))),
        StepShares(0.1234, 0.7, 0.15, 0.02),
    )
    return WorkerUsage(f"big-worker-{index}", Timestamp(1.7e9), 30.5, 96.0, 10**11, 10**12, 1e9, 1e9, gpus, "", times)


def test_of_many_workers_a_status_keeps_the_least_used_in_their_order() -> None:
    usage = JobUsage.of(of_worker(index, 10.0 if index % 50 == 7 else 95.0) for index in range(1000))
    idle = [worker.worker for worker in usage.workers if worker.at_work == 10.0]
    assert (usage.measured, len(usage.workers)) == (1000, MOST_WORKERS)
    assert idle == [f"big-worker-{index}" for index in range(7, 1000, 50)]
    status = JobStatus(usage=usage)
    text = json.dumps(to_json(status))
    assert len(text) < 68_000
    assert from_json(JobStatus, json.loads(text)) == status


def test_each_new_worker_is_shown_immediately_and_then_all_of_them_together() -> None:
    reports, alive = UsageReports(), {"b": "j-worker-1", "a": "j-worker-0"}
    assert reports.of_group(alive) is None
    shown = [reports.add_usage(uid, of_worker(0, 50.0), now) for now, uid in ((0, "a"), (1, "b"), (5, "a"), (9, "b"))]
    assert shown == [True, True, False, False]
    assert reports.add_usage("a", of_worker(0, 20.0), 1 + SHOW_EVERY_S)
    assert [worker.at_work for worker in reports.of_group(alive).workers] == [50.0, 20.0]  # type: ignore[union-attr]
    reports.drop_absent({"b"})
    assert reports.newest.keys() == {"b"}
