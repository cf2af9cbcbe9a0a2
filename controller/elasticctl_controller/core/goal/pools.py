"""What the workers of a job with a goal show about its pools of machines: where they are, and whether there are more.

Pods that wait for a machine ask a pool for one. If some wait for too long, the pool has no more machines than those
that are in use; it is asked again when that may have changed. What was seen is kept in the plan, and decays with age
(`elasticctl.planning.availability`). A new job starts with the evidence of similar jobs of its namespace
(`PoolEvidence`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.goal import ON_DEMAND, SPOT, PoolStatus, capacity_of
from elasticctl.api.observed.history import reports_steps
from elasticctl.api.observed.workers import Pod, is_member
from elasticctl.api.podtemplate import capacity, hardware, node_labels
from elasticctl.api.spec import MAX_SECONDS, ElasticJob, PodPhase
from elasticctl.api.status import JobStatus
from elasticctl.planning.availability import AvailabilityRecord
from elasticctl.planning.situation import AGES_H, Costs, Market
from elasticctl_controller.core.causes import is_lost
from elasticctl_controller.core.observation import Observed, SeenPools
from elasticctl_controller.core.workers import own_pods

RETRY_S, RETRIES = 900.0, 2.5
"""A pool that has some machines, but not as many as wanted, is asked for more after `RETRY_S`, or after `RETRIES` times
the patience with it, whichever is less. The patience is short if a start or the time left is short."""
JOINED_S = 120.0
"""A worker that has run for this long counts as ready, whether its group has admitted it or not."""
_SEEN_EVERY_H = 0.5


@dataclass(frozen=True, slots=True)
class Present:
    """The workers that a job has and keeps, by pool. Workers that are `ready` are in the group, or could be."""

    pods: Mapping[str, tuple[Pod, ...]]
    ready: frozenset[str]

    def all(self) -> Iterable[Pod]:
        """The workers of all pools."""
        return (pod for pods in self.pods.values() for pod in pods)

    def of(self, pool: str) -> tuple[Pod, ...]:
        """The workers of this pool, ordered by which to keep first: ready, then with a machine, then the oldest."""
        return self.pods.get(pool, ())


def present_workers(job: ElasticJob, observed: Observed, status: JobStatus, now: float) -> Present:
    """The pods that run or wait, except for pods that are ending, lost or marked for removal."""
    known = {worker.uid: worker for worker in job.status.workers}
    silent, lost_nodes = observed.group.silent, observed.cluster.lost_nodes
    found: dict[str, list[Pod]] = {}
    ready = set()
    for uid, pod in own_pods(job, observed.cluster.pods).items():
        worker = known.get(uid)
        gone = worker is not None and (worker.removal or worker.cause is not None)
        if gone or pod.ended or pod.deleting or uid in silent or is_lost(pod, lost_nodes):
            continue
        found.setdefault(_pool_of(job, pod), []).append(pod)
        if pod.phase is PodPhase.RUNNING and (
            any(worker is not None and is_member(worker, group) for group in status.generations[-1:])
            or (pod.started_at is not None and now - pod.started_at > JOINED_S)
            or job.rdzv_endpoint
        ):
            ready.add(uid)
    return Present(
        {
            pool: tuple(sorted(pods, key=lambda p: (p.uid not in ready, not is_placed(p), p.created_at or now, p.uid)))
            for pool, pods in found.items()
        },
        frozenset(ready),
    )


def has_stepped(status: JobStatus) -> bool:
    """Has the newest group made a step? Until then its newcomers may lack the state, so no worker should leave it."""
    return not status.generations or not reports_steps(status) or status.generations[-1].first_step_at is not None


def _pool_of(job: ElasticJob, pod: Pod) -> str:
    """The pool in which its machine was requested; that of the template, for a worker from before the job had a
    goal."""
    if pod.pool:
        return pod.pool
    asked = capacity(job.template) or ON_DEMAND
    return asked if asked != SPOT or job.goal is None else job.goal.spot_pools[0]


def is_placed(pod: Pod) -> bool:
    """Does it have a machine?"""
    return bool(pod.node) or pod.phase is PodPhase.RUNNING


def placed(pods: Iterable[Pod]) -> list[Pod]:
    """The pods that have a machine, which is what is paid for."""
    return [pod for pod in pods if is_placed(pod)]


def update_pools(
    job: ElasticJob, present: Present, wait_s: float, now: float, evidence: Iterable[PoolStatus] = ()
) -> tuple[PoolStatus, ...]:
    """What is known about each spot pool now, from what was known before and from which workers have a machine.

    `wait_s` is the patience, in seconds. A job that knows nothing about a pool yet starts with the `evidence` of
    others.
    """
    goal, plan = job.goal, job.status.plan
    if goal is None:
        return ()
    known = {pool.name: replace(pool, at=Timestamp(now)) for pool in evidence}
    known |= {pool.name: pool for pool in (plan.pools if plan is not None else ())}
    return tuple(
        _update_pool(known.get(name, PoolStatus(name, Timestamp(now))), present.of(name), wait_s, now)
        for name in goal.spot_pools
    )


def _update_pool(pool: PoolStatus, pods: Sequence[Pod], wait_s: float, now: float) -> PoolStatus:
    if not pods:
        return replace(pool, at=Timestamp(now))  # no worker asks
    there = len(placed(pods))
    waiting_s = max((now - (pod.created_at or now) for pod in pods if not is_placed(pod)), default=0.0)
    if pool.short_since is None:
        if waiting_s >= wait_s:
            pool = replace(pool, short=there, short_since=Timestamp(now))
    elif there > pool.short or (there and now >= pool.short_since + min(RETRY_S, RETRIES * wait_s)):
        pool = replace(pool, short=0, short_since=None)
    elif there < pool.short and waiting_s >= wait_s:  # a worker that has only just asked shows nothing yet
        pool = replace(pool, short=there)
    up = pool.short_since is None or pool.short > 0
    hours = max(0.0, now - (pool.at or now)) / 3600
    if up == pool.up and hours < _SEEN_EVERY_H:
        return pool
    seen = seen_of(pool).after(hours, up)
    return replace(
        pool,
        at=Timestamp(now),
        up=up,
        age_hours=round(seen.age_h, 4),
        up_hours=_rounded(seen.hours[True]),
        up_ends=_rounded(seen.ends[True]),
        away_hours=_rounded(seen.hours[False]),
        away_ends=_rounded(seen.ends[False]),
    )


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, 6) for value in values)


def seen_of(pool: PoolStatus) -> AvailabilityRecord:
    """The pool's history in the policy's terms; a guess if the status has none, or an invalid one."""

    def row(values: tuple[float, ...]) -> tuple[float, ...]:
        return values if len(values) == len(AGES_H) and min(values) >= 0 else (0.0,) * len(AGES_H)

    rows = ((row(pool.away_hours), row(pool.up_hours)), (row(pool.away_ends), row(pool.up_ends)))
    return AvailabilityRecord(pool.up, max(0.0, pool.age_hours), *rows)


def machines(pool: PoolStatus, job: ElasticJob) -> int:
    """How many machines the job could have there, as far as is known; 0 if they are too few to train with."""
    there = job.max if pool.short_since is None else min(pool.short, job.max)
    return there if there >= job.min else 0


def market_of(pools: Sequence[PoolStatus], job: ElasticJob, usd_per_h: float, now: float) -> Market:
    """What is expected of all spot pools taken together."""
    seen = [seen_of(pool) for pool in pools]
    weights = [1 + one.up_h for one in seen]
    up = [pool for pool in pools if machines(pool, job)]
    since_h = [pool.age_hours + max(0.0, now - (pool.at or now)) / 3600 for pool in up or pools]

    def mean(values: Iterable[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)

    return Market(
        leaves=mean(one.leaves for one in seen),
        returns=mean(one.returns for one in seen),
        losses_per_h=mean(one.losses_per_h for one in seen),
        depth=max((machines(pool, job) for pool in up), default=job.max),
        usd_per_h=usd_per_h,
        since_h=max(since_h) if up else min(since_h),
    )


_GUESS = Costs()
_WIDENED = 1.5
_MISSING = 2.0
"""A spot worker whose machine took more than this many times a start has waited until one was available."""
_IDLE_S = 5.0
"""A worker that was placed within this time got a machine that was there already."""


def measured_costs(status: JobStatus, present: Present, known: Costs | None, grace_s: float) -> Costs:
    """What changes cost: as this job shows now, else as `known` from before or from similar jobs, else a guess.

    A start lasts from creating a worker to its first step. Spot machines are also requested when there are none, so the
    shortest of their starts counts, plus up to half of it while no on-demand machine shows how long a start takes.
    """
    known_s = known.start_s if known is not None else None
    known = known or _GUESS
    groups = [g for g in status.generations[-4:] if g.first_step_at is not None and g.formed_at is not None]
    ranks_s = max(((g.first_step_at or 0.0) - (g.formed_at or 0.0) for g in groups), default=None)
    losses_s = [item.recovery_s for item in status.interruptions[-4:] if item.recovery_s is not None]
    start_s = _start_s(status, present, known_s)
    first = next((g.first_step_at for g in status.generations if g.first_step_at is not None), None)
    commit, every_s = status.checkpoint, None
    if first is not None and commit.at is not None and commit.committed and commit.at > first:
        every_s = (commit.at - first) / commit.committed
    return Costs(
        start_s=known.start_s if start_s is None else _step_up(start_s),
        reform_s=known.reform_s if ranks_s is None else _step_up(max(1.0, ranks_s)),
        loss_s=_step_up(max(losses_s)) if losses_s else known.loss_s,
        save_every_s=known.save_every_s if every_s is None else _step_up(every_s),
        billed_s=_step_up(grace_s),
    )


def _start_s(status: JobStatus, present: Present, known_s: float | None) -> float | None:
    """Seconds from the creation of a worker until it trained, from the workers that train; None while none does.

    Machines that were there already are no evidence about new ones, and neither is a spot worker that waited until
    there were any, so they do not reduce what is known about a start.
    """
    took: dict[tuple[bool, bool], list[float]] = {}
    longest_s = _MISSING * (known_s or _GUESS.start_s)
    waited = False
    for pool, pods in present.pods.items():
        spot = capacity_of(pool) == SPOT
        for pod in pods:
            trained_at = _trained_at(status, pod)
            if pod.started_at is None or pod.created_at is None or trained_at is None:
                continue
            boot_s = pod.started_at - pod.created_at
            if spot and boot_s > longest_s:
                waited = True
                took.setdefault((spot, False), []).append(trained_at - pod.started_at)
            else:
                took.setdefault((spot, boot_s > _IDLE_S), []).append(trained_at - pod.created_at)
    if (False, True) in took:
        return max(took[False, True])
    if (False, False) in took:
        return max(*took[False, False], known_s or 0.0)
    if (True, True) in took:
        quickest_s = min(took[True, True])
        return max(quickest_s, min(_WIDENED * quickest_s, known_s or math.inf))
    if (True, False) in took:
        quickest_s = min(took[True, False])
        return max(quickest_s, known_s or max(_WIDENED * quickest_s, _GUESS.start_s if waited else 0.0))
    return None


def _trained_at(status: JobStatus, pod: Pod) -> float | None:
    """When the first group of this worker made its first step; None if it has made none, or is no longer known."""
    groups = (
        group
        for group in status.generations
        if pod.name in group.workers and (group.formed_at or 0.0) >= (pod.started_at or 0.0)
    )
    first = next(groups, None)
    if first is None or first.first_step_at is None or (first is status.generations[0] and first.generation > 1):
        return None
    return first.first_step_at


def kept_costs(kept: Sequence[float]) -> Costs | None:
    """The costs that a plan keeps, in the policy's terms; None if they are missing, invalid or only a guess."""
    if len(kept) != len(costs_as_kept(_GUESS)) or not all(0 < item <= MAX_SECONDS for item in kept):
        return None
    return None if tuple(kept) == costs_as_kept(_GUESS) else Costs(*kept)


