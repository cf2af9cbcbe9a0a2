"""The roster: which workers a job has, and which of them have ended since the last pass.

`status.workers` identifies each worker by the uid of its pod, so that every end is counted exactly once: it is stored
in the status before the pod is deleted, and a pod that vanishes is noticed because its worker is still listed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from elasticctl.api.codec import Timestamp
from elasticctl.api.observed.workers import TERMINATING, Pod
from elasticctl.api.spec import ElasticJob, PodPhase, worker_name
from elasticctl.api.status import Cause, JobStatus, RankFailure, WorkerStatus
from elasticctl_controller.core.causes import Loss, classify, classify_vanished, ended_at, is_explained, read_failure
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.core.observation import ClusterView, Observed

SCALED_IN, SUSPENDED, FINISHED = "ScaledIn", "Suspended", "Finished"  # values of WorkerStatus.removal
SILENT_MESSAGE = '{"verdict": "stuck", "error": "it did not answer when the group formed again"}'


@dataclass(frozen=True, slots=True)
class WorkerEnd:
    """A worker's end, observed for the first time.

    `lived_s` is from its start (its creation if it never started) to its end; None when neither is known.
    """

    worker: WorkerStatus
    cause: Cause
    at: Timestamp
    lived_s: float | None = None
    exit_code: int | None = None
    failure: RankFailure = RankFailure()


@dataclass(frozen=True, slots=True)
class Roster:
    """A job's workers in this pass: their new status, their pods by uid, and the ends that are new.

    `explained`: uids of workers that were counted as unresponsive and whose nodes have now turned out to be lost.
    """

    workers: tuple[WorkerStatus, ...]
    pods: Mapping[str, Pod]
    ends: tuple[WorkerEnd, ...]
    explained: frozenset[str]


def update_roster(job: ElasticJob, observed: Observed, moves_to: Mapping[str, str], now: float) -> Roster:
    """Compare the stored workers with the observed pods; the order of pods makes no difference.

    `moves_to` is the better pool that a worker will make room for, by uid.
    """
    lost_nodes = observed.cluster.lost_nodes
    known = {worker.uid: worker for worker in job.status.workers if worker.uid}
    explained = frozenset(uid for uid, worker in known.items() if is_explained(worker, lost_nodes))
    known |= {uid: replace(known[uid], cause=Cause.NODE_LOST) for uid in explained}
    own = own_pods(job, observed.cluster.pods)
    unresponsive = {uid for uid, pod in own.items() if uid in observed.group.silent and not pod.ended}
    pods = {uid: _as_ended(pod) if uid in unresponsive else pod for uid, pod in own.items()}
    notices = observed.cluster.notices
    present = {
        uid: _update_worker(known.get(uid), pod, job, notices.get(uid), moves_to.get(uid, ""))
        for uid, pod in pods.items()
    }
    ends = _ends_of_vanished(known, pods, lost_nodes, now)
    ends += _ends_of_pods(present, pods, lost_nodes, _past_losses(job.status) + _losses(ends), now)
    ends = [_as_unresponsive(end) if end.worker.uid in unresponsive else end for end in ends]
    closed = {end.worker.uid: replace(end.worker, cause=end.cause, ended_at=end.at) for end in ends}
    # A completed worker stays listed when its pod is gone: it is why the job is about to succeed.
    completed = {uid: w for uid, w in (known | closed).items() if w.cause is Cause.COMPLETED and uid not in pods}
    workers = completed | {uid: closed.get(uid, worker) for uid, worker in present.items()}
    return Roster(tuple(sorted(workers.values(), key=_order)), pods, tuple(ends), explained)


def own_pods(job: ElasticJob, pods: Iterable[Pod]) -> dict[str, Pod]:
    """The pods of this job by uid. Decided by owner and name: labels can be edited, names cannot."""
    return {
        pod.uid: pod
        for pod in pods
        if pod.uid and pod.owner_uid and pod.owner_uid == job.uid and worker_index(job.name, pod.name) is not None
    }


def owner_uid(pod: Mapping[str, Any]) -> str:
    """The uid of what controls a pod, such as its job, from a manifest of ours; "" if nothing does."""
    owners = pod["metadata"].get("ownerReferences", ())
    return next((str(ref["uid"]) for ref in owners if ref.get("controller") is True), "")


def worker_index(job: str, pod: str) -> int | None:
    """The index in a worker's name; None if no worker of this job has such a name."""
    tail = pod.removeprefix(worker_name(job, 0)[:-1])
    if not (tail.isascii() and tail.isdigit() and len(tail) < 6):
        return None
    return int(tail) if worker_name(job, int(tail)) == pod else None


def free_indices(job: ElasticJob, cluster: ClusterView, most: int) -> Iterator[int]:
    """The indices below `most` whose worker's name no pod has, lowest first.

    Terminating pods have their names, and so have pods of others, whether they are observed or only known to exist.
    """
    taken = {pod.name for pod in cluster.pods} | cluster.taken.keys()
    return (index for index in range(most) if worker_name(job.name, index) not in taken)


def is_active(worker: WorkerStatus) -> bool:
    """True for a worker that has not ended and is not being removed."""
    return worker.cause is None and not worker.removal


