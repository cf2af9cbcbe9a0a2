"""Machine usage of a job's workers for the page: as in `top`, with shares of the totals."""

from __future__ import annotations

from typing import Any

from elasticctl.api.observed.usage import (
    PARTS,
    USES,
    fitted,
    idle_gpus,
    part_texts,
    single_gpus,
    step_times_text,
    total_usage,
    unshown_text,
    usage_note,
    usage_text,
    uses,
)
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.usage import UsageHistory, WorkerUsage
from elasticctl_protocol.reports import GpuUsage

MAX_TEXT = 500
MAX_GPUS = 32
"""Of one worker: how many are shown one by one."""
MAX_COLUMNS = 32


def machines_data(job: ElasticJob, now: float) -> dict[str, Any] | None:
    """The workers that have been measured, with each of their GPUs; None before any has been."""
    usage = job.status.usage
    if usage is None or not usage.workers:
        return None
    reasons = dict.fromkeys(each.no_gpus for each in usage.workers if each.no_gpus)
    are_absent = not hardware(job).gpus_per_worker and not any(each.gpus.count for each in usage.workers)
    return {
        "at": total_usage(usage).at,
        "summary": usage_text(usage),
        "uses": (*USES, *PARTS),
        "stepTimes": step_times_text(job.status)[:MAX_TEXT],
        "absent": f"No GPUs: {'; '.join(reasons)}."[:MAX_TEXT] if are_absent and reasons else "",
        "unshown": unshown_text(usage),
        "workers": [
            {
                "name": worker.worker.removeprefix(f"{job.name}-")[:MAX_TEXT],
                **_in_use(worker),
                "note": usage_note(job, worker, now)[:MAX_TEXT],
                "gpus": [_in_use(WorkerUsage(gpus=gpu)) for gpu in single_gpus(worker.gpus)[:MAX_GPUS]],
            }
            for worker in usage.workers
        ],
    }


def usage_history_data(history: UsageHistory) -> dict[str, Any]:
    """The total usage of all workers, and how the time of their steps was spent, by moment."""
    if history.since is None:
        return {"at": [], "columns": {}}
    moments = [history.since + at_s for at_s in history.at_s]
    return {
        "at": moments,
        "columns": {
            name[:MAX_TEXT]: fitted(column, len(moments))
            for name, column in list(history.columns.items())[:MAX_COLUMNS]
        },
    }


def idle_count(job: ElasticJob) -> int:
    """The number of a job's GPUs that have been idle for long."""
    return sum(len(each.numbers) for each in idle_gpus(job.status.usage.workers, job.name)) if job.status.usage else 0


def _in_use(used: WorkerUsage) -> dict[str, Any]:
    """Texts in the order of `USES`, each with the share in use, from 0 to 1; None: unknown."""
    known = [percent for percent in used.gpus.percent if percent is not None]
    parts = [
        _part(used.cpus_used, used.cpus),
        _part(used.memory_bytes, used.memory_total_bytes),
        _part(sum(known), 100.0 * len(known)),
        _fullest(used.gpus),
    ]
    shares = used.step_times.shares
    words = (*uses(used), *part_texts(used.step_times))
    return {"words": words, "parts": [*parts, *(None,) * (len(USES) - len(parts)), *shares]}


def _fullest(gpus: GpuUsage) -> float | None:
    pairs = zip(gpus.memory_bytes, gpus.memory_total_bytes, strict=False)
    return max((part for part in (_part(used, whole) for used, whole in pairs) if part is not None), default=None)


def _part(used: float | None, whole: float | None) -> float | None:
    return round(min(1.0, max(0.0, used / whole)), 3) if used is not None and whole else None
