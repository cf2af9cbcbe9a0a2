"""What jobs claim of a shared cluster: pools, projects, claims and grants, and how they follow from manifests.

A *slot* is what a worker takes of a node: a GPU, or a processor for workers without GPUs. A *pool* is the slots of one
kind: GPUs by type, as far as a node's labels or a job's placement show it, or the processors that a node offers under
`CPU_SLOTS`, of which a worker takes one per rank. A claim asks for slots of one pool, so pools are decided one by one.
Times are seconds since the epoch.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.gpu_types import GKE_GPU_LABEL, GPU_TYPES, INSTANCE_LABEL
from elasticctl.api.objects import at
from elasticctl.api.podtemplate import GPU_RESOURCE, hardware, node_labels
from elasticctl.api.quota import CPU, CPU_SLOTS, GPU, HELD, Quota
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.phase import FINISHING
from elasticctl_controller.core.workers import is_active

DEFAULT_SCHEDULERS = ("", "default-scheduler")
NOT_YET = float("inf")
"""The start time of a worker that has not started: after all others."""
TO_COME = "nodes to come"
"""Stands for the nodes that an autoscaler would add."""


@dataclass(frozen=True, slots=True)
class Node:
    """A healthy node and its shared slots: all slots except for slots that something other than claims holds."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class SharedPool:
    """The slots of one kind by node, because a worker has to fit on one; `unit` is what messages call a slot."""

    name: str
    nodes: tuple[Node, ...]
    unit: str = "GPU"

    @property
    def slots(self) -> int:
        """The slots of all nodes."""
        return sum(node.slots for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Project:
    """A group of users with a quota: guaranteed and maximum slots by pool (missing: 0, and no limit).

    `weight` is its relative share of what is guaranteed to no project. A project without a quota has weight 1, no
    guarantee and no limit.
    """

    name: str
    weight: float = 1.0
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker of a claim: since when it has run, and on which node (empty: it waits for one).

    Workers that are being removed are not listed although they still run: their slots will be free soon.
    """

    name: str
    started_at: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that wants to run on at least `least` workers or none at all, and at most `most` (equal: a fixed size).

    `granted` is what the last decision gave it (0: it waits or was suspended), `changed_at` when that last changed (for
    a new claim: when it was submitted). `ran`: it has trained before.

    Jobs that have ended, are suspended by their owner, or belong to another scheduler make no claims.
    """

    key: str
    project: str
    pool: str
    least: int
    most: int
    slots_per_worker: int = 1
    priority: int = 0
    submitted_at: float = 0.0
    granted: int = 0
    changed_at: float = 0.0
    ran: bool = False
    workers: tuple[Worker, ...] = ()


@dataclass(frozen=True, slots=True)
class SharingRules:
    """How strongly sharing avoids changes.

    `patience_s`: a running job is not suspended for one of the same priority that has waited for less than this; after
    that the job submitted first goes first, so that none starves. `settle_s`: a job whose size has just changed keeps
    its workers for this long unless a guarantee or another job's minimum needs them: fairness can wait, a start cannot.
    """

    patience_s: float = 600.0
    settle_s: float = 60.0


DEFAULT_RULES = SharingRules()


class GrantReason(StrEnum):
    """Why a claim has what it has; `Grant.words` explains it to people."""

    FULL = "Full"  # all it asks for
    SHARED = "Shared"  # less than it asks for, because others have the rest
    LIMITED = "Limited"  # less than it asks for: its project's limit
    SMALL_POOL = "SmallPool"  # less than it asks for: the pool has no more
    WAITS_GUARANTEE = "WaitsForGuarantee"  # nothing: what it needs is guaranteed to others, who use it
    WAITS_PRIORITY = "WaitsForPriority"  # nothing: held by jobs of higher priority
    WAITS_TURN = "WaitsForTurn"  # nothing: held by jobs that come first
    WAITS_LIMIT = "WaitsForLimit"  # nothing: its project has used its limit
    NO_ROOM = "NoRoom"  # nothing: the pool is too small, or so fragmented that a worker fits on no node
    NO_POOL = "NoPool"  # nothing: there is no such pool

    @property
    def waits(self) -> bool:
        """True if the claim has nothing."""
        return self not in (GrantReason.FULL, GrantReason.SHARED, GrantReason.LIMITED, GrantReason.SMALL_POOL)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim gets: 0 workers (it waits, or is suspended at a commit), or `least` to `most`.

    `borrowed`: how many of them exceed the project's guarantee, if there are guarantees at all: they are the first to
    be taken back. `leave`: names of the workers that are preempted, the youngest. `pending`: how many more it would use
    if there were nodes for them, for an autoscaler. `words`: why it has what it has, in a sentence without a subject
    ("waits for 2 GPUs that team-b is guaranteed"). `change`: what this decision changed ("gives 2 workers to
    team-b/train, as team-b is guaranteed so many"; empty: nothing), and `for_key` for whom. `nodes`: where workers take
    several slots, the nodes reserved for new ones, which elsewhere might block another claim.
    """

    key: str
    workers: int
    reason: GrantReason
    words: str
    borrowed: int = 0
    leave: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    pending: int = 0
    change: str = ""
    for_key: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """A project's use of a pool after a decision, in slots; `waiting`: its claims that have nothing."""

    project: str
    pool: str
    used: int
    guaranteed: int
    limit: int | None
    borrowed: int
    waiting: int


@dataclass(frozen=True, slots=True)
class SharingDecision:
    """All grants by claim, the usage by project, and when to decide again even if nothing changes (None: no need).

    The grants of a pool never exceed its slots. Preempted workers may hold theirs a little longer; the new workers wait
    for them as pending pods.
    """

    grants: Mapping[str, Grant]
    usage: tuple[Usage, ...] = ()
    wake_at: float | None = None


@dataclass(frozen=True, slots=True)
class LastGrant:
    """What the last decision gave a job, and when that last changed."""

    workers: int
    since: float


def is_shared(job: ElasticJob) -> bool:
    """True for a job whose size sharing decides: not over, not suspended by its owner, of no other scheduler."""
    over = job.status.phase.terminal or job.deleting or job.suspend or job.cancel
    scheduler = str(at(job.template, "spec", "schedulerName") or "")
    elsewhere = bool(job.queue) or scheduler not in DEFAULT_SCHEDULERS
    return not over and not elsewhere and wanted_workers(job) > 0


def wanted_workers(job: ElasticJob) -> int:
    """How many workers it would have at best; for a job with a goal, as many as its plan wants now."""
    plan = job.status.plan if job.goal is not None else None
    return job.desired if plan is None else min(plan.workers, job.desired)


def pool_of(job: ElasticJob, pools: Collection[str]) -> str:
    """The pool whose slots the job's workers take; "" if they take no shared slots."""
    if not hardware(job).gpus_per_worker:
        return CPU if CPU in pools else ""
    types = _gpu_types(node_labels(job.template))
    if len(types) == 1:
        return types.pop()
    # Any type will do, or none is known. If there is only one pool of GPUs, it is that one.
    found = sorted(set(pools) - {CPU})
    return found[0] if len(found) == 1 else GPU


def slots_per_worker(job: ElasticJob) -> int:
    """The GPUs of a worker, or its ranks if it has none."""
    found = hardware(job)
    return found.gpus_per_worker or found.ranks_per_worker


def build_claim(job: ElasticJob, pool: str, last: LastGrant) -> Claim:
    """The claim of a job.

    A job of fixed size claims all its workers or nothing. But once it runs, workers that are lost or newly asked for
    are no reason to take away the others.
    """
    active = [worker for worker in job.status.workers if is_active(worker)]
    least, most = max(1, job.min), wanted_workers(job)
    if job.status.reason == FINISHING:  # it is about to end: no new workers
        least = most = max(1, len(active))
    elif not job.sharing.automatic:
        least = max(least, min(most, len(active))) if last.workers and active else most
    created_at = job.created_at or 0.0
    return Claim(
        key=job.key,
        project=job.namespace,
        pool=pool,
        least=min(least, most),
        most=most,
        slots_per_worker=slots_per_worker(job),
        priority=job.sharing.priority,
        submitted_at=created_at,
        granted=last.workers,
        changed_at=last.since or created_at,
        ran=job.status.generation > 0,
        workers=tuple(Worker(w.uid, w.started_at if w.started_at is not None else NOT_YET, w.node) for w in active),
    )


def undecided_grant(job: ElasticJob) -> LastGrant:
    """The last grant of a job that has not been decided about yet: the workers it has."""
    return LastGrant(sum(map(is_active, job.status.workers)), 0.0)


def build_pools(
    nodes: Iterable[Manifest], shared: Iterable[ElasticJob], others: Iterable[ElasticJob], capacity: Mapping[str, int]
) -> tuple[SharedPool, ...]:
    """The pools of healthy `nodes` for `shared` jobs, without the slots that `others` and other pods hold.

    A cordoned node counts only the slots that shared jobs hold on it. `capacity`: slots by pool up to which an
    autoscaler adds nodes, including slots that are held; missing slots count as available, as nodes are added for
    waiting workers.
    """
    nodes, foreign = list(nodes), _held_slots(others, accepted=True)
    ours = _held_slots(shared) if any(map(_is_cordoned, nodes)) else Counter()
    found: defaultdict[str, list[Node]] = defaultdict(list)
    there = Counter[str]()
    for node in nodes:
        name = str(at(node, "metadata", "name"))
        for kind, pool, resource in ((GPU, gpu_pool(node), GPU_RESOURCE), (CPU, CPU, CPU_SLOTS)):
            slots = slot_count(at(node, "status", "allocatable", resource))
            if _is_cordoned(node):
                slots = min(slots, ours[name, kind])
            if slots:
                held = foreign[name, kind] + slot_count(at(node, "status", HELD, resource))
                found[pool].append(Node(name, max(0, slots - held)))
                there[pool] += slots
    for pool, slots in capacity.items():
        missing = slots - there[pool]
        if missing > 0:
            found[pool].append(Node(TO_COME, missing))
    return tuple(SharedPool(name, tuple(found[name]), "CPU slot" if name == CPU else "GPU") for name in sorted(found))


def _is_cordoned(node: Manifest) -> bool:
    return at(node, "spec", "unschedulable") is True


def _held_slots(jobs: Iterable[ElasticJob], *, accepted: bool = False) -> Counter[tuple[str, str]]:
    """(node, kind of slots) -> how many of them the jobs' workers hold there.

    With `accepted`, only workers that their nodes have accepted: a template may name any node, and ask for any number.
    """
    held = Counter[tuple[str, str]]()
    for job in jobs:
        kind, each = GPU if hardware(job).gpus_per_worker else CPU, slots_per_worker(job)
        for worker in job.status.workers:
            if worker.cause is None and worker.node and not (accepted and worker.started_at is None):
                held[worker.node, kind] += each
    return held


def gpu_pool(node: Manifest) -> str:
    """The pool of a node's GPUs: their type, if its labels show it."""
    labels = at(node, "metadata", "labels")
    values = {str(key): (str(value),) for key, value in labels.items()} if isinstance(labels, Mapping) else {}
    types = _gpu_types(values)
    return types.pop() if len(types) == 1 else GPU


def build_projects(quotas: Sequence[Manifest]) -> tuple[Project, ...]:
    """The projects with quotas."""
    found = map(Quota.from_manifest, quotas)
    return tuple(Project(item.project, item.weight, item.guaranteed, item.limit) for item in found)


def _gpu_types(labels: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The GPU types in the labels of a node, or in the labels that a job requires."""
    accelerators, instances = set(labels.get(GKE_GPU_LABEL, ())), set(labels.get(INSTANCE_LABEL, ()))
    return {
        gpu.name
        for gpu in GPU_TYPES.values()
        if gpu.gke_accelerator in accelerators or not instances.isdisjoint(itertools.chain(*gpu.aws.values()))
    }


def slot_count(value: Any) -> int:
    """The quantity of an extended resource, which is an integer; 0 if it is not valid."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(0, value)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else 0
