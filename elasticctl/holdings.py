"""Who holds what of a shared cluster, who waits for whom and why: from quotas and jobs' shares, for all who show it.

The command line and the dashboard tell the same because both ask here. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elasticctl.codec import Manifest
from elasticctl.quota import CPU, Quota
from elasticctl.spec import ElasticJob


@dataclass(frozen=True, slots=True)
class Held:
    """What one job has, in slots of a pool, and why; `job` is its name, `project` its namespace.

    `pool_slots` is how many slots the pool has, as the job was last told; 0: it was not.
    """

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
    pool_slots: int = 0


@dataclass(frozen=True, slots=True)
class Holding:
    """A project's part of a pool, in slots; `limit` None: none. `waiting` counts its jobs that have nothing.

    `unused` is what is guaranteed to it and not held by right: its own whenever its jobs ask for it, lent until then.
    """

    project: str
    pool: str
    weight: float
    held: int
    guaranteed: int
    limit: int | None
    borrowed: int
    unused: int
    waiting: int


@dataclass(frozen=True, slots=True)
class Stock:
    """A pool as a whole: `held` of its `slots`, and `free`; None where that is not known.

    Slots count that an autoscaler may add, as it was said how many. Nobody knows how many there are where nobody holds
    any, nor how many are free where not all jobs may be seen.
    """

    pool: str
    unit: str
    held: int
    slots: int | None
    free: int | None


def held_of(job: ElasticJob) -> Held | None:
    """What a job has; None for one that has ended, or in which sharing has no say."""
    share = job.status.share
    if share is None or job.status.phase.terminal or not share.pool:
        return None
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
        pool_slots=share.pool_slots,
    )


def held_by(jobs: Iterable[ElasticJob]) -> list[Held]:
    """What each job has that shares, by project, pool and name."""
    found = (item for item in map(held_of, jobs) if item is not None)
    return sorted(found, key=lambda item: (item.project, item.pool, item.job))


def holdings(quotas: Iterable[Manifest], held: Iterable[Held]) -> list[Holding]:
    """A row for each project and pool that either a quota or a job names."""
    known = {quota.project: quota for quota in map(Quota.from_manifest, quotas)}
    mine: defaultdict[tuple[str, str], list[Held]] = defaultdict(list)
    for item in held:
        mine[item.project, item.pool].append(item)
    named = {(quota.project, pool) for quota in known.values() for pool in (*quota.guaranteed, *quota.limit)}
    return [
        _holding(project, pool, known.get(project, Quota(project)), mine.get((project, pool), ()))
        for project, pool in sorted(named | mine.keys())
    ]


def stocks(rows: Iterable[Holding], held: Iterable[Held], *, all_seen: bool) -> list[Stock]:
    """A line for each pool of `rows`; `all_seen`: no job's part of it is missing."""
    sizes: dict[str, int] = {}
    for item in held:
        if item.pool_slots:  # they hear of nodes that come and go one by one: the least is sure to be there
            sizes[item.pool] = min(item.pool_slots, sizes.get(item.pool, item.pool_slots))
    taken: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        taken[row.pool] += row.held
    found = []
    for pool, slots_held in sorted(taken.items()):
        slots = sizes.get(pool)
        free = max(0, slots - slots_held) if slots is not None and all_seen else None
        found.append(Stock(pool, "CPU slot" if pool == CPU else "GPU", slots_held, slots, free))
    return found


def _holding(project: str, pool: str, quota: Quota, mine: Sequence[Held]) -> Holding:
    held, borrowed = sum(item.slots for item in mine), sum(item.borrowed for item in mine)
    guaranteed = quota.guaranteed.get(pool, 0)
    return Holding(
        project=project,
        pool=pool,
        weight=quota.weight,
        held=held,
        guaranteed=guaranteed,
        limit=quota.limit.get(pool),
        borrowed=borrowed,
        unused=max(0, guaranteed - (held - borrowed)),
        waiting=sum(item.workers == 0 for item in mine),
    )
