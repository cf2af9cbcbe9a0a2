"""Machines in use as tables: the workers of a job, their GPUs one by one, or the jobs. `now` is in seconds since the
epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticctl.api.codec import to_json
from elasticctl.api.observed.usage import (
    USES,
    idle_text,
    single_gpus,
    total_usage,
    unshown_text,
    usage_note,
    uses,
)
from elasticctl.api.spec import ElasticJob
from elasticctl.api.usage import JobUsage, WorkerUsage
from elasticctl.cli.framework.output import Table

_USE = tuple(name.upper() for name in USES)
_SPARE = ("NETWORK", "TEMP", "POWER", "GPU MEMORY", "GPU", "NOTE")


def worker_table(job: ElasticJob, now: float, *, each_gpu: bool = False) -> Table:
    """A row for each worker that has been measured; `each_gpu`: one for each of its GPUs."""
    usage = job.status.usage or JobUsage()
    rows = []
    for worker in usage.workers:
        name, gpus = worker.worker.removeprefix(f"{job.name}-"), worker.gpus
        rows.append((name, *uses(worker), usage_note(job, worker, now)))
        if each_gpu:
            rows += [(f"  gpu {n}", *uses(WorkerUsage(gpus=gpu)), "") for n, gpu in enumerate(single_gpus(gpus))]
    unshown = unshown_text(usage)
    return Table(("WORKER", *_USE, "NOTE"), rows, spare=_SPARE, notes=(unshown,) if unshown else ())


def usage_of_jobs(jobs: Sequence[ElasticJob]) -> Table:
    """A row for each job: what its workers use together."""
    rows = []
    for job in jobs:
        usage = job.status.usage or JobUsage()
        note = idle_text(usage, job.name) if usage.measured else "nothing measured yet"
        rows.append((job.name, str(usage.measured), *uses(total_usage(usage)), note))
    return Table(("NAME", "WORKERS", *_USE, "NOTE"), rows, spare=_SPARE)


def usage_data(jobs: Sequence[ElasticJob]) -> dict[str, Any]:
    """The same as data."""
    return {"jobs": [{"name": job.name, "namespace": job.namespace, **_data(job.status.usage)} for job in jobs]}


def _data(usage: JobUsage | None) -> dict[str, Any]:
    return {"measured": 0, "workers": [], **to_json(usage or JobUsage())}