def stays(worker: WorkerStatus) -> bool:
    """True for an active worker that has no notice to leave and does not have to make room for another."""
    return is_active(worker) and not worker.notice and not worker.moves_to


def count_kept(workers: Collection[WorkerStatus], desired: int) -> int:
    """How many of `workers` count towards the desired number. One that has to leave counts until it is replaced."""
    staying = sum(map(stays, workers))
    return staying + min(sum(map(is_active, workers)) - staying, max(0, desired - staying))


def completed_at(workers: Iterable[WorkerStatus]) -> Timestamp | None:
    """When the first worker completed; None if none has."""
    return min((w.ended_at for w in workers if w.cause is Cause.COMPLETED and w.ended_at is not None), default=None)


def _update_worker(
    worker: WorkerStatus | None, pod: Pod, job: ElasticJob, notice: LeaveNotice | None, moves_to: str
) -> WorkerStatus:
    known = worker or WorkerStatus(name=pod.name, uid=pod.uid, index=worker_index(job.name, pod.name) or 0)
    return replace(
        known,
        notice=notice.reason if notice is not None else "",
        moves_to=moves_to,
        phase=TERMINATING if pod.deleting and not pod.ended else pod.phase.value,
        node=pod.node or known.node,
        pool=pod.pool or known.pool,
        started_at=known.started_at if pod.started_at is None else pod.started_at,
    )


def _ends_of_vanished(
    known: Mapping[str, WorkerStatus], pods: Mapping[str, Pod], lost_nodes: Collection[str], now: float
) -> list[WorkerEnd]:
    gone = [worker for uid, worker in known.items() if uid not in pods and worker.cause is None]
    return [
        WorkerEnd(worker, classify_vanished(worker, lost_nodes), Timestamp(now), _lived_s(worker.started_at, now))
        for worker in sorted(gone, key=_order)
    ]


def _ends_of_pods(
    present: Mapping[str, WorkerStatus],
    pods: Mapping[str, Pod],
    lost_nodes: Collection[str],
    losses: list[Loss],
    now: float,
) -> list[WorkerEnd]:
    """Classify the pods that have ended: first the clear cases, then cases that a peer's loss may explain."""
    ends: list[WorkerEnd] = []
    unclear: list[Pod] = []
    for uid in sorted(pods, key=lambda uid: _order(present[uid])):
        if present[uid].cause is not None:
            continue
        cause = classify(pods[uid], present[uid], lost_nodes, (), now)
        if cause in (Cause.APPLICATION, Cause.STUCK):
            unclear.append(pods[uid])
        elif cause is not None:
            ends.append(_end(present[uid], pods[uid], cause, now))
    losses = losses + _losses(ends)
    for pod in sorted(unclear, key=lambda pod: (ended_at(pod, now), *_order(present[pod.uid]))):
        cause = classify(pod, present[pod.uid], lost_nodes, losses, now)
        if cause is not None:
            ends.append(_end(present[pod.uid], pod, cause, now))
            losses = losses + _losses(ends[-1:])
    return ends


def _as_ended(pod: Pod) -> Pod:
    """A worker that is alive but no longer answers is treated as ended: it is deleted and replaced."""
    return replace(pod, phase=PodPhase.FAILED, reason="Unresponsive", message=SILENT_MESSAGE)


def _as_unresponsive(end: WorkerEnd) -> WorkerEnd:
    """It may hang, or its node may have died before Kubernetes noticed, so the restart budget is not charged."""
    return replace(end, cause=Cause.UNRESPONSIVE) if end.cause is Cause.STUCK else end


def _end(worker: WorkerStatus, pod: Pod, cause: Cause, now: float) -> WorkerEnd:
    at = ended_at(pod, now)
    return WorkerEnd(
        worker,
        cause,
        at,
        lived_s=_lived_s(pod.created_at if pod.started_at is None else pod.started_at, at),
        exit_code=pod.exit_code,
        failure=read_failure(pod),
    )


def _lived_s(start: Timestamp | None, end: float) -> float | None:
    return None if start is None else max(0.0, end - start)


def _past_losses(status: JobStatus) -> list[Loss]:
    """Losses already stored: interruptions, completed workers, and scaling in, which disturbs the workers that stay.

    An interruption without a uid is not a lost worker: its ranks failed and were restarted in place.
    """
    interruptions = [
        Loss(item.at, item.cause.counted)
        for item in status.interruptions
        if item.at is not None and item.cause is not None and item.cause is not Cause.COLLATERAL and item.uid
    ]
    completed = completed_at(status.workers)
    reductions = [Loss(s.at, False) for s in status.scalings if s.at is not None and s.to_workers < s.from_workers]
    return interruptions + reductions + ([] if completed is None else [Loss(completed, True)])


def _losses(ends: Iterable[WorkerEnd]) -> list[Loss]:
    """The ends that can make peers fail: all except for ends that a peer caused."""
    return [Loss(e.at, e.cause.counted or e.cause is Cause.COMPLETED) for e in ends if e.cause is not Cause.COLLATERAL]


def _order(worker: WorkerStatus) -> tuple[int, str]:
    return worker.index, worker.uid
