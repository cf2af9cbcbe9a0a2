"""What `reconcile` decides: the actions on a job and its pods, and which pods are created and deleted.

A worker that has to go is first marked in the status (`mark_removals`). Its pod is deleted once the mark is stored
(`list_deletions`), and so are the pods of workers that were lost. So every deletion can be explained after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

from elasticctl.api.observed.workers import Pod, is_member
from elasticctl.api.spec import CleanPodPolicy, ElasticJob, PodPhase
from elasticctl.api.status import Cause, GroupGeneration, JobStatus, Phase, WorkerStatus
from elasticctl_controller.core.causes import is_lost
from elasticctl_controller.core.failure_budget import paused_until
from elasticctl_controller.core.observation import ClusterView, Observed, WorkerMoves
from elasticctl_controller.core.phase import DEADLINE_EXCEEDED, FINISHING, PhaseDecision
from elasticctl_controller.core.workers import (
    FINISHED,
    SCALED_IN,
    SUSPENDED,
    Roster,
    free_indices,
    is_active,
    stays,
    worker_index,
)

MAX_CREATES = 500  # per pass, to keep passes short


@dataclass(frozen=True, slots=True)
class CreateWorker:
    """Create the pod (and Service) with this index: on `node` if one is named, on none of the nodes to `avoid`, and on
    a machine of `pool` if the job's plan or order of pools names one.
    """

    index: int
    node: str = ""
    avoid: tuple[str, ...] = ()
    pool: str = ""


@dataclass(frozen=True, slots=True)
class DeleteWorker:
    """Delete the pod with this uid; `force` skips the grace period (its node is gone, or it has ended)."""

    name: str
    uid: str
    force: bool = False


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job object: its time to live has passed."""


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event about the job; `type` is "Normal" or "Warning", and `worker` the worker concerned, if any."""

    type: str
    reason: str
    message: str
    worker: str = ""


Action = CreateWorker | DeleteWorker | DeleteJob


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. The loop writes `status` first, and runs `actions` only if that write succeeded.

    `requeue_s`: reconcile again after this many seconds even if nothing changes (None: no need). `unexplained`: a pod
    that has not started for a reason that only events give.
    """

    status: JobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_s: float | None = None
    unexplained: Pod | None = None


def mark_removals(
    job: ElasticJob,
    roster: Roster,
    decision: PhaseDecision,
    moves: WorkerMoves,
) -> tuple[WorkerStatus, ...]:
    """Return the workers, with a mark on each one that has to go. Marks stay, because the deletion may be under way.

    When there are too many workers, those that `moves` names to leave go first; workers that move go and are replaced.
    """
    if decision.phase.terminal:
        return _mark(roster.workers, FINISHED, lambda worker: _is_cleaned_up(job, roster, decision, worker))
    if decision.phase is Phase.SUSPENDED:
        return _mark(roster.workers, SUSPENDED, is_active)
    named = {(ref.name, ref.uid) for ref in job.remove_workers}
    workers = _mark(roster.workers, SCALED_IN, lambda worker: is_active(worker) and (worker.name, worker.uid) in named)
    if decision.reason == FINISHING:
        return workers
    workers = _mark(workers, SCALED_IN, lambda worker: is_active(worker) and worker.uid in moves.moves)
    surplus = _surplus(workers, job.desired, job.status.generations[-1:], moves.leave)
    return _mark(workers, SCALED_IN, lambda worker: worker.uid in surplus)


def list_deletions(job: ElasticJob, roster: Roster, cluster: ClusterView, terminal: bool) -> tuple[DeleteWorker, ...]:
    """List the pods to delete: of workers that the *stored* status marks for removal, or has as failed or lost.

    A pod that is already terminating is left alone unless its node is lost, because then it never finishes. After the
    job has ended only marked workers are deleted: the others are left for inspection.
    """
    pods = [
        roster.pods[worker.uid]
        for worker in job.status.workers
        if worker.uid in roster.pods and (worker.removal or (not terminal and needs_replacing(worker)))
    ]
    found = [
        DeleteWorker(pod.name, pod.uid, force=lost or pod.ended)
        for pod, lost in ((pod, is_lost(pod, cluster.lost_nodes)) for pod in pods)
        if lost or not pod.deleting
    ]
    return tuple(sorted(found, key=lambda item: (item.name, item.uid)))


def needs_replacing(worker: WorkerStatus) -> bool:
    """True for a worker that has ended without success: its pod only occupies the name of its successor."""
    return worker.cause is not None and worker.cause is not Cause.COMPLETED


