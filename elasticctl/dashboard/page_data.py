"""The JSON for the page: a row of the job list, the details of one job, and the projects of a shared cluster.

Moments are seconds since the epoch, durations seconds, money US dollars; unknown values are None or left out. Texts
come from the job's author: they are truncated here, and the page never interprets them as markup.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

from elasticctl.api.codec import Manifest, to_json
from elasticctl.api.goal import SPOT, zone_of
from elasticctl.api.observed.cost import Rate, cost, rate_of
from elasticctl.api.observed.history import (
    STEADY,
    activity_words,
    current_activity,
    first_step_took_s,
    goodput,
    not_finite_text,
    samples_per_s,
    steps_per_s,
    unplanned_ends,
)
from elasticctl.api.observed.plan_text import outlook_text
from elasticctl.api.observed.timeline import TimelineEntry, timeline
from elasticctl.api.observed.workers import count_workers, known_workers, rank_count
from elasticctl.api.podtemplate import capacity, hardware
from elasticctl.api.quota import JobSlots, PoolUsage, ProjectUsage, usage_by_pool, usage_by_project
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Curve, Interruption, JobStatus, Phase, Scaling, WorkerStatus
from elasticctl.dashboard.machines import idle_count, machines_data, usage_history_data
from elasticctl.diagnosis import Case, Finding, Severity, diagnose

Row = dict[str, Any]
"""A job in a few fields, as JSON; `uid` identifies it."""

Steps = list[tuple[float, int]]
"""(moment in seconds since the epoch, how many from then on), oldest first."""


def training_steps(job: ElasticJob) -> Steps:
    """The number of workers in the group over time: 0 from its stop until the next one has formed.

    A status lists only the latest groups; what was before them is unknown.
    """
    status = job.status
    steps: Steps = []
    for group, following in zip_longest(status.generations, status.generations[1:]):
        if group.formed_at is None:
            continue
        steps.append((float(group.formed_at), len(group.workers)))
        if following is not None and following.opened_at is not None:
            steps.append((max(float(following.opened_at), float(group.formed_at)), 0))
    stopped_at = _stopped_at(status)
    if steps and stopped_at is not None:
        steps.append((max(stopped_at, steps[-1][0]), 0))
    return steps


def wanted_steps(job: ElasticJob, now: float) -> Steps:
    """The wanted number of workers over time, as far back as the status knows, up to the end or now."""
    scalings = [item for item in job.status.scalings if item.at is not None]
    if job.created_at is None:
        return []
    steps = [(float(job.created_at), scalings[0].from_workers if scalings else job.desired)]
    steps += [(float(item.at), item.to_workers) for item in scalings if item.at is not None]
    end = job.status.completion_time if job.status.completion_time is not None else now
    return [*steps, (max(float(end), steps[-1][0]), steps[-1][1])]


def _stopped_at(status: JobStatus) -> float | None:
    """When the job was suspended or ended; None while it runs."""
    if status.phase.terminal:
        return status.completion_time
    if status.phase is not Phase.SUSPENDED:
        return None
    moments = [item.last_transition_time for item in status.conditions if item.type == "Suspended"]
    return next((moment for moment in moments if moment is not None), None)


Projects = dict[str, Any]
"""What `projects_data` returns; it has no pools if nothing is shared."""

MAX_TEXT = 500
MAX_FINDING = 2_000
"""Of a sentence of ours, whose quotations are shortened already."""
MAX_ROWS = 200
MAX_JOBS = 100


def projects_data(
    quotas: Iterable[Manifest], held: Sequence[JobSlots], notes: Sequence[str], *, all_seen: bool
) -> Projects:
    """Each pool with its projects, and the jobs; `notes` list what is missing; `all_seen`: no job is."""
    rows = usage_by_project(quotas, held)
    pools = usage_by_pool(rows, held, all_seen=all_seen)
    return {
        "pools": [_pool(stock, [row for row in rows if row.pool == stock.pool]) for stock in pools],
        "waiting": _jobs([item for item in held if not item.workers]),
        "running": _jobs([item for item in held if item.workers]),
        "notes": [note[:MAX_TEXT] for note in notes],
    }


def _pool(stock: PoolUsage, rows: Sequence[ProjectUsage]) -> dict[str, Any]:
    """One pool; `scale` is the number of slots that fill the width of its bars."""
    scale = max((row.held + row.unused for row in rows), default=0)
    if stock.slots is not None:  # a limit beyond the size of the pool limits nothing
        scale = max([scale, *(row.limit for row in rows if row.limit is not None and row.limit <= stock.slots)])
    shown = [to_json(row) for row in rows[:MAX_ROWS]]
    return {**to_json(stock), "scale": scale, "projects": shown, "more": len(rows) - len(shown)}


def _jobs(held: Sequence[JobSlots]) -> dict[str, Any]:
    shown = [{**to_json(item), **_texts(item)} for item in held[:MAX_JOBS]]
    return {"jobs": shown, "more": len(held) - len(shown)}


def _texts(item: JobSlots) -> dict[str, str]:
    """Untrusted texts, truncated."""
    return {"message": item.message[:MAX_TEXT], "change": item.change[:MAX_TEXT], "reason": item.reason[:MAX_TEXT]}


MAX_WORKERS = 200
MAX_ENTRIES = 100
MAX_RANKS = 512


def job_row(job: ElasticJob, now: float) -> Row:
    """A job in the list. It changes when the job does, its cost by a cent or its goodput by 1 %."""
    status, progress, spent = job.status, job.status.progress, cost(job, now)
    headcount, part = count_workers(status), goodput(status, now)
    return {
        "uid": job.uid,
        "namespace": job.namespace,
        "name": job.name,
        "phase": status.phase.value,
        "suspending": job.suspend and status.phase is not Phase.SUSPENDED and not status.phase.terminal,
        "cancelling": job.cancel and not status.phase.terminal,
        "active": headcount.running,
        "placed": headcount.placed,
        "training": headcount.training,
        "desired": job.desired,
        "min": job.min,
        "max": job.max if job.bounded else None,
        "borrowed": status.share.borrowed if status.share else 0,
        "gpusPerWorker": hardware(job).gpus_per_worker,
        "step": progress.step,
        "totalSteps": progress.total_steps,
        "epoch": progress.epoch,
        "totalEpochs": progress.total_epochs,
        "stepsPerS": None if status.phase.terminal else steps_per_s(status),
        "samplesPerS": samples_per_s(status),
        "createdAt": job.created_at,
        "startedAt": status.start_time,
        "endedAt": status.completion_time,
        "interruptions": sum(unplanned_ends(status).values()),
        "doing": _doing(status),
        "notFinite": not_finite_text(status)[:MAX_TEXT],
        "idleGpus": idle_count(job),
        "reason": _reason(status)[:MAX_TEXT],
        "costUsd": round(spent.spent, 2) if spent else None,
        **({"pricesOf": _prices_of(spent.rate)} if spent else {}),
        **({"user": job.user[:MAX_TEXT]} if job.user else {}),
        **({"goodput": round(part.share, 2)} if part else {}),
    }


def job_details(job: ElasticJob, pods: Sequence[Manifest], now: float) -> dict[str, Any]:
    """Everything that the page shows about one job."""
    status, found = job.status, hardware(job)
    return {
        "job": job_row(job, now),
        "now": now,
        "findings": [_finding(finding) for finding in diagnose(Case(job, tuple(pods), now)) if _is_news(finding)],
        "curve": _curve(status.curve),
        "training": training_steps(job),
        "wanted": wanted_steps(job, now),
        "interruptions": [_interruption(item) for item in status.interruptions],
        "scalings": [_scaling(item) for item in status.scalings],
        "checkpoint": _checkpoint(status),
        "machines": machines_data(job, now),
        "machinesHistory": usage_history_data(status.usage_history),
        "goodput": _goodput(status, now),
        "plan": _plan(job, now),
        "cost": _cost(job, now),
        "stepsRedone": status.steps_redone,
        "restarts": unplanned_ends(status),
        "metrics": {name[:MAX_TEXT]: value for name, value in status.progress.metrics.items()},
        "notFinite": {
            name[:MAX_TEXT]: {"value": item.value[:MAX_TEXT], "step": item.step, "at": item.at}
            for name, item in status.progress.not_finite.items()
        },
        "workers": [_worker(item) for item in status.workers[:MAX_WORKERS]],
        "workersInAll": len(status.workers),
        "workersEver": known_workers(job)[:MAX_WORKERS],
        "ranks": min(rank_count(job), MAX_RANKS),
        "timeline": [_entry(entry) for entry in timeline(job)[-MAX_ENTRIES:]],
        "runs": {
            "command": " ".join(found.command)[:MAX_TEXT],
            "image": found.image[:MAX_TEXT],
            "storage": found.storage[:MAX_TEXT],
            "spot": capacity(job.template) == SPOT,
        },
    }


def _doing(status: JobStatus) -> dict[str, Any] | None:
    """What the group is doing, since when, and how long its first step took last time; the page counts the seconds."""
    doing = current_activity(status)
    if doing is None:
        return None
    words, last_s = activity_words(doing)[:MAX_TEXT], first_step_took_s(status, doing)
    return {"words": words, "since": doing.since, "lastS": last_s, "steady": doing.doing in STEADY}


def _reason(status: JobStatus) -> str:
    """Why it does not train, according to the controller."""
    if status.phase in (Phase.RUNNING, Phase.SUCCEEDED, Phase.SUSPENDED):
        return ""
    error = status.newest_failure.error if status.phase is Phase.FAILED and status.newest_failure else ""
    return error if error and error in status.message else status.message or status.reason


def _is_news(finding: Finding) -> bool:
    """True if it says more than the rest of the page, which shows progress and interruptions."""
    return finding.decisive or finding.severity is not Severity.INFO


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "severity": finding.severity.value,
        "text": finding.text[:MAX_FINDING],
        "details": [line[:MAX_TEXT] for line in finding.details],
        "mends": [{"advice": mend.advice, "command": mend.command} for mend in finding.mends],
        "decisive": finding.decisive,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    """The curve with moments instead of seconds since the start; columns that began later are shorter, as stored."""
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
        "stayed": not item.uid,
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


def _plan(job: ElasticJob, now: float) -> dict[str, Any] | None:
    goal, plan = job.goal, job.status.plan
    if goal is None or plan is None:
        return None
    words = outlook_text(job, now)
    return {
        "words": words[:1].upper() + words[1:MAX_FINDING],
        "why": plan.message[:MAX_TEXT],
        "finishBy": goal.finish_by,
        "budget": goal.budget,
        "finishAt": plan.finish_at,
        "spreadS": plan.spread_s,
        "onDemandAt": plan.on_demand_at,
        "steps": [
            {
                "at": s.at,
                "spot": s.spot,
                "onDemand": s.on_demand,
                "zone": zone_of(s.pool)[:MAX_TEXT],
                "why": s.message[:MAX_TEXT],
            }
            for s in plan.steps
        ],
    }


def _cost(job: ElasticJob, now: float) -> dict[str, Any] | None:
    spent, one = cost(job, now), rate_of(job)
    if spent is None or one is None:
        return None
    each = one.spot(one.low) if capacity(job.template) == SPOT else one.low
    return {
        "spentUsd": spent.spent,
        "onDemandUsd": spent.on_demand,
        "perHourUsd": 0.0 if job.status.phase.terminal else each * count_workers(job.status).placed,
        "instance": one.instances[0],
        "pricesOf": _prices_of(one),
    }


def _prices_of(one: Rate) -> str:
    """The source and date of the prices; a job's goal may have its own."""
    dated = f", {one.prices.date}" if one.prices.date else ""
    return (
        f"list prices of {one.prices.region}{dated}" if one.prices.region else f"{one.instances[0]}{dated}"[:MAX_TEXT]
    )


def _worker(item: WorkerStatus) -> dict[str, Any]:
    return {
        "name": item.name,
        "phase": item.removal or item.phase,
        "node": item.node,
        "startedAt": item.started_at,
        "cause": item.cause.value if item.cause else "",
        "endedAt": item.ended_at,
    }


def _entry(entry: TimelineEntry) -> dict[str, Any]:
    return {"at": entry.at, "what": entry.what, "about": entry.about, "details": entry.details[:MAX_TEXT]}