def costs_as_kept(costs: Costs) -> tuple[float, ...]:
    """The costs in the form that a plan keeps."""
    return (costs.start_s, costs.reform_s, costs.loss_s, costs.save_every_s)


def _step_up(seconds: float) -> float:
    """Rounded up to a step of some 20 %, so that plans made from it stay comparable."""
    value = 1.0
    while round(value, 3) < min(seconds, 86_400.0):  # a step stays what it is
        value *= 1.2
    return round(value, 3)


MOST_KINDS = 1024
"""The most kinds of machines, over all namespaces; beyond that, the ones that were reported longest ago are dropped."""
_Kind = tuple[str, tuple[tuple[str, tuple[str, ...]], ...], int]


class PoolEvidence:
    """The newest evidence about each pool, by namespace and kind of machine: how often pools came and went, and what
    starts and other changes cost. Thread-safe.

    It is kept in memory: after a restart of the controller, it comes back with the first pass over each job that has
    seen something.
    """

    def __init__(self) -> None:
        self._seen: dict[_Kind, dict[str, PoolStatus]] = {}
        self._costs: dict[_Kind, tuple[float, ...]] = {}

    def record(self, job: ElasticJob, status: JobStatus) -> None:
        """Record what a job has seen, if that is newer than what is known."""
        if job.goal is None or status.plan is None or not status.plan.pools:
            return
        kind = _kind_of(job)
        known = self._seen.pop(kind, {})
        newer = {pool.name: pool for pool in status.plan.pools if (pool.at or 0.0) >= (_at(known, pool.name))}
        self._seen[kind] = {**known, **newer}
        if newer and status.plan.measured:
            self._costs[kind] = status.plan.costs
        for oldest in list(self._seen)[: max(0, len(self._seen) - MOST_KINDS)]:
            self._seen.pop(oldest, None)
            self._costs.pop(oldest, None)

    def of(self, job: ElasticJob) -> SeenPools:
        """What similar jobs have seen: how often pools came and went, but not what they have now; and what changes have
        cost the one that reported last."""
        if job.goal is None:
            return SeenPools()
        kind = _kind_of(job)
        pools = (pool for name, pool in self._seen.get(kind, {}).items() if name in job.goal.spot_pools)
        return SeenPools(
            tuple(replace(pool, up=True, age_hours=0.0, short=0, short_since=None) for pool in pools),
            self._costs.get(kind, ()),
        )


def _at(known: dict[str, PoolStatus], name: str) -> float:
    return known[name].at or 0.0 if name in known else 0.0


def _kind_of(job: ElasticJob) -> _Kind:
    """The kind of machine that a job asks for. Its zones are not part of that: each pool has its own."""
    return job.namespace, tuple(sorted(node_labels(job.template).items())), hardware(job).gpus_per_worker
