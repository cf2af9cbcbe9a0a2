"""From jobs, nodes and quotas as a cluster has them to the claims, pools and projects that are decided on. Pure.

Slots are GPUs, by type where a node's labels or a job's placement tell it; or the processors that a node offers for
sharing under `CPU_SLOTS`, of which a worker without GPUs takes one for each of its ranks.
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
"""When a worker has started that has not: after all others."""
TO_COME = "nodes to come"
"""Stand for the nodes that an autoscaler would add."""


@dataclass(frozen=True, slots=True)
class Node:
    """A healthy node and the slots of it that may be shared: without what others than claims hold there."""

    name: str
    slots: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The slots of one kind, by node, because a worker's slots have to be on one; `unit` is a slot's name in words."""

    name: str
    nodes: tuple[Node, ...]
    unit: str = "GPU"

    @property
    def slots(self) -> int:
        """All of it."""
        return sum(node.slots for node in self.nodes)


@dataclass(frozen=True, slots=True)
class Project:
    """Whose jobs they are: slots by pool that it is guaranteed and that it may have at most (missing: 0; no limit).

    `weight` is its share of what nobody is guaranteed, beside the others'. A project that is not listed has weight 1,
    no guarantee and no limit.
    """

    name: str
    weight: float = 1.0
    guaranteed: Mapping[str, int] = field(default_factory=dict)
    limit: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker that a claim has: since when, and on which node (empty: it waits for one).

    Those that have been told to go are not listed, though they still run: their slots are about to be free.
    """

    name: str
    started_at: float
    node: str = ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that wants to run: at least `least` workers or none at all, at most `most` (equal: a fixed size).

    `granted` is what the last decision gave (0: it waits or was suspended), `changed_at` when that last changed (for a
    new claim: when it was submitted). Jobs that ended, are suspended by their owner, or belong to another scheduler
    are no claims.
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
    workers: tuple[Worker, ...] = ()


@dataclass(frozen=True, slots=True)
class SharingRules:
    """How hard the sharing tries to leave things alone.

    `patience_s`: a job that runs is not suspended for one of its own priority that has waited for less; after that the
    one submitted first goes first, so that nobody starves. `settle_s`: a job whose size has just changed keeps what it
    has for so long, unless a guarantee or another job's least needs it: fairness can wait, a start cannot.
    """

    patience_s: float = 600.0
    settle_s: float = 60.0


DEFAULT_RULES = SharingRules()


class Reason(StrEnum):
    """Why a claim has what it has; `Grant.words` says the same to a person."""

    FULL = "Full"  # all it asks for
    SHARED = "Shared"  # less than it asks for, because others have the rest
    LIMITED = "Limited"  # less than it asks for: its project's limit
    SMALL_POOL = "SmallPool"  # less than it asks for: there is no more, whoever else ends
    WAITS_GUARANTEE = "WaitsForGuarantee"  # nothing: what it would need is guaranteed to others who use it
    WAITS_PRIORITY = "WaitsForPriority"  # nothing: held by jobs of higher priority
    WAITS_TURN = "WaitsForTurn"  # nothing: held by jobs that come first
    WAITS_LIMIT = "WaitsForLimit"  # nothing: its project has used its limit
    NO_ROOM = "NoRoom"  # nothing: the pool is too small, or cut up so that a worker fits nowhere
    NO_POOL = "NoPool"  # nothing: there is no such pool

    @property
    def waits(self) -> bool:
        """Does it have nothing?"""
        return self not in (Reason.FULL, Reason.SHARED, Reason.LIMITED, Reason.SMALL_POOL)


@dataclass(frozen=True, slots=True)
class Grant:
    """What a claim gets: 0 workers (it waits, or is suspended at a commit), or `least` to `most`.

    `borrowed`: how many of them hold more than the project is guaranteed, where guarantees are given at all: the first
    to be taken back. `leave`: names of the workers that have to go now, the youngest. `pending`: how many more it
    would take if there were nodes for them; what an autoscaler should know of. `words` is why it has what it has, in
    one sentence without a subject ("waits for 2 GPUs that team-b is guaranteed"); `change` is what this decision
    changed, empty when nothing ("gives 2 workers to team-b/train, as team-b is guaranteed so many"), and `for_key` whom
    it was changed for. `nodes`: where workers take several slots, the nodes kept for those that have none yet; they
    should go there, because elsewhere they might stand in somebody's way.
    """

    key: str
    workers: int
    reason: Reason
    words: str
    borrowed: int = 0
    leave: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    pending: int = 0
    change: str = ""
    for_key: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """A project's part of a pool after a decision, in slots; `waiting`: claims of it that have nothing."""

    project: str
    pool: str
    used: int
    guaranteed: int
    limit: int | None
    borrowed: int
    waiting: int


@dataclass(frozen=True, slots=True)
class SharingDecision:
    """All grants by claim, who uses what, and when to decide again though nothing changed (None: no need).

    Grants of a pool never come to more than its slots; workers that are told to go may hold theirs a little longer,
    so those who get them wait for them as pending workers.
    """

    grants: Mapping[str, Grant]
    usage: tuple[Usage, ...] = ()
    wake_at: float | None = None


@dataclass(frozen=True, slots=True)
class LastGrant:
    """What the last decision gave a job, and since when."""

    workers: int
    since: float


