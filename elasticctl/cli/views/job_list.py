"""Jobs as rows: what each column of `list` says. Pure; `now` is a parameter (seconds since the epoch)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticctl.api.codec import Manifest
from elasticctl.api.cost import cost
from elasticctl.api.history import remaining_s
from elasticctl.api.podtemplate import capacity, hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Phase
from elasticctl.api.text import span
from elasticctl.cli.framework.output import Table
from elasticctl.cli.views.cost import dollars
from elasticctl.cli.views.job import CAPACITIES, ago, borrowed, causes, of, rate, restarts

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
        of(progress.step, progress.total_steps),
        of(progress.epoch, progress.total_epochs),
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
