"""The condition `WorkersWaiting`: what keeps wanted workers from running, in the cluster's own words where it has any.

Pods that the API server refuses come first, because nothing else in the cluster shows them. Names that are taken and
former workers that are still ending follow, then what the cluster says about the first waiting pod, in its status or in
events about it, and schedulers that never process a pod.
"""

from __future__ import annotations

from collections.abc import Collection

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.observed.workers import (
    FAILED_CREATE,
    MOUNTS,
    NAME_TAKEN,
    NO_SCHEDULER,
    STILL_ENDING,
    UNSCHEDULABLE,
    Pod,
    PodWait,
)
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import Condition, ConditionType, WorkerStatus
from elasticctl.api.text import plural, shorten
from elasticctl_controller.core.observation import ClusterView
from elasticctl_controller.core.phase import find_condition, put_condition
from elasticctl_controller.core.workers import Roster, free_indices, is_active, worker_index

NOT_WAITING = "AllWorkersStart"
PROCESSED_S = 10.0
"""A scheduler that runs processes a pod within milliseconds, or, when it has a thousand to place, within seconds."""
MAX_MESSAGE_CHARS = 700
"""A scheduler names a reason for each group of nodes, and the condition is written with each status."""
MAX_SCHEDULER_CHARS = 400
"""The scheduler's part of the message if an autoscaler has said something as well."""
UNEXPLAINED_S = 5.0
"""How long a pod may take to start before the controller asks for events about it; most start sooner."""


def decide_wait(
    job: ElasticJob, roster: Roster, cluster: ClusterView, workers: Collection[WorkerStatus], now: float
) -> PodWait | None:
    """What the first wanted worker that does not run is waiting for; None if there is nothing to report.

    `workers` are the job's workers as of this pass. A refusal in an earlier pass holds until a worker is created.
    """
    active = [worker for worker in workers if is_active(worker)]
    if len(active) < job.desired:
        missing = job.desired - len(active)
        wait = _refused(job, cluster) or _taken(job, roster, cluster, missing)
        wait = wait or _still_ending(job, roster, cluster, workers, missing)
        if wait is not None:
            return PodWait(wait.reason, wait.message[:MAX_MESSAGE_CHARS])
    pending = _pending(roster, workers)
    for pod in pending:
        if pod.wait is not None:
            return PodWait(pod.wait.reason, _with_autoscaler(job, cluster, pod, pod.wait)[:MAX_MESSAGE_CHARS])
    for pod in pending:
        wait = _from_events(job, cluster, pod)
        if wait is not None:
            return PodWait(wait.reason, wait.message[:MAX_MESSAGE_CHARS])
    ignored = next((pod for pod in pending if _ignored_at(pod) <= now), None)
    if ignored is None:
        return None
    return PodWait(NO_SCHEDULER, f'{ignored.name}: its scheduler "{ignored.scheduler}" has not processed it')


def find_unexplained(roster: Roster, workers: Collection[WorkerStatus]) -> Pod | None:
    """The first pod whose reason for waiting only events give: a machine, or what its node cannot mount."""
    pending = _pending(roster, workers)
    first = next((pod for pod in pending if pod.wait is not None), None)
    if first is not None:
        return first if first.wait is not None and first.wait.reason == UNSCHEDULABLE else None
    return next((pod for pod in pending if pod.node), None)


def unexplained_at(pod: Pod) -> float:
    """When to ask for events about a waiting pod, in seconds since the epoch."""
    begins = [at for at in (pod.created_at, pod.started_at) if at is not None]
    return max(begins, default=0.0) + UNEXPLAINED_S


def update_waiting(conditions: tuple[Condition, ...], wait: PodWait | None, now: float) -> tuple[Condition, ...]:
    """The conditions, with what workers are waiting for. A job whose workers have never waited has no such
    condition."""
    kind = ConditionType.WORKERS_WAITING
    if wait is not None:
        return put_condition(conditions, kind, "True", wait.reason, wait.message, now)
    if find_condition(conditions, kind) is None:
        return conditions
    return put_condition(conditions, kind, "False", NOT_WAITING, "", now)


def next_ignored_at(roster: Roster, now: float) -> float | None:
    """When another pod will count as ignored by its scheduler, in seconds since the epoch."""
    times = (_ignored_at(pod) for pod in roster.pods.values() if pod.phase is PodPhase.PENDING)
    return min((at for at in times if now < at < float("inf")), default=None)