def is_shared(job: ElasticJob) -> bool:
    """True for a job whose size is ours to decide: it lives, its owner wants it to run, no other scheduler has it."""
    over = job.status.phase.terminal or job.deleting or job.suspend or job.cancel
    scheduler = str(at(job.template, "spec", "schedulerName") or "")
    anothers = bool(job.queue) or job.sharing.pod_group is not None or scheduler not in DEFAULT_SCHEDULERS
    return not over and not anothers and job.desired > 0


def pool_of(job: ElasticJob, pools: Collection[str]) -> str:
    """The pool that a job's workers take slots of; "" for one that takes none of what is shared."""
    if not hardware(job).gpus_per_worker:
        return CPU if CPU in pools else ""
    types = _gpu_types(node_labels(job.template))
    if len(types) == 1:
        return types.pop()
    # It takes any type, or says nothing that we know: where there is but one pool of GPUs, it is of that.
    found = sorted(set(pools) - {CPU})
    return found[0] if len(found) == 1 else GPU


def slots_per_worker(job: ElasticJob) -> int:
    """GPUs of a worker, or its ranks where it has none."""
    found = hardware(job)
    return found.gpus_per_worker or found.ranks_per_worker


def build_claim(job: ElasticJob, pool: str, last: LastGrant) -> Claim:
    """What the job asks for.

    One of a fixed size asks for all of it or nothing; but once it runs, those of its workers that are lost, or wished
    for, are no reason to take away the others.
    """
    active = [worker for worker in job.status.workers if is_active(worker)]
    least, most = max(1, job.min), job.desired
    if job.status.reason == FINISHING:  # nobody new: it ends as it is
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
        workers=tuple(Worker(w.uid, w.started_at if w.started_at is not None else NOT_YET, w.node) for w in active),
    )


def undecided_grant(job: ElasticJob) -> LastGrant:
    """For a job that nothing was decided about, what it has."""
    return LastGrant(sum(map(is_active, job.status.workers)), 0.0)


def build_pools(
    nodes: Iterable[Manifest], shared: Iterable[ElasticJob], others: Iterable[ElasticJob], capacity: Mapping[str, int]
) -> tuple[Pool, ...]:
    """The pools that healthy `nodes` make for `shared` jobs, without what `others` and other pods hold there.

    A cordoned node has room for those that are on it, and no more. `capacity`: slots by pool that an autoscaler may
    bring a pool to, whoever holds them; what is missing counts as there, for nodes come for workers that wait.
    """
    nodes, theirs = list(nodes), _held_slots(others)
    ours = _held_slots(shared) if any(map(_is_cordoned, nodes)) else Counter()
    found: defaultdict[str, list[Node]] = defaultdict(list)
    there = Counter[str]()
    for node in nodes:
        name = str(at(node, "metadata", "name"))
        for kind, pool, resource in ((GPU, gpu_pool(node), GPU_RESOURCE), (CPU, CPU, CPU_SLOTS)):
            slots = _number(at(node, "status", "allocatable", resource))
            if _is_cordoned(node):
                slots = min(slots, ours[name, kind])
            if slots:
                held = theirs[name, kind] + _number(at(node, "status", HELD, resource))
                found[pool].append(Node(name, max(0, slots - held)))
                there[pool] += slots
    for pool, slots in capacity.items():
        missing = slots - there[pool]
        if missing > 0:
            found[pool].append(Node(TO_COME, missing))
    return tuple(Pool(name, tuple(found[name]), "CPU slot" if name == CPU else "GPU") for name in sorted(found))


def _is_cordoned(node: Manifest) -> bool:
    return at(node, "spec", "unschedulable") is True


def _held_slots(jobs: Iterable[ElasticJob]) -> Counter[tuple[str, str]]:
    """(node, kind of slots) -> how many of them jobs' workers hold there."""
    held = Counter[tuple[str, str]]()
    for job in jobs:
        kind, each = GPU if hardware(job).gpus_per_worker else CPU, slots_per_worker(job)
        for worker in job.status.workers:
            if worker.cause is None and worker.node:
                held[worker.node, kind] += each
    return held


def gpu_pool(node: Manifest) -> str:
    """The pool of a node's GPUs: their type, if its labels tell it."""
    labels = at(node, "metadata", "labels")
    values = {str(key): (str(value),) for key, value in labels.items()} if isinstance(labels, Mapping) else {}
    types = _gpu_types(values)
    return types.pop() if len(types) == 1 else GPU


def build_projects(quotas: Sequence[Manifest]) -> tuple[Project, ...]:
    """The projects that have quotas."""
    found = map(Quota.from_manifest, quotas)
    return tuple(Project(item.project, item.weight, item.guaranteed, item.limit) for item in found)


def _gpu_types(labels: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The types that labels, of a node or of the nodes that will do, tell of."""
    accelerators, instances = set(labels.get(GKE_GPU_LABEL, ())), set(labels.get(INSTANCE_LABEL, ()))
    return {
        gpu.name
        for gpu in GPU_TYPES.values()
        if gpu.gke_accelerator in accelerators or not instances.isdisjoint(itertools.chain(*gpu.aws.values()))
    }


def _number(value: Any) -> int:
    """A quantity of an extended resource, which is whole."""
    if isinstance(value, int) and not isinstance(value, bool):
        return max(0, value)
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20 else 0
