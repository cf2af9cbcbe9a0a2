"""Jobs as rows of a table, why some of them wait, and what to type next. `now` is in seconds since the epoch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticctl.api.codec import Manifest
from elasticctl.api.cost import cost
from elasticctl.api.history import remaining_s
from elasticctl.api.podtemplate import capacity, hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Phase
from elasticctl.api.text import span
from elasticctl.cli.framework.output import Table, on_terminal
from elasticctl.cli.framework.target import Target
from elasticctl.cli.views.cost import dollars
from elasticctl.cli.views.history import causes, restarts
from elasticctl.cli.views.job import CAPACITIES, ago, borrowed, part_of, rate

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest


_HEADER = (
    "NAME", "PHASE", "WORKERS", "GPUS", "CAPACITY", "STEP", "EPOCH", "RATE", "ETA", "CHECKPOINT", "RESTARTS", "COST",
    "AGE",
)  # fmt: skip
_WIDE = ("ON-DEMAND", "CAUSES", "STORAGE")
_SPARE = (
    "STORAGE", "CAUSES", "ON-DEMAND", "CAPACITY", "EPOCH", "GPUS", "RATE", "AGE", "COST", "REASON", "RESTARTS", "ETA",
    "CHECKPOINT", "STEP",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Shape:
    """Which columns are wanted."""

    wide: bool = False
    namespaces: bool = False

    @property
    def header(self) -> tuple[str, ...]:
        """Their titles."""
        return (*(("NAMESPACE",) if self.namespaces else ()), *_HEADER, *(_WIDE if self.wide else ()), "REASON")


def job_table(
    manifests: Sequence[Manifest], now: float, shape: Shape = Shape(), reasons: Mapping[str, str] | None = None
) -> Table:
    """One row a job. `reasons`: UID -> why it waits, for those of which that is known better than their status says."""
    rows = [_row(manifest, now, shape, reasons or {}) for manifest in manifests]
    return Table(shape.header, rows, spare=_SPARE)


def why_ended(job: ElasticJob) -> str:
    """The controller's word on a job that waits or has failed; on other phases it has nothing to add."""
    status = job.status
    if status.phase in (Phase.SUCCEEDED, Phase.RUNNING, Phase.CANCELLED):
        return ""
    return ": ".join(part for part in (status.reason, status.message) if part)


def _row(manifest: Manifest, now: float, shape: Shape, reasons: Mapping[str, str]) -> tuple[str, ...]:
    job = ElasticJob.from_manifest(manifest)
    status, progress, found = job.status, job.status.progress, hardware(job)
    spent, left = cost(job, now), remaining_s(status)
    cells = (
        job.name,
        status.phase.value,
        f"{status.active}/{job.desired} ({job.bounds})",
        str(found.gpus_per_worker * job.desired) if found.gpus_per_worker else "",
        CAPACITIES.get(capacity(job.template), ""),
        part_of(progress.step, progress.total_steps),
        part_of(progress.epoch, progress.total_epochs),
        rate(status),
        "" if left is None else span(left),
        "" if status.checkpoint.step is None else f"{status.checkpoint.step}{ago(status.checkpoint.at, now, status)}",
        str(restarts(status)),
        "" if spent is None else dollars(spent.spent),
        "" if job.created_at is None else span(now - job.created_at),
    )
    wide = ("" if spent is None else dollars(spent.on_demand), causes(status), found.storage) if shape.wide else ()
    return (
        *((job.namespace,) if shape.namespaces else ()),
        *cells,
        *wide,
        reasons.get(job.uid, "") or why_ended(job) or borrowed(status),
    )


_WAITING = (None, "Pending", "Restarting")
_LOOKED_AT = 5
"""Of how many waiting jobs the pods are asked for."""


def bar_encoding() -> str | None:
    """The encoding in which stdout takes a bar; None where no person looks."""
    return sys.stdout.encoding if on_terminal() else None


def waiting_reasons(target: Target, jobs: list[Manifest], now: float) -> dict[str, str]:
    """UID -> why a job waits, of the first few that do: for that their pods are looked at."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING][:_LOOKED_AT]
    if not waiting:
        return {}
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.job import reason

    found = [ElasticJob.from_manifest(manifest) for manifest in waiting]
    pods = target.cluster.pods_of(found)
    return {job.uid: reason(job, pods[job.uid], now) for job in found}


def no_jobs_line(target: Target, namespace: str | None) -> str:
    """What to say where there are no jobs."""
    place = "in any namespace" if namespace is None else f"in namespace {namespace}"
    return f"no jobs {place} of context {target.context.name}. Next: elasticctl submit train.py"


def next_of_list(jobs: list[Manifest]) -> str:
    """What to type next: about a job that waits, if there is one, else about the newest."""
    waiting = [job for job in jobs if job.get("status", {}).get("phase") in _WAITING]
    if waiting:
        return f"Next: find out why one is waiting: elasticctl explain {waiting[-1]['metadata']['name']}"
    return f"Next: details: elasticctl status {jobs[-1]['metadata']['name']}"


def next_line(manifest: Manifest, *, live: bool = False) -> str:
    """What to type next about a job; `live`: it is being watched already."""
    from elasticctl.api.spec import ElasticJob
    from elasticctl.api.status import Phase

    job = ElasticJob.from_manifest(manifest)
    if job.status.phase in (Phase.PENDING, Phase.RESTARTING, Phase.FAILED):
        return f"Next: find out why: elasticctl explain {job.name}   see its output: elasticctl logs {job.name}"
    if job.status.phase.terminal:
        return f"Next: see what it cost: elasticctl history {job.name}   see its output: elasticctl logs {job.name}"
    more = "" if live else f"   watch it: elasticctl status -w {job.name}"
    return f"Next: follow its output: elasticctl logs -f {job.name}{more}"
