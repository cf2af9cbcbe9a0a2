"""Which workers we remove, and why: marked on the roster first, deleted once the mark is stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from elasticctl.api.spec import CleanPodPolicy, ElasticJob, Pod, PodPhase
from elasticctl.api.status import Cause, GroupGeneration, Phase, WorkerStatus
from elasticctl_controller.core.actions import DeleteWorker, Observed
from elasticctl_controller.core.classify import is_lost
from elasticctl_controller.core.phase import DEADLINE_EXCEEDED, FINISHING, PhaseDecision
from elasticctl_controller.core.workers import FINISHED, SCALED_IN, SUSPENDED, Roster, is_active, is_member


def mark_removals(
    job: ElasticJob,
    roster: Roster,
    decision: PhaseDecision,
    leave: Collection[str] = (),
    moves: Collection[str] = (),
) -> tuple[WorkerStatus, ...]:
    """Return the roster with every worker marked that has to go. A mark is never taken back: it may be under way.

    Where there are too many, the uids in `leave` go first; those in `moves` go though others are made for them.
    """
    if decision.phase.terminal:
        return _mark(roster.workers, FINISHED, lambda worker: _falls_under_clean_policy(job, roster, decision, worker))
    if decision.phase is Phase.SUSPENDED:
        return _mark(roster.workers, SUSPENDED, is_active)
    named = {(ref.name, ref.uid) for ref in job.remove_workers}
    workers = _mark(roster.workers, SCALED_IN, lambda worker: is_active(worker) and (worker.name, worker.uid) in named)
    if decision.reason == FINISHING:
        return workers
    workers = _mark(workers, SCALED_IN, lambda worker: is_active(worker) and worker.uid in moves)
    surplus = _surplus(workers, job.desired, job.status.generations[-1:], leave)
    return _mark(workers, SCALED_IN, lambda worker: worker.uid in surplus)


def list_deletions(job: ElasticJob, roster: Roster, observed: Observed, terminal: bool) -> tuple[DeleteWorker, ...]:
    """Delete what the *stored* roster says is to go: marked workers, and the remains of ended ones.

    A pod that is terminating already is left to it, unless its node cannot finish the job. Of a job that is over only
    marked workers go: the others stay for a look at them.
    """
    pods = [
        roster.pods[worker.uid]
        for worker in job.status.workers
        if worker.uid in roster.pods and (worker.removal or (not terminal and is_spent(worker)))
    ]
    found = (_deletion(pod, is_lost(pod, observed.lost_nodes)) for pod in pods)
    return tuple(sorted((item for item in found if item is not None), key=lambda item: (item.name, item.uid)))


def is_spent(worker: WorkerStatus) -> bool:
    """True for a worker that has ended without success: its pod only stands in the way of the next."""
    return worker.cause is not None and worker.cause is not Cause.COMPLETED


def _deletion(pod: Pod, lost: bool) -> DeleteWorker | None:
    return None if pod.deleting and not lost else DeleteWorker(pod.name, pod.uid, force=lost or pod.ended)


def _mark(
    workers: tuple[WorkerStatus, ...], removal: str, chosen: Callable[[WorkerStatus], bool]
) -> tuple[WorkerStatus, ...]:
    return tuple(replace(w, removal=removal) if not w.removal and chosen(w) else w for w in workers)


def _surplus(
    workers: Iterable[WorkerStatus], desired: int, newest: Iterable[GroupGeneration], leave: Collection[str]
) -> frozenset[str]:
    """The uids of those to remove: first the ones in `leave`, then workers that do not run yet, then those that are
    not in the `newest` group of ranks (their imports take seconds, in which nobody would train), then the highest
    index.
    """
    active = sorted(
        (worker for worker in workers if is_active(worker)),
        key=lambda worker: (
            worker.uid not in leave,
            worker.phase == PodPhase.RUNNING,
            any(is_member(worker, generation) for generation in newest),
            -worker.index,
            worker.uid,
        ),
    )
    return frozenset(worker.uid for worker in active[: max(0, len(active) - desired)])


def _falls_under_clean_policy(job: ElasticJob, roster: Roster, decision: PhaseDecision, worker: WorkerStatus) -> bool:
    """cleanPodPolicy; None keeps the workers of a job that ended by itself, not of one that was told to stop."""
    pod = roster.pods.get(worker.uid)
    if pod is None:
        return False
    stopped = decision.phase is Phase.CANCELLED or decision.reason == DEADLINE_EXCEEDED
    if job.clean_pod_policy is CleanPodPolicy.ALL:
        return True
    return not (pod.ended or pod.has_stopped) and (stopped or job.clean_pod_policy is CleanPodPolicy.RUNNING)
