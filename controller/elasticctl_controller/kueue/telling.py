"""What Kueue is told through a Workload's status, as merge patches; pure.

A merge patch replaces the list of conditions as a whole. So each is made from the conditions that were read, and names
the version that they were read at: the server refuses it if anything has changed since.
"""

from __future__ import annotations

from elasticctl.codec import Manifest, to_rfc3339
from elasticctl.podtemplate import at
from elasticctl.spec import ElasticJob
from elasticctl.status import Phase
from elasticctl_controller.kueue.model import (
    ADMITTED,
    EVICTED,
    FINISHED,
    PODS_READY,
    QUOTA,
    REQUEUED,
    TRUE,
    condition,
    is_active,
    is_true,
)

_KUEUE_REQUEUES = ("PodsReadyTimeout", "ClusterQueueStopped", "LocalQueueStopped")
"""Evictions of which Kueue itself says when they are over; so it does of those by an admission check with a time."""
_PENDING = "Pending"
_NO_RESERVATION = "NoReservation"


def released(workload: Manifest, now: float) -> Manifest:
    """Its workers are gone: the quota is Kueue's again, and the Workload waits in the queue as before."""
    evicted = condition(workload, EVICTED)
    message = str(evicted.get("message") or "the job's workers are gone")
    changes = [_condition(QUOTA, False, _PENDING, message)]
    if condition(workload, ADMITTED):
        changes.append(_condition(ADMITTED, False, _NO_RESERVATION, "the workload has no reservation"))
    if condition(workload, PODS_READY):
        changes.append(_condition(PODS_READY, False, PODS_READY, "the job's workers are gone"))
    if is_true(workload, EVICTED):
        changes.append(_condition(REQUEUED, _is_requeued(workload), str(evicted.get("reason") or _PENDING), message))
    return _patch(workload, changes, now, admission=None)


def finished(workload: Manifest, job: ElasticJob, now: float) -> Manifest:
    """The job has ended."""
    reason = "Succeeded" if job.status.phase is Phase.SUCCEEDED else "Failed"
    return _patch(workload, [_condition(FINISHED, True, reason, job.status.message)], now)


def ready(workload: Manifest, now: float) -> Manifest:
    """Enough workers run. Kueue may be set to take the quota back from who does not say so in time."""
    return _patch(workload, [_condition(PODS_READY, True, PODS_READY, "the job's minimum of workers runs")], now)


def _is_requeued(workload: Manifest) -> bool:
    """Whether it may be admitted again at once; otherwise Kueue says when."""
    reason = str(condition(workload, EVICTED).get("reason") or "")
    timed = reason == "AdmissionCheck" and at(workload, "status", "requeueState", "requeueAt") is not None
    return is_active(workload) and reason not in _KUEUE_REQUEUES and not timed


def _condition(type_: str, holds: bool, reason: str, message: str) -> Manifest:
    return {"type": type_, "status": TRUE if holds else "False", "reason": reason, "message": message}


def _patch(workload: Manifest, changes: list[Manifest], now: float, **status: None) -> Manifest:
    metadata = workload["metadata"]
    conditions = {item["type"]: item for item in at(workload, "status", "conditions") or ()}
    for change in changes:
        before = conditions.get(change["type"], {})
        turned = before.get("status") != change["status"]
        since = to_rfc3339(float(int(now))) if turned else before.get("lastTransitionTime")
        generation = metadata.get("generation", 0)
        conditions[change["type"]] = {**change, "lastTransitionTime": since, "observedGeneration": generation}
    return {
        "metadata": {"resourceVersion": metadata["resourceVersion"]},
        "status": {**status, "conditions": list(conditions.values())},
    }
