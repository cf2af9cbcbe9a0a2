"""What Kueue's answer means for a job, and the one thing to do about it next. Pure.

Level-triggered: each step changes the job or its Workload, and so leads to another look. What has to survive a restart
is on the objects: on the job `suspend`, and by which admission it was started; on the Workload `active`, and Kueue's
conditions. Quota is given back, or asked for anew, once no worker lives.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.podtemplate import at
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Phase
from elasticctl.api.text import joined
from elasticctl_controller.core.kueue.workload import (
    ADMITTED,
    EVICTED,
    FINISHED,
    LEFT,
    POD_SET,
    PODS_READY,
    QUOTA,
    REQUEUED,
    TRUE,
    Step,
    Verdict,
    admitted_workers,
    asks_for,
    asks_for_such_pods,
    condition,
    is_active,
    is_true,
    said,
)


def judge(job: ElasticJob, workload: Manifest | None, pods: int) -> Verdict:
    """The verdict on a job that has a queue; `workload` is its own, `pods` how many of its pods have not ended.

    In this order: a job that has ended, one that its owner has suspended, one without a Workload, one that Kueue has
    closed or leaves aside, eviction, waiting, admission.
    """
    if job.status.phase.terminal:
        unfinished = workload is not None and not is_true(workload, FINISHED)
        return Verdict(step=Step.FINISH if unfinished else None)
    if job.suspend and (job.admitted or job.moving_to or job.moved_to):  # the first is cleared when we suspend it
        return _asleep(workload, pods)
    if workload is None or at(workload, "metadata", "deletionTimestamp") is not None:
        step = Step.CREATE if workload is None else None
        return _held(job, pods, f"is about to be put into Kueue's queue {job.queue}", step)
    if is_true(workload, FINISHED):
        return _held(job, pods, f"will not be admitted: Kueue has closed its Workload{_because(workload, FINISHED)}")
    if not is_active(workload):
        return _left_aside(job, workload, pods)
    if is_true(workload, EVICTED) and is_true(workload, QUOTA):
        words = f"gives its place in Kueue's queue {job.queue} back{_because(workload, EVICTED)}"
        return _held(job, pods, words, Step.RELEASE)
    if not is_true(workload, ADMITTED):
        revise = Step.DELETE if is_true(workload, QUOTA) else Step.UPDATE  # what has quota cannot be changed
        return _held(job, pods, _waiting(job, workload), None if asks_for(job, workload) else revise)
    return _admitted(job, workload, pods)


def _held(job: ElasticJob, pods: int, words: str, step: Step | None = None) -> Verdict:
    """It may not run: suspended first, then without workers, and only then the step."""
    if not job.suspend:
        return Verdict(held=words, step=Step.STOP)
    return Verdict(held=words, step=None if pods else step)


def _asleep(workload: Manifest | None, pods: int) -> Verdict:
    """Its owner has suspended it, or moved it away: others get its quota as soon as its workers are gone."""
    if workload is None or is_true(workload, FINISHED):
        return Verdict()
    if is_active(workload):
        return Verdict(step=Step.DEACTIVATE)
    return Verdict(step=Step.RELEASE if is_true(workload, QUOTA) and not pods else None)


def _left_aside(job: ElasticJob, workload: Manifest, pods: int) -> Verdict:
    """Its Workload is not active: its owner had suspended the job, and goes on; or somebody else does not want it."""
    if at(workload, "metadata", "annotations", LEFT) is not None:
        return Verdict(held=f"goes back into Kueue's queue {job.queue}", step=Step.ACTIVATE)
    words = f"will not be admitted: its Workload {at(workload, 'metadata', 'name')} was deactivated"
    step = Step.RELEASE if is_true(workload, QUOTA) else None
    return _held(job, pods, words + _because(workload, EVICTED), step)


def _admitted(job: ElasticJob, workload: Manifest, pods: int) -> Verdict:
    if not asks_for_such_pods(job, workload):
        words = f"asks for other workers than were admitted, and goes back into Kueue's queue {job.queue}"
        return _held(job, pods, words, Step.DELETE)
    if job.suspend:
        return Verdict(held=f"is admitted to Kueue's queue {job.queue}, and starts", step=Step.START)
    started = job.admitted == at(workload, "metadata", "uid")
    ready = job.status.phase is Phase.RUNNING and not is_true(workload, PODS_READY)
    step = Step.START if not started else Step.READY if ready else None
    return Verdict(workers=admitted_workers(workload), step=step)


def _waiting(job: ElasticJob, workload: Manifest) -> str:
    if is_true(workload, QUOTA):
        checks = at(workload, "status", "admissionChecks")
        missing = [str(at(item, "name")) for item in checks or () if at(item, "state") != "Ready"]
        waits = f"waits for its checks: {joined(missing)}" if missing else "is about to be admitted"
        return f"has quota in Kueue's queue {job.queue}, and {waits}"
    return f"waits to be admitted to Kueue's queue {job.queue}{_because(workload, QUOTA)}"


def _because(workload: Manifest, type_: str) -> str:
    found = said(workload, type_)
    return f": {found}" if found else ""


def placed(template: Mapping[str, Any], workload: Manifest, flavors: Iterable[Manifest]) -> Manifest:
    """The template with the nodes' labels and the tolerations of its flavors, and what admission checks want.

    What the template says itself stays: Kueue has chosen flavors that fit it.
    """
    additions = [_of_flavor(flavor) for flavor in flavors] + _of_checks(workload)
    metadata, spec = dict(_mapping(template.get("metadata"))), dict(_mapping(template.get("spec")))
    for added in additions:
        _add_keys(metadata, "labels", added.get("labels"))
        _add_keys(metadata, "annotations", added.get("annotations"))
        _add_keys(spec, "nodeSelector", added.get("nodeSelector"))
        _add_items(spec, "tolerations", added.get("tolerations"))
    return {**template, **({"metadata": metadata} if metadata else {}), "spec": spec}


def _of_flavor(flavor: Manifest) -> Mapping[str, Any]:
    spec = _mapping(flavor.get("spec"))
    return {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")}


def _of_checks(workload: Manifest) -> list[Mapping[str, Any]]:
    updates = [
        _mapping(update)
        for check in _sequence(at(workload, "status", "admissionChecks"))
        for update in _sequence(at(check, "podSetUpdates"))
    ]
    return [update for update in updates if update.get("name") == POD_SET]


def _add_keys(target: Manifest, name: str, more: object) -> None:
    if _mapping(more):
        target[name] = {**_mapping(more), **_mapping(target.get(name))}


def _add_items(target: Manifest, name: str, more: object) -> None:
    there = _sequence(target.get(name))
    new = [item for item in _sequence(more) if item not in there]
    if new:
        target[name] = [*there, *new]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


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
