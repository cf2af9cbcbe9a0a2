"""Who holds what, who waits for whom and why: from quotas and jobs' shares to rows, bars and sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elasticctl.cli.output import Table
from elasticctl.codec import Manifest
from elasticctl.quota import Quota
from elasticctl.spec import ElasticJob
from elasticctl.status import Share

_BAR_WIDTH = 20
_BLOCKS, _PLAIN = ("█", "▓", "░"), ("#", "+", ".")
_COLUMNS = ("PROJECT", "KIND", "HELD", "GUARANTEED", "LIMIT", "BORROWED", "WAITING", "HELD OF GUARANTEED")
_SPARE = ("LIMIT", "HELD OF GUARANTEED")


@dataclass(frozen=True, slots=True)
class Held:
    """What one job has, in slots of a pool, and why; `job` is its name, `project` its namespace."""

    project: str
    job: str
    pool: str
    workers: int
    wanted: int
    slots: int
    borrowed: int
    reason: str
    message: str
    change: str


@dataclass(frozen=True, slots=True)
class Holding:
    """A project's part of a pool, in slots; `limit` None: none. `waiting` counts its jobs that have nothing."""

    project: str
    pool: str
    weight: float
    held: int
    guaranteed: int
    limit: int | None
    borrowed: int
    waiting: int


def held_by(jobs: Sequence[Manifest]) -> list[Held]:
    """What each job that shares has; those in which sharing has no say are left out."""
    found = []
    for job in map(ElasticJob.from_manifest, jobs):
        share = job.status.share
        if share is None or job.status.phase.terminal or not share.pool:
            continue
        found.append(_held(job, share))
    return sorted(found, key=lambda item: (item.project, item.pool, item.job))


def holdings(quotas: Sequence[Manifest], held: Sequence[Held]) -> list[Holding]:
    """A row for each project and pool that either a quota or a job names."""
    known = {quota.project: quota for quota in map(Quota.from_manifest, quotas)}
    pairs = {(item.project, item.pool) for item in held}
    pairs |= {(quota.project, pool) for quota in known.values() for pool in (*quota.guaranteed, *quota.limit)}
    rows = []
    for project, pool in sorted(pairs):
        quota = known.get(project, Quota(project))
        mine = [item for item in held if (item.project, item.pool) == (project, pool)]
        rows.append(
            Holding(
                project=project,
                pool=pool,
                weight=quota.weight,
                held=sum(item.slots for item in mine),
                guaranteed=quota.guaranteed.get(pool, 0),
                limit=quota.limit.get(pool),
                borrowed=sum(item.borrowed for item in mine),
                waiting=sum(item.workers == 0 for item in mine),
            )
        )
    return rows


def table(rows: Sequence[Holding], encoding: str | None) -> Table:
    """The rows with a bar each, all to one scale, in characters that the encoding has."""
    scale = max((max(row.held, row.guaranteed) for row in rows), default=0)
    cells = [
        (
            row.project,
            row.pool,
            str(row.held),
            str(row.guaranteed),
            "" if row.limit is None else str(row.limit),
            str(row.borrowed),
            str(row.waiting),
            bar(row, scale, encoding),
        )
        for row in rows
    ]
    return Table(_COLUMNS, cells, spare=_SPARE)


def bar(row: Holding, scale: int, encoding: str | None) -> str:
    """Full: held by right; shaded: borrowed; light: guaranteed and not used. `scale` slots fill the whole width."""
    own, lent, idle = _BLOCKS if (encoding or "").lower().replace("-", "").startswith("utf") else _PLAIN
    if not scale:
        return ""
    ends = [round(slots * _BAR_WIDTH / scale) for slots in (row.held - row.borrowed, row.held, row.guaranteed)]
    return own * ends[0] + lent * (ends[1] - ends[0]) + idle * max(0, ends[2] - ends[1])


def told(held: Sequence[Held]) -> Iterator[str]:
    """A sentence for each job: what it has, and why not more."""
    for item in held:
        last = f" Last change: {item.change}." if item.change else ""
        yield f"{item.project}/{item.job} {item.message}.{last}"


def _held(job: ElasticJob, share: Share) -> Held:
    return Held(
        project=job.namespace,
        job=job.name,
        pool=share.pool,
        workers=share.workers,
        wanted=job.desired,
        slots=share.workers * share.slots_per_worker,
        borrowed=share.borrowed * share.slots_per_worker,
        reason=share.reason,
        message=share.message,
        change=share.change,
    )
