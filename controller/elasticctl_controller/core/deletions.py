"""Which workers are removed, and which pods are deleted.

A worker that has to go is first marked in the status (`mark_removals`). Its pod is deleted once the mark is stored
(`list_deletions`), and so are the pods of workers that were lost. So every deletion can be explained after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from elasticctl.api.observed.workers import is_member
from elasticctl.api.spec import CleanPodPolicy, ElasticJob, PodPhase
from elasticctl.api.status import Cause, GroupGeneration, Phase, WorkerStatus
from elasticctl_controller.core.actions import DeleteWorker
from elasticctl_controller.core.causes import is_lost
from elasticctl_controller.core.observation import ClusterView, WorkerMoves
from elasticctl_controller.core.phase import DEADLINE_EXCEEDED, FINISHING, PhaseDecision
from elasticctl_controller.core.workers import FINISHED, SCALED_IN, SUSPENDED, Roster, is_active, stays


def mark_removals(
    job: ElasticJob,
    roster: Roster,
    decision: PhaseDecision,
    moves: WorkerMoves,
) -> tuple[WorkerStatus, ...]:
    """Return the workers, with a mark on each one that has to go. Marks stay, because the deletion may be under way.

    When there are too many workers, those that `moves` names to leave go first; those that move go and are replaced.
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
    would take seconds to replace a removed member, and nobody would train in its place), then the highest index.
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
