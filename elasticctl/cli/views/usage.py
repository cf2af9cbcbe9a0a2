"""Machines in use as tables: the workers of a job, their GPUs one by one, or the jobs. `now` is in seconds since the
epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from elasticctl.api.codec import to_json
from elasticctl.api.observed.usage import (
    STALE_S,
    cpu_text,
    gpu_memory_text,
    gpu_text,
    idle_gpus,
    idle_text,
    memory_text,
    network_text,
    power_text,
    temperature_text,
    total_usage,
)
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural, span
from elasticctl.api.usage import GpuUsage, JobUsage, WorkerUsage
from elasticctl.cli.framework.output import Table

_USE = ("CPU", "MEMORY", "GPU", "GPU MEMORY", "POWER", "TEMP", "NETWORK")
_SPARE = ("NETWORK", "TEMP", "POWER", "GPU MEMORY", "GPU", "NOTE")


def _use(used: WorkerUsage) -> tuple[str, ...]:
    gpus = used.gpus
    on_gpus = (gpu_text(gpus), gpu_memory_text(gpus), power_text(gpus), temperature_text(gpus))
    return cpu_text(used), memory_text(used), *on_gpus, network_text(used)


def worker_table(job: ElasticJob, now: float, *, each_gpu: bool = False) -> Table:
    """A row for each worker that has been measured; `each_gpu`: one for each of its GPUs."""
    usage = job.status.usage or JobUsage()
    rows = []
    for worker in usage.workers:
        name, gpus = worker.worker.removeprefix(f"{job.name}-"), worker.gpus
        rows.append((name, *_use(worker), _note(job, worker, now)))
        if each_gpu:
            parts = (_gpu(gpus, number) for number in range(gpus.count))
            rows += [(f"  gpu {number}", *_use(WorkerUsage(gpus=part)), "") for number, part in enumerate(parts)]
    more = usage.measured - len(usage.workers)
    notes = (f"{plural(more, 'worker')} that use their machines more are not shown",) if more else ()
    return Table(("WORKER", *_USE, "NOTE"), rows, spare=_SPARE, notes=notes)


def _gpu(gpus: GpuUsage, number: int) -> GpuUsage:
    """One of the GPUs."""
    end = number + 1
    return GpuUsage(
        gpus.percent[number:end],
        gpus.memory_bytes[number:end],
        gpus.memory_total_bytes[number:end],
        gpus.power_w[number:end],
        gpus.temperature_c[number:end],
        gpus.idle_s[number:end],
    )


def _note(job: ElasticJob, worker: WorkerUsage, now: float) -> str:
    """What to know about a row: GPUs that do nothing, or are not there, and values of long ago."""
    idle = "; ".join(each.text.replace(f" of {each.worker}", "") for each in idle_gpus([worker], job.name))
    absent = worker.no_gpus if hardware(job).gpus_per_worker else ""
    old_s = 0.0 if worker.at is None else now - worker.at
    old = f"measured {span(old_s)} ago" if old_s > STALE_S else ""
    return "; ".join(part for part in (idle, absent, old) if part)


def usage_of_jobs(jobs: Sequence[ElasticJob]) -> Table:
    """A row for each job: what its workers use together."""
    rows = []
    for job in jobs:
        usage = job.status.usage or JobUsage()
        note = idle_text(usage, job.name) if usage.measured else "nothing measured yet"
        rows.append((job.name, str(usage.measured), *_use(total_usage(usage)), note))
    return Table(("NAME", "WORKERS", *_USE, "NOTE"), rows, spare=_SPARE)


def usage_data(jobs: Sequence[ElasticJob]) -> dict[str, Any]:
    """The same as data."""
    return {"jobs": [{"name": job.name, "namespace": job.namespace, **_data(job.status.usage)} for job in jobs]}


def _data(usage: JobUsage | None) -> dict[str, Any]:
    return {"measured": 0, "workers": [], **to_json(usage or JobUsage())}
