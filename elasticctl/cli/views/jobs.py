"""Many jobs on the terminal, as rows. `now` is in seconds since the epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ForbiddenError
from elasticctl.api.observed.cost import cost
from elasticctl.api.observed.history import (
    activity_text,
    makes_steps,
    not_finite_text,
    rate_text,
    remaining_s,
    unplanned_ends,
)
from elasticctl.api.observed.workers import count_workers
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import ConditionType, JobStatus, Phase
from elasticctl.api.text import dollars, part_of, span
from elasticctl.cli.framework.output import Table, joined
from elasticctl.cli.views.history import causes
from elasticctl.cli.views.job import ago, borrowed, capacity_text, reason, waiting_text
from elasticctl.operations.selection import JobFilter
from elasticctl.operations.target import Target, phase_of

_HEADER = (
    "NAME", "PHASE", "WORKERS", "GPUS", "CAPACITY", "STEP", "EPOCH", "RATE", "ETA", "CHECKPOINT", "RESTARTS", "COST",
    "AGE",
)  # fmt: skip
_WIDE = ("ON-DEMAND", "CAUSES", "STORAGE")
_SPARE = (
    "STORAGE", "CAUSES", "ON-DEMAND", "CAPACITY", "EPOCH", "GPUS", "RATE", "AGE", "COST", "REASON", "RESTARTS", "ETA",
    "CHECKPOINT", "STEP",
)  # fmt: skip
_WAITING = ("Pending", "Restarting")
_LOOKED_AT = 5
"""Of how many waiting jobs the pods are asked for."""


@dataclass(frozen=True, slots=True)
class ListColumns:
    """The selected columns."""

    wide: bool = False
    namespaces: bool = False

    @property
    def header(self) -> tuple[str, ...]:
        """The titles of the columns."""
        return (*(("NAMESPACE",) if self.namespaces else ()), *_HEADER, *(_WIDE if self.wide else ()), "REASON")


def job_table(
    manifests: Sequence[Manifest],
    now: float,
    shape: ListColumns = ListColumns(),
    reasons: Mapping[str, str] | None = None,
) -> Table:
    """One row per job. `reasons`: UID -> why it waits, for jobs where more is known than in their status."""
    rows = [_row(manifest, now, shape, reasons or {}) for manifest in manifests]
    return Table(shape.header, rows, spare=_SPARE, kept="REASON")


def why_ended(job: ElasticJob) -> str:
    """The controller's reason for a job that waits or has failed; "" in other phases."""
    status = job.status
    if status.phase in (Phase.SUCCEEDED, Phase.RUNNING, Phase.CANCELLED):
        return ""
    wait = status.condition(ConditionType.WORKERS_WAITING)
    if wait is not None and wait.status == "True" and not status.phase.terminal:
        return f"{wait.reason}: {wait.message}"
    return ": ".join(part for part in (status.reason, status.message) if part)


def _row(manifest: Manifest, now: float, shape: ListColumns, reasons: Mapping[str, str]) -> tuple[str, ...]:
    job = ElasticJob.from_manifest(manifest)
    status, progress, found = job.status, job.status.progress, hardware(job)
    spent, left = cost(job, now), remaining_s(status) if makes_steps(status, now) else None
    cells = (
        job.name,
        status.phase.value,
        f"{count_workers(status).running}/{job.desired} ({job.bounds})",
        str(found.gpus_per_worker * job.desired) if found.gpus_per_worker else "",
        capacity_text(job),
        part_of(progress.step, progress.total_steps),
        part_of(progress.epoch, progress.total_epochs),
        rate_text(status, now),
        "" if left is None else span(left),
        "" if status.checkpoint.step is None else f"{status.checkpoint.step}{ago(status.checkpoint.at, now, status)}",
        str(sum(unplanned_ends(status).values())),
        "" if spent is None else dollars(spent.spent),
        "" if job.created_at is None else span(now - job.created_at),
    )
    wide = ("" if spent is None else dollars(spent.on_demand), causes(status), found.storage) if shape.wide else ()
    return (
        *((job.namespace,) if shape.namespaces else ()),
        *cells,
        *wide,
        reasons.get(job.uid, "") or why_ended(job) or joined(_on_the_way(job, now)),
    )


def _on_the_way(job: ElasticJob, now: float) -> tuple[str, ...]:
    """What the group does instead of making steps, what is wrong, and what more workers wait for."""
    status, waiting = job.status, waiting_text(job)
    waits = f"waiting: {waiting}" if waiting else ""
    return _not_training_yet(status, now), not_finite_text(status), borrowed(status), waits


def _not_training_yet(status: JobStatus, now: float) -> str:
    """What the group does instead of making steps."""
    doing = status.activity.doing if status.activity is not None else ""
    return "" if doing in ("training", "running") else activity_text(status, now)


def waiting_reasons(target: Target, jobs: list[Manifest], now: float) -> dict[str, str]:
    """UID -> why a job waits, for the first few that do, as far as this user may list their pods."""
    waiting = [job for job in jobs if phase_of(job) in _WAITING][:_LOOKED_AT]
    if not waiting:
        return {}
    found = [ElasticJob.from_manifest(manifest) for manifest in waiting]
    try:
        pods = target.cluster.pods_of(found)
    except ForbiddenError:
        return {}
    return {job.uid: reason(job, pods[job.uid], now) for job in found}


def no_jobs_line(target: Target, namespace: str | None, chosen: JobFilter) -> str:
    """The message if there are no jobs, or none match."""
    place = "in any namespace" if namespace is None else f"in namespace {namespace}"
    if chosen != JobFilter():
        return f"no matching jobs {place} of context {target.context.name}. Next: list all jobs: elasticctl list"
    return f"no jobs {place} of context {target.context.name}. Next: elasticctl submit train.py"


def next_of_list(jobs: list[Manifest]) -> str:
    """What to type next about a job that waits, or else about the newest."""
    waiting = [job for job in jobs if phase_of(job) in _WAITING]
    if waiting:
        return f"Next: find out why one is waiting: elasticctl explain {waiting[-1]['metadata']['name']}"
    return f"Next: details: elasticctl status {jobs[-1]['metadata']['name']}"
