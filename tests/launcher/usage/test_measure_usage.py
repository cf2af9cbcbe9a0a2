"""What launchers measure comes to the service with their reports, of each worker that lives."""

from __future__ import annotations

from tests.support.launcher_lab import JOB_UID, KEY, Lab
from tests.support.waiting import wait_until


def test_each_worker_says_what_it_uses(pair: Lab) -> None:
    def measured() -> int:
        usage = pair.site.service.view(KEY, JOB_UID).usage
        return usage.measured if usage is not None else 0

    wait_until(lambda: measured() == 2)
    usage = pair.site.service.view(KEY, JOB_UID).usage
    assert usage is not None
    assert {worker.worker for worker in usage.workers} == {"a-0", "a-1"}
    for worker in usage.workers:
        assert (worker.memory_bytes or 0) > 10_000_000  # a launcher and a rank, both Python
        assert worker.cpus_used is not None
        assert worker.received_bytes_per_s is None  # the service is reached by a socket of this machine
        assert worker.no_gpus or worker.gpus.count
