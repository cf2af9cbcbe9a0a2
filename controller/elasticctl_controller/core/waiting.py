"""What the wanted workers that do not run wait for, in the words of who makes them wait, as a condition of the job.

Pods that the API server refuses come first, for there is nothing in the cluster that would tell of them; then names
that are taken, schedulers that never look at a pod, and what the cluster says of the first pod that waits.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticctl.api.observed.workers import FAILED_CREATE, NAME_TAKEN, NO_SCHEDULER, Pod, PodWait
from elasticctl.api.spec import ElasticJob, PodPhase, worker_name
from elasticctl.api.status import Condition, ConditionType, WorkerStatus
from elasticctl_controller.core.actions import Observed
from elasticctl_controller.core.phase import find_condition, put_condition
from elasticctl_controller.core.workers import Roster, is_active, worker_index

NOT_WAITING = "AllWorkersStart"
LOOKED_AT_S = 10.0
"""A scheduler that runs looks at a pod within milliseconds, or, when it has a thousand to place, within seconds."""
MAX_MESSAGE_CHARS = 700
"""A scheduler names a reason for each group of nodes, and the condition is written with each status."""


def decide_wait(
    job: ElasticJob, roster: Roster, observed: Observed, workers: Collection[WorkerStatus], now: float
) -> PodWait | None:
    """What the first of the workers waits for that are wanted and do not run; None if there is nothing to say.

    `workers` are the job's as of this pass. What an earlier pass was refused holds until one creates a worker.
    """
    active = [worker for worker in workers if is_active(worker)]
    if len(active) < job.desired:
        wait = _refused(job, observed) or _taken(job, roster, observed, job.desired - len(active))
        if wait is not None:
            return PodWait(wait.reason, wait.message[:MAX_MESSAGE_CHARS])
    pending = [roster.pods[w.uid] for w in active if w.phase == PodPhase.PENDING and w.uid in roster.pods]
    for pod in pending:
        if pod.wait is not None:
            words = f"{pod.name}: {pod.wait.message}" if pod.wait.message else pod.name
            return PodWait(pod.wait.reason, words[:MAX_MESSAGE_CHARS])
    ignored = next((pod for pod in pending if _ignored_at(pod) <= now), None)
    if ignored is None:
        return None
    return PodWait(NO_SCHEDULER, f'{ignored.name}: its scheduler "{ignored.scheduler}" has not looked at it')


def update_waiting(conditions: tuple[Condition, ...], wait: PodWait | None, now: float) -> tuple[Condition, ...]:
    """The conditions with what the workers wait for; a job whose workers have never waited has no such condition."""
    kind = ConditionType.WORKERS_WAITING
    if wait is not None:
        return put_condition(conditions, kind, "True", wait.reason, wait.message, now)
    if find_condition(conditions, kind) is None:
        return conditions
    return put_condition(conditions, kind, "False", NOT_WAITING, "", now)


def next_ignored_at(roster: Roster, now: float) -> float | None:
    """When it will be said of another pod that no scheduler looks at it, in seconds since the epoch."""
    times = (_ignored_at(pod) for pod in roster.pods.values() if pod.phase is PodPhase.PENDING)
    return min((at for at in times if now < at < float("inf")), default=None)


def _refused(job: ElasticJob, observed: Observed) -> PodWait | None:
    stored = find_condition(job.status.conditions, ConditionType.WORKERS_WAITING)
    if observed.refused:
        return PodWait(FAILED_CREATE, observed.refused)
    if observed.refused is None and stored is not None and (stored.status, stored.reason) == ("True", FAILED_CREATE):
        return PodWait(FAILED_CREATE, stored.message)
    return None


def _taken(job: ElasticJob, roster: Roster, observed: Observed, missing: int) -> PodWait | None:
    """A stranger's pod that has a worker's name, if too few names are left for the workers that are missing.

    The pods of an earlier job of this name are about to go, and not worth a word.
    """
    strangers = [pod for pod in observed.pods if pod.uid not in roster.pods and _is_stranger(job, pod)]
    if not strangers:
        return None
    taken = {pod.name for pod in observed.pods}
    if sum(worker_name(job.name, index) not in taken for index in range(job.max)) >= missing:
        return None
    first = min(strangers, key=lambda pod: (worker_index(job.name, pod.name) or 0, pod.name))
    return PodWait(NAME_TAKEN, f"pod {first.name} has a worker's name and does not belong to this job")


def _is_stranger(job: ElasticJob, pod: Pod) -> bool:
    if pod.deleting or worker_index(job.name, pod.name) is None or pod.owner_uid == job.uid:
        return False
    newer = job.created_at is not None and pod.created_at is not None and pod.created_at > job.created_at
    return newer or not pod.owner_uid


def _ignored_at(pod: Pod) -> float:
    """When a pod that no scheduler has looked at counts as ignored."""
    if not pod.scheduler or pod.considered or pod.node or pod.deleting or pod.created_at is None:
        return float("inf")
    return pod.created_at + LOOKED_AT_S