def _refused(job: ElasticJob, cluster: ClusterView) -> PodWait | None:
    stored = find_condition(job.status.conditions, ConditionType.WORKERS_WAITING)
    if cluster.refused:
        return PodWait(FAILED_CREATE, cluster.refused)
    if cluster.refused is None and stored is not None and (stored.status, stored.reason) == ("True", FAILED_CREATE):
        return PodWait(FAILED_CREATE, stored.message)
    return None


def _taken(job: ElasticJob, roster: Roster, cluster: ClusterView, missing: int) -> PodWait | None:
    """A foreign pod that has a worker's name, if too few names are left for the missing workers.

    Pods of an earlier job of this name are about to go, and are not reported.
    """
    foreign = [pod for pod in cluster.pods if pod.uid not in roster.pods and _is_foreign(job, pod)]
    names = {*cluster.taken, *(pod.name for pod in foreign)}
    if not names:
        return None
    if sum(1 for _ in free_indices(job, cluster, job.max)) >= missing:
        return None
    first = min(names, key=lambda name: (worker_index(job.name, name) or 0, name))
    return PodWait(NAME_TAKEN, f"pod {first} has a worker's name and does not belong to this job")


def _still_ending(
    job: ElasticJob, roster: Roster, cluster: ClusterView, workers: Collection[WorkerStatus], missing: int
) -> PodWait | None:
    """Former workers of this job, or of an earlier job of its name, that are still ending and leave no room for new
    ones."""
    ending = [
        pod for pod in cluster.pods if pod.deleting and not pod.ended and worker_index(job.name, pod.name) is not None
    ]
    removed = {worker.uid for worker in workers if worker.removal}
    going = sum(pod.uid in roster.pods and pod.uid not in removed for pod in ending)  # they are replaced immediately
    live = sum(not pod.ended for pod in roster.pods.values()) - going
    free = sum(1 for _ in free_indices(job, cluster, job.max + going))
    if not ending or missing <= min(free, job.max - live):
        return None
    last = max(pod.deadline or 0.0 for pod in ending)
    until = f", until {to_rfc3339(last)[:19]}Z at the latest" if last else ""
    names = ending[0].name if len(ending) == 1 else plural(len(ending), "former worker")
    return PodWait(STILL_ENDING, f"{names} {'is' if len(ending) == 1 else 'are'} still ending{until}")


def _pending(roster: Roster, workers: Collection[WorkerStatus]) -> list[Pod]:
    """The pods of active workers that have not started, in the workers' order."""
    waiting = (w for w in workers if is_active(w) and w.phase == PodPhase.PENDING and w.uid in roster.pods)
    return [roster.pods[worker.uid] for worker in waiting]


def _with_autoscaler(job: ElasticJob, cluster: ClusterView, pod: Pod, wait: PodWait) -> str:
    """The pod and what it waits for, with what an autoscaler says about it."""
    words = f"{pod.name}: {wait.message}" if wait.message else pod.name
    if wait.reason != UNSCHEDULABLE:
        return words
    before = f"{shorten(words, MAX_SCHEDULER_CHARS).removesuffix('.')}; "
    if pod.uid not in cluster.events:  # not asked yet, by this controller
        stored = find_condition(job.status.conditions, ConditionType.WORKERS_WAITING)
        return stored.message if stored is not None and stored.message.startswith(before) else words
    found = cluster.events[pod.uid]
    return words if found is None else f"{before}{found.message}"


def _from_events(job: ElasticJob, cluster: ClusterView, pod: Pod) -> PodWait | None:
    """What events say about a waiting pod that has its node."""
    if not pod.node:
        return None
    found = cluster.events.get(pod.uid)
    if found is not None:
        return PodWait(found.reason, f"{pod.name}: {found.message}")
    stored = find_condition(job.status.conditions, ConditionType.WORKERS_WAITING)
    if pod.uid in cluster.events or stored is None or stored.status != "True" or stored.reason not in MOUNTS:
        return None
    return PodWait(stored.reason, stored.message) if stored.message.startswith(f"{pod.name}: ") else None


def _is_foreign(job: ElasticJob, pod: Pod) -> bool:
    if pod.deleting or worker_index(job.name, pod.name) is None or pod.owner_uid == job.uid:
        return False
    newer = job.created_at is not None and pod.created_at is not None and pod.created_at > job.created_at
    return newer or not pod.owner_uid


def _ignored_at(pod: Pod) -> float:
    """When a pod that no scheduler has processed counts as ignored."""
    if not pod.scheduler or pod.considered or pod.node or pod.deleting or pod.created_at is None:
        return float("inf")
    return pod.created_at + PROCESSED_S
