"""Quotas of a shared cluster and its usage by job, project and pool, for the command line and the dashboard."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.errors import SpecError
from elasticctl.api.gpu_types import GPU_TYPES
from elasticctl.api.limits import AllowedJobs, check_limits
from elasticctl.api.objects import as_mapping, at
from elasticctl.api.spec import API_VERSION, ElasticJob
from elasticctl.api.text import did_you_mean, join_or, quote

KIND = "ElasticQuota"
PLURAL = "elasticquotas"
GPU, CPU = "gpu", "cpu"
POOLS = (*GPU_TYPES, GPU, CPU)
CPU_SLOTS = "elasticctl.dev/cpu-slots"
"""The resource that a node with CPUs to share offers."""
HELD = "held"
"""In the status of a node, next to `allocatable`: what pods that are not workers use, by resource."""
MAX_SLOTS = 1_000_000
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1_000.0


@dataclass(frozen=True, slots=True)
class Quota:
    """One project's quota in slots by pool: guaranteed (missing: 0) and limit (missing: none).

    `weight` is its share, relative to the other projects, of slots that are not guaranteed or not used; `allowed`
    are the limits of its jobs.
    """

    project: str
    weight: float = 1.0
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)
    allowed: AllowedJobs = AllowedJobs()

    @classmethod
    def from_manifest(cls, manifest: Mapping[str, Any]) -> Quota:
        """Read an ElasticQuota object, whatever it contains; never raises."""
        spec = as_mapping(manifest.get("spec"))
        weight = spec.get("weight")
        usable = isinstance(weight, int | float) and not isinstance(weight, bool) and MIN_WEIGHT <= weight <= MAX_WEIGHT
        return cls(
            project=str(as_mapping(manifest.get("metadata")).get("name", "")),
            weight=float(weight) if usable and weight is not None else 1.0,
            guaranteed=_slots(spec.get("guaranteed")),
            limit=_slots(spec.get("limit")),
            allowed=AllowedJobs.from_spec(spec),
        )

    def to_manifest(self) -> Manifest:
        """Return the object as it is stored."""
        spec: Manifest = {"weight": self.weight, "guaranteed": dict(self.guaranteed), "limit": dict(self.limit)}
        if self.allowed != AllowedJobs():
            spec["allowed"] = self.allowed.to_spec()
        return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": self.project}, "spec": spec}


def check_quota(manifest: object) -> Quota:
    """Check an ElasticQuota before it is stored. Raises SpecError with the field, the value and what is allowed."""
    if not isinstance(manifest, Mapping):
        raise SpecError(f"an {KIND} is a mapping, not {type(manifest).__name__}")
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(name) != wanted:
            raise SpecError(f"must be {wanted!r}, not {quote(manifest.get(name))}", path=name)
    spec = as_mapping(manifest.get("spec"))
    weight = spec.get("weight", 1)
    if not isinstance(weight, int | float) or isinstance(weight, bool) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise SpecError(f"must be from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}, not {quote(weight)}", path="spec.weight")
    for part in ("guaranteed", "limit"):
        _check_slots(spec.get(part, {}), f"spec.{part}")
    check_limits(spec.get("allowed", {}))
    quota = Quota.from_manifest(manifest)
    for pool, slots in quota.guaranteed.items():
        if slots > quota.limit.get(pool, math.inf):
            raise SpecError(
                f"{slots} {pool} are guaranteed, and the limit is {quota.limit[pool]}", path=f"spec.guaranteed.{pool}"
            )
    return quota


def spent_today(quotas: Iterable[Mapping[str, Any]], now: float) -> dict[str, float]:
    """Project -> US dollars spent on the day (UTC) of `now`, as counted by the controller, where it counts them."""
    found: dict[str, float] = {}
    for quota in quotas:
        usd, day = at(quota, "status", "spent", "usd"), at(quota, "status", "spent", "day")
        counted = isinstance(usd, int | float) and not isinstance(usd, bool) and day == to_rfc3339(now)[:10]
        if at(quota, "spec", "allowed", "usdPerDay") is not None:
            found[str(at(quota, "metadata", "name"))] = float(usd) if counted and usd is not None else 0.0
    return found


def refuse_over_limit(job: Mapping[str, Any], quota: Quota | None) -> None:
    """Raise SpecError for a new job that its project does not allow; without a quota it allows everything."""
    breaches = quota.allowed.breaches(ElasticJob.from_manifest(job)) if quota is not None else ()
    if quota is not None and breaches:
        raise SpecError(
            f"project {quota.project} does not allow this job: {'; '.join(breaches)}."
            " FIX: change that, or ask the administrator of its limits (elasticctl quota list)"
        )


def _check_slots(given: object, path: str) -> None:
    if not isinstance(given, Mapping):
        raise SpecError(f"must be a mapping of kinds to numbers, not {quote(given)}", path=path)
    for pool, slots in given.items():
        if pool not in POOLS:
            near = did_you_mean(str(pool), POOLS)
            raise SpecError(f"{quote(pool)} is not {join_or(POOLS)}{near}", path=path)
        if not isinstance(slots, int) or isinstance(slots, bool) or not 0 <= slots <= MAX_SLOTS:
            raise SpecError(f"must be a whole number from 0 to {MAX_SLOTS}, not {quote(slots)}", path=f"{path}.{pool}")


def _slots(given: object) -> dict[str, int]:
    items = as_mapping(given).items()
    return {str(k): v for k, v in items if isinstance(v, int) and not isinstance(v, bool) and v >= 0}


@dataclass(frozen=True, slots=True)
class JobSlots:
    """The slots that one job uses of a pool, and why; `job` is its name, `project` its namespace.

    `pool_slots` is the size of the pool according to the job's status; 0 if unknown.
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
class ProjectUsage:
    """The slots that a project uses of a pool; `limit` None: none. `waiting` counts its jobs without workers.

    `unused` is the part of its guarantee that it does not use, and lends to others until its jobs need it.
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
class PoolUsage:
    """A whole pool: how many of its `slots` are `held` and `free`; None: unknown.

    Slots that an autoscaler may add are included. The size is unknown while no job has slots, and the number of free
    slots if some jobs cannot be listed.
    """

    pool: str
    unit: str
    held: int
    slots: int | None
    free: int | None


def job_usage(job: ElasticJob) -> JobSlots | None:
    """The usage of a job; None if it has ended or takes no part in sharing."""
    share = job.status.share
    if share is None or job.status.phase.terminal or not share.pool:
        return None
    return JobSlots(
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


def usage_by_job(jobs: Iterable[ElasticJob]) -> list[JobSlots]:
    """The usage of each job, sorted by project, pool and name."""
    found = (item for item in map(job_usage, jobs) if item is not None)
    return sorted(found, key=lambda item: (item.project, item.pool, item.job))


def usage_by_project(quotas: Iterable[Manifest], held: Iterable[JobSlots]) -> list[ProjectUsage]:
    """A row for each project and pool named by a quota or a job."""
    known = {quota.project: quota for quota in map(Quota.from_manifest, quotas)}
    mine: defaultdict[tuple[str, str], list[JobSlots]] = defaultdict(list)
    for item in held:
        mine[item.project, item.pool].append(item)
    named = {(quota.project, pool) for quota in known.values() for pool in (*quota.guaranteed, *quota.limit)}
    return [
        _project_usage(project, pool, known.get(project, Quota(project)), mine.get((project, pool), ()))
        for project, pool in sorted(named | mine.keys())
    ]


def usage_by_pool(rows: Iterable[ProjectUsage], held: Iterable[JobSlots], *, all_seen: bool) -> list[PoolUsage]:
    """A row for each pool of `rows`; `all_seen`: `held` lists every job."""
    sizes: dict[str, int] = {}
    for item in held:
        if item.pool_slots:  # statuses lag behind when nodes come and go: the smallest is safe
            sizes[item.pool] = min(item.pool_slots, sizes.get(item.pool, item.pool_slots))
    taken: defaultdict[str, int] = defaultdict(int)
    for row in rows:
        taken[row.pool] += row.held
    found = []
    for pool, slots_held in sorted(taken.items()):
        slots = sizes.get(pool)
        free = max(0, slots - slots_held) if slots is not None and all_seen else None
        found.append(PoolUsage(pool, "CPU slot" if pool == CPU else "GPU", slots_held, slots, free))
    return found


def _project_usage(project: str, pool: str, quota: Quota, mine: Sequence[JobSlots]) -> ProjectUsage:
    held, guaranteed = sum(item.slots for item in mine), quota.guaranteed.get(pool, 0)
    borrowed = min(sum(item.borrowed for item in mine), max(0, held - guaranteed))  # a worker may be borrowed in part
    return ProjectUsage(
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