def _mark(
    workers: tuple[WorkerStatus, ...], removal: str, chosen: Callable[[WorkerStatus], bool]
) -> tuple[WorkerStatus, ...]:
    return tuple(replace(w, removal=removal) if not w.removal and chosen(w) else w for w in workers)


def _surplus(
    workers: Iterable[WorkerStatus], desired: int, newest: Iterable[GroupGeneration], leave: Collection[str]
) -> frozenset[str]:
    """The uids of the workers above the desired number.

    First those in `leave`, then workers that do not run yet, then those that are not in the `newest` generation (they
    would take seconds to replace a removed member, whose place would stay empty for that long), then the highest index.
    Workers that have to leave anyway are not chosen, unless no worker is to stay.
    """
    active = [worker for worker in workers if stays(worker) or (desired == 0 and is_active(worker))]
    if len(active) <= desired:
        return frozenset()
    active.sort(
        key=lambda worker: (
            worker.uid not in leave,
            worker.phase == PodPhase.RUNNING,
            any(is_member(worker, generation) for generation in newest),
            -worker.index,
            worker.uid,
        )
    )
    return frozenset(worker.uid for worker in active[: len(active) - desired])


def _is_cleaned_up(job: ElasticJob, roster: Roster, decision: PhaseDecision, worker: WorkerStatus) -> bool:
    """`cleanPodPolicy`: `None` keeps the workers of a job that ended by itself, but not of a job that was stopped."""
    pod = roster.pods.get(worker.uid)
    if pod is None:
        return False
    stopped = decision.phase is Phase.CANCELLED or decision.reason == DEADLINE_EXCEEDED
    if job.clean_pod_policy is CleanPodPolicy.ALL:
        return True
    return not (pod.ended or pod.has_stopped) and (stopped or job.clean_pod_policy is CleanPodPolicy.RUNNING)


def list_creations(
    job: ElasticJob, roster: Roster, observed: Observed, moves: WorkerMoves, status: JobStatus, now: float
) -> tuple[CreateWorker, ...]:
    """Create missing workers at the lowest free indices.

    The pod of an ended worker is deleted within a pass or two, so the next worker waits for its index rather than use a
    new one. Workers that have to go but still run are replaced immediately, above the maximum if need be, except on a
    shared cluster, which has no room for that. The name of an ended pod that a finalizer keeps is given up. A name that
    a foreign pod had is tried again when that is due, if no other is free.
    """
    backing_off = paused_until(job, status, now) is not None
    if status.phase.terminal or status.phase is Phase.SUSPENDED or status.reason == FINISHING or backing_off:
        return ()
    live = sum(not pod.ended for pod in roster.pods.values())
    replaced = sum(
        needs_replacing(w) and w.uid in roster.pods and not roster.pods[w.uid].deleting for w in status.workers
    )
    cluster = observed.cluster
    extra = 0 if observed.share is not None else _count_going(roster, observed, moves, status)
    wanted = min(job.desired - sum(map(stays, status.workers)) - replaced, job.max + extra - live, MAX_CREATES)
    if wanted <= 0:
        return ()
    kept = sum(pod.ended and pod.deleting and bool(pod.finalizer) for pod in cluster.pods)
    most, present = job.max + extra + kept, {pod.name for pod in cluster.pods}
    again = (worker_index(job.name, name) for name, is_due in cluster.taken.items() if is_due and name not in present)
    candidates = (*free_indices(job, cluster, most), *sorted(i for i in again if i is not None and i < most))
    indices = candidates[:wanted]
    if job.goal is not None or job.pools is not None:
        pairs = zip(indices, moves.pools, strict=False)  # a worker without a pool is created in a later pass
        return tuple(CreateWorker(index, avoid=cluster.avoid, pool=pool) for index, pool in pairs)
    # Workers that are already waiting were created for the first of the nodes.
    nodes = (("",) * len(indices) + moves.nodes)[len(moves.nodes) :]
    return tuple(CreateWorker(index, node, cluster.avoid) for index, node in zip(indices, nodes, strict=True))


def _count_going(roster: Roster, observed: Observed, moves: WorkerMoves, status: JobStatus) -> int:
    """How many running workers have to go, because their pods are deleted by others or their nodes are taken away, or
    because they will make room for others.
    """
    ours = {worker.uid for worker in status.workers if worker.removal}
    pods = (pod for uid, pod in roster.pods.items() if uid not in ours and not pod.ended)
    going, lost_nodes = {*observed.cluster.notices, *moves.moves_to}, observed.cluster.lost_nodes
    return sum(not is_lost(pod, lost_nodes) and (pod.deleting or pod.uid in going) for pod in pods)
