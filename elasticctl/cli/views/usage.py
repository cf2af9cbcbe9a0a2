"""Machines in use as tables: the workers of a job, their GPUs one by one, or the jobs. `now` is in seconds since the
epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticctl.api.codec import to_json
from elasticctl.api.observed.step_times import PARTS, mean_times, part_texts, step_times_text
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

_USE = tuple(name.upper() for name in (*USES, *PARTS))
_SPARE = (*(name.upper() for name in ("Network", "Temp", "Power", *reversed(PARTS))), "GPU MEMORY", "GPU", "NOTE")
_NO_TIMES = ("",) * len(PARTS)


def worker_table(job: ElasticJob, now: float, *, each_gpu: bool = False) -> Table:
    """A row for each worker that has been measured; `each_gpu`: one for each of its GPUs."""
    usage = job.status.usage or JobUsage()
    rows = []
    for worker in usage.workers:
        name, gpus = worker.worker.removeprefix(f"{job.name}-"), worker.gpus
        rows.append((name, *uses(worker), *part_texts(worker.step_times), usage_note(job, worker, now)))
        if each_gpu:
            single = (uses(WorkerUsage(gpus=gpu)) for gpu in single_gpus(gpus))
            rows += [(f"  gpu {n}", *words, *_NO_TIMES, "") for n, words in enumerate(single)]
    notes = (unshown_text(usage), _unknown(job))
    return Table(("WORKER", *_USE, "NOTE"), rows, spare=_SPARE, notes=tuple(note for note in notes if note))


def _unknown(job: ElasticJob) -> str:
    """Why the times of the steps' parts are unknown; empty if they are known."""
    usage = job.status.usage
    if usage is None or mean_times(usage.workers).is_known:
        return ""
    return f"Where the time of the steps goes is {step_times_text(job.status)}."


def usage_of_jobs(jobs: Sequence[ElasticJob]) -> Table:
    """A row for each job with the total usage of its workers."""
    rows = []
    for job in jobs:
        usage = job.status.usage or JobUsage()
        note = idle_text(usage, job.name) if usage.measured else "nothing measured yet"
        parts = part_texts(mean_times(usage.workers))
        rows.append((job.name, str(usage.measured), *uses(total_usage(usage)), *parts, note))
    return Table(("NAME", "WORKERS", *_USE, "NOTE"), rows, spare=_SPARE)


def usage_data(jobs: Sequence[ElasticJob]) -> dict[str, Any]:
    """The same as data."""
    return {"jobs": [{"name": job.name, "namespace": job.namespace, **_data(job.status.usage)} for job in jobs]}


def _data(usage: JobUsage | None) -> dict[str, Any]:
    return {"measured": 0, "workers": [], **to_json(usage or JobUsage())}
