"""What the page is told of a job, as JSON: a row of the list, and everything about one. Pure.

Moments are seconds since the epoch, durations seconds, money US dollars; what is not known is None or left out. Texts
come from whoever wrote the job: they are cut to a length here, and never taken for markup by the page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticctl.codec import Manifest
from elasticctl.cost import cost, rate_of
from elasticctl.curve import Curve
from elasticctl.dashboard.board import Row
from elasticctl.dashboard.course import training, wanted
from elasticctl.diagnosis import Case, Finding, Severity, diagnose
from elasticctl.goodput import goodput
from elasticctl.pace import steps_per_s
from elasticctl.podtemplate import SPOT, capacity, hardware
from elasticctl.spec import ElasticJob
from elasticctl.status import Cause, Interruption, JobStatus, Phase, Scaling, WorkerStatus
from elasticctl.timeline import Entry, timeline

MAX_TEXT = 500
MAX_WORKERS = 200
MAX_ENTRIES = 100

_PLANNED = (Cause.SCALED_IN, Cause.COMPLETED)


def row(job: ElasticJob, now: float) -> Row:
    """A job in the list. It changes when the job does, or its cost by a cent; not by growing older."""
    status, progress, spent = job.status, job.status.progress, cost(job, now)
    return {
        "uid": job.uid,
        "namespace": job.namespace,
        "name": job.name,
        "phase": status.phase.value,
        "suspending": job.suspend and status.phase is not Phase.SUSPENDED and not status.phase.terminal,
        "cancelling": job.cancel and not status.phase.terminal,
        "active": status.active,
        "desired": job.desired,
        "min": job.min,
        "max": job.max,
        "borrowed": status.share.borrowed if status.share else 0,
        "gpusPerWorker": hardware(job).gpus_per_worker,
        "step": progress.step,
        "totalSteps": progress.total_steps,
        "epoch": progress.epoch,
        "totalEpochs": progress.total_epochs,
        "stepsPerS": None if status.phase.terminal else steps_per_s(status),
        "samplesPerS": progress.samples_per_s,
        "createdAt": job.created_at,
        "startedAt": status.start_time,
        "endedAt": status.completion_time,
        "interruptions": _interrupted(status),
        "reason": _reason(status)[:MAX_TEXT],
        "costUsd": round(spent.spent, 2) if spent else None,
    }


def details(job: ElasticJob, pods: Sequence[Manifest], now: float) -> dict[str, Any]:
    """Everything that the page shows of one job."""
    status, found = job.status, hardware(job)
    return {
        "job": row(job, now),
        "now": now,
        "findings": [_finding(finding) for finding in diagnose(Case(job, tuple(pods), now)) if _is_news(finding)],
        "curve": _curve(status.curve),
        "training": training(job),
        "wanted": wanted(job, now),
        "interruptions": [_interruption(item) for item in status.interruptions],
        "scalings": [_scaling(item) for item in status.scalings],
        "checkpoint": _checkpoint(status),
        "goodput": _goodput(status, now),
        "cost": _cost(job, now),
        "stepsRedone": status.steps_redone,
        "restarts": {cause: count for cause, count in status.restarts.items() if count and cause not in _PLANNED},
        "metrics": {name[:MAX_TEXT]: value for name, value in status.progress.metrics.items()},
        "workers": [_worker(item) for item in status.workers[:MAX_WORKERS]],
        "workersInAll": len(status.workers),
        "timeline": [_entry(entry) for entry in timeline(job)[-MAX_ENTRIES:]],
        "runs": {
            "command": " ".join(found.command)[:MAX_TEXT],
            "image": found.image[:MAX_TEXT],
            "storage": found.storage[:MAX_TEXT],
            "spot": capacity(job.template) == SPOT,
        },
    }


def _interrupted(status: JobStatus) -> int:
    return sum(count for cause, count in status.restarts.items() if cause not in _PLANNED)


def _reason(status: JobStatus) -> str:
    """Why it does not train, in the controller's words."""
    if status.phase in (Phase.RUNNING, Phase.SUCCEEDED, Phase.SUSPENDED):
        return ""
    return status.message or status.reason


def _is_news(finding: Finding) -> bool:
    """Does it say more than the page shows anyway? That a job trains, how far it is and what disturbed it does not."""
    return finding.decisive or finding.severity is not Severity.INFO


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity.value,
        "text": finding.text[:MAX_TEXT],
        "details": [line[:MAX_TEXT] for line in finding.details],
        "mends": [{"advice": mend.advice, "command": mend.command} for mend in finding.mends],
        "decisive": finding.decisive,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    """With moments instead of seconds since the beginning; columns that began later are shorter, as they are stored."""
    if curve.since is None:
        return {"at": [], "step": [], "samplesPerS": [], "metrics": {}}
    columns: Mapping[str, Any] = {name[:MAX_TEXT]: list(values) for name, values in curve.metrics.items()}
    moments = [curve.since + at_s for at_s in curve.at_s]
    return {"at": moments, "step": list(curve.step), "samplesPerS": list(curve.samples_per_s), "metrics": columns}


def _interruption(item: Interruption) -> dict[str, Any]:
    return {
        "at": item.at,
        "worker": item.worker,
        "cause": item.cause.value if item.cause else "",
        "message": item.message[:MAX_TEXT],
        "recoveryS": item.recovery_s,
        "stepsRedone": item.steps_redone,
    }


def _scaling(item: Scaling) -> dict[str, Any]:
    return {
        "at": item.at,
        "from": item.from_workers,
        "to": item.to_workers,
        "by": item.by[:MAX_TEXT],
        "recoveryS": item.recovery_s,
        "stepsRedone": item.steps_redone,
    }


def _checkpoint(status: JobStatus) -> dict[str, Any]:
    item = status.checkpoint
    return {"step": item.step, "at": item.at, "committed": item.committed, "sizeBytes": item.size_bytes}


def _goodput(status: JobStatus, now: float) -> dict[str, Any] | None:
    part = goodput(status, now)
    return None if part is None else {"share": part.share, "wallS": part.wall_s, "whole": part.whole}


def _cost(job: ElasticJob, now: float) -> dict[str, Any] | None:
    spent, one = cost(job, now), rate_of(job)
    if spent is None or one is None:
        return None
    each = one.spot(one.low) if capacity(job.template) == SPOT else one.low
    return {
        "spentUsd": spent.spent,
        "onDemandUsd": spent.on_demand,
        "perHourUsd": 0.0 if job.status.phase.terminal else each * job.status.active,
        "instance": one.instances[0],
        "pricesOf": f"{one.prices.region}, {one.prices.date}",
    }


def _worker(item: WorkerStatus) -> dict[str, Any]:
    return {
        "name": item.name,
        "phase": item.removal or item.phase,
        "node": item.node,
        "startedAt": item.started_at,
        "cause": item.cause.value if item.cause else "",
        "endedAt": item.ended_at,
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {"at": entry.at, "what": entry.what, "about": entry.about, "details": entry.details[:MAX_TEXT]}
