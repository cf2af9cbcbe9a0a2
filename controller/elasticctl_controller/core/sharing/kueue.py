"""Kueue: the Workload that asks for a job's workers, what Kueue's answer means, and the next step.

`judge_admission` is level-triggered: each step changes the job or its Workload, and so leads to another pass.
Everything that must survive a restart is stored on the objects: on the job `suspend`, and the admission it was started
by; on the Workload `active`, and Kueue's conditions. Quota is released, or requested again, once no worker is alive.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.objects import as_list, as_mapping, at
from elasticctl.api.spec import GROUP, KUEUE, ElasticJob
from elasticctl.api.status import Phase
from elasticctl.api.text import join_and
from elasticctl_controller.core.manifests import owned_metadata

POD_SET = "workers"
ASKED = f"{GROUP}/asked"
"""Annotation of a Workload: digests of the pod and of the whole request, which no server's defaults change."""
SUSPENDED_BY_OWNER = f"{GROUP}/left"
"""Annotation of a Workload that is inactive because the job's owner has suspended the job."""

QUOTA, ADMITTED, EVICTED, FINISHED = "QuotaReserved", "Admitted", "Evicted", "Finished"
REQUEUED, PODS_READY = "Requeued", "PodsReady"
TRUE = "True"
"""Kueue's conditions, and the status of one that is true."""
_MESSAGE_CHARS = 300
JOB_UID_LABEL = f"{KUEUE}/job-uid"
"""The label by which Kueue's own tools find the Workload of a job."""
_POD_FIELDS = ("nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName", "overhead")
_CONTAINER_FIELDS = ("name", "image", "resources", "restartPolicy")
"""The fields that decide where a pod fits. The others, such as environment variables, are not copied."""
_PRIORITY_FIELDS = ("priority", "priorityClassName", "priorityClassSource", "priorityClassRef")
_KUEUE_REQUEUES = ("PodsReadyTimeout", "ClusterQueueStopped", "LocalQueueStopped")
"""Evictions that Kueue itself ends; it also ends those by an admission check that gives a time."""
_PENDING = "Pending"
_NO_RESERVATION = "NoReservation"


class KueueStep(Enum):
    """The next change, to the Workload or to the job."""

    CREATE = auto()
    UPDATE = auto()
    DELETE = auto()
    ACTIVATE = auto()
    DEACTIVATE = auto()
    RELEASE = auto()
    READY = auto()
    FINISH = auto()
    START = auto()
    STOP = auto()


@dataclass(frozen=True, slots=True)
class KueueVerdict:
    """What Kueue's answer means: the most `workers` that may run, or in `held` why the job may not run.

    If neither is set, the job's owner has suspended it.
    """

    workers: int | None = None
    held: str = ""
    step: KueueStep | None = None


@dataclass(frozen=True, slots=True)
class Growth:
    """How many `workers` a job may run, with those above its own Workload, and what to do about the Workloads of these.

    `create` has the numbers of workers to ask for; `ready` run, `release` give quota back, `delete` are not needed.
    """

    workers: int = 0
    create: tuple[int, ...] = ()
    ready: tuple[Manifest, ...] = ()
    release: tuple[Manifest, ...] = ()
    delete: tuple[Manifest, ...] = ()

    @property
    def is_due(self) -> bool:
        """True if there is anything to do."""
        return bool(self.create or self.ready or self.release or self.delete)


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job as Kueue lets it run now, and what to do after the pass: the `step`, and what is due for its `growth`.

    `again_s`: check again after this many seconds, because no watch event will announce the change.
    """

    job: ElasticJob
    step: KueueStep | None = None
    workload: Manifest | None = None
    again_s: float | None = None
    growth: Growth = Growth()


def condition(workload: Manifest, type_: str) -> Mapping[str, Any]:
    """The condition of this type; empty if there is none."""
    found = at(workload, "status", "conditions")
    items = found if isinstance(found, list) else []
    return next((item for item in items if isinstance(item, Mapping) and item.get("type") == type_), {})


def is_true(workload: Manifest, type_: str) -> bool:
    """True if that condition is true."""
    return condition(workload, type_).get("status") == TRUE


def condition_message(workload: Manifest, type_: str) -> str:
    """The message of a condition, on one line; "" if it has none."""
    return " ".join(str(condition(workload, type_).get("message") or "").split())[:_MESSAGE_CHARS]


def is_active(workload: Manifest) -> bool:
    """False for a Workload that has been deactivated."""
    return at(workload, "spec", "active") is not False


def assignment(workload: Manifest) -> Mapping[str, Any]:
    """What was admitted of the job's pods: `count`, and `flavors` by resource."""
    found = at(workload, "status", "admission", "podSetAssignments")
    items = found if isinstance(found, list) else []
    return next((item for item in items if isinstance(item, Mapping) and item.get("name") == POD_SET), {})


def admitted_workers(workload: Manifest) -> int:
    """How many pods were admitted: as many as were requested, unless Kueue has admitted fewer."""
    sets = at(workload, "spec", "podSets")
    asked = at(sets[0], "count") if isinstance(sets, list) and sets else 0
    count = assignment(workload).get("count", asked)
    return count if isinstance(count, int) and count >= 0 else 0


def flavor_names(workload: Manifest) -> tuple[str, ...]:
    """The ResourceFlavors assigned to the job's pods, without duplicates."""
    flavors = assignment(workload).get("flavors")
    return tuple(sorted({str(name) for name in flavors.values()})) if isinstance(flavors, Mapping) else ()


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """The priority class of a job: Kueue's own kind, or that of its pods."""

    name: str
    of_pods: bool


def workload_name(job: ElasticJob) -> str:
    """The name of the job's Workload, unique to this job."""
    return f"elasticjob-{job.name}-{job.uid[:8]}"


def priority_class(job: ElasticJob) -> PriorityClass | None:
    """The class named by the job's label, or else by its pod template; None for the cluster's default."""
    if job.priority_class:
        return PriorityClass(job.priority_class, of_pods=False)
    name = at(job.template, "spec", "priorityClassName")
    return PriorityClass(name, of_pods=True) if isinstance(name, str) and name else None


def build_workload(job: ElasticJob, api_version: str, priority: int | None) -> Manifest:
    """The Workload; `priority` is the value of the job's priority class, which Kueue wants besides its name."""
    return {
        "apiVersion": api_version,
        "kind": "Workload",
        "metadata": workload_metadata(job, workload_name(job), digests(job)),
        "spec": {
            "queueName": job.queue,
            "podSets": [_pod_set(job)],
            **_priority_fields(priority_class(job), priority, api_version),
        },
    }


def workload_metadata(job: ElasticJob, name: str, asked: str) -> Manifest:
    """The metadata of one of the job's Workloads; `asked` shows later whether it is still what the job wants."""
    metadata = owned_metadata(job, name)
    return {
        **metadata,
        "labels": {**metadata["labels"], JOB_UID_LABEL: job.uid},
        "annotations": {ASKED: asked},
    }


def build_update(workload: Manifest) -> Manifest:
    """The merge patch that makes a waiting Workload request what the newly built `workload` does."""
    return {
        "metadata": {"annotations": workload["metadata"]["annotations"]},
        "spec": {**dict.fromkeys(_PRIORITY_FIELDS), **workload["spec"]},
    }


def digests(job: ElasticJob) -> str:
    """Two digests, of the pods and of everything, that show whether a Workload still requests what the job wants."""
    priority = priority_class(job)
    everything = [job.queue, _pod_set(job), [priority.name, priority.of_pods] if priority is not None else None]
    return f"{digest(_template(job))}.{digest(everything)}"


def asks_for(job: ElasticJob, workload: Manifest) -> bool:
    """True if the Workload requests exactly what the job wants now."""
    return bool(at(workload, "metadata", "annotations", ASKED) == digests(job))


def asks_for_such_pods(job: ElasticJob, workload: Manifest) -> bool:
    """True if the Workload requests the job's pods, in any number."""
    found = at(workload, "metadata", "annotations", ASKED)
    return isinstance(found, str) and found.partition(".")[0] == digests(job).partition(".")[0]


def _pod_set(job: ElasticJob) -> Manifest:
    """All workers or, if the size is not fixed, the minimum: each worker above it has a Workload of its own."""
    return build_pod_set(job, min(job.desired, max(1, job.min)) if job.sharing.automatic else job.desired)


def build_pod_set(job: ElasticJob, count: int) -> Manifest:
    """A pod set of `count` of the job's workers."""
    return {"name": POD_SET, "count": count, "template": _template(job)}


def _template(job: ElasticJob) -> Manifest:
    spec = at(job.template, "spec")
    spec = spec if isinstance(spec, Mapping) else {}
    fields = {name: spec[name] for name in _POD_FIELDS if name in spec}
    for name in ("initContainers", "containers"):
        items = spec.get(name)
        if isinstance(items, list):
            fields[name] = [
                {name: item[name] for name in _CONTAINER_FIELDS if name in item}
                for item in items
                if isinstance(item, Mapping)
            ]
    return {"spec": {**fields, "restartPolicy": "Never"}}


def _priority_fields(ranked: PriorityClass | None, priority: int | None, api_version: str) -> Manifest:
    """The priority, in the fields of that version of the API."""
    if ranked is None or priority is None:
        return {}
    if api_version.endswith("/v1beta1"):
        source = "scheduling.k8s.io/priorityclass" if ranked.of_pods else f"{KUEUE}/workloadpriorityclass"
        return {"priority": priority, "priorityClassName": ranked.name, "priorityClassSource": source}
    group, kind = ("scheduling.k8s.io", "PriorityClass") if ranked.of_pods else (KUEUE, "WorkloadPriorityClass")
    return {"priority": priority, "priorityClassRef": {"group": group, "kind": kind, "name": ranked.name}}


def digest(data: Any) -> str:
    """A short text that differs when JSON `data` does."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]


def judge_admission(job: ElasticJob, workload: Manifest | None, pods: int) -> KueueVerdict:
    """The verdict on a job that names a queue; `pods` is how many of its pods have not ended.

    Checked in this order: the job has ended, is suspended by its owner, has no Workload, its Workload is finished or
    inactive, evicted, waiting, admitted.
    """
    if job.status.phase.terminal:
        unfinished = workload is not None and not is_true(workload, FINISHED)
        return KueueVerdict(step=KueueStep.FINISH if unfinished else None)
    # `admitted` is cleared when it is Kueue's answer that suspends the job.
    if job.suspend and (job.admitted or job.moving_to or job.moved_to):
        return _judge_suspended(workload, pods)
    if workload is None or at(workload, "metadata", "deletionTimestamp") is not None:
        step = KueueStep.CREATE if workload is None else None
        return _hold(job, pods, f"is about to join Kueue's queue {job.queue}", step)
    if is_true(workload, FINISHED):
        return _hold(job, pods, f"will not be admitted: Kueue has closed its Workload{_reason(workload, FINISHED)}")
    if not is_active(workload):
        return _judge_inactive(job, workload, pods)
    if is_true(workload, EVICTED) and is_true(workload, QUOTA):
        words = f"gives back its quota in Kueue's queue {job.queue}{_reason(workload, EVICTED)}"
        return _hold(job, pods, words, KueueStep.RELEASE)
    if not is_true(workload, ADMITTED):
        # A Workload with quota cannot be changed.
        revise = KueueStep.DELETE if is_true(workload, QUOTA) else KueueStep.UPDATE
        return _hold(job, pods, _explain_waiting(job, workload), None if asks_for(job, workload) else revise)
    return _judge_admitted(job, workload, pods)


def _hold(job: ElasticJob, pods: int, words: str, step: KueueStep | None = None) -> KueueVerdict:
    """The job may not run: suspend it, wait until its workers are gone, and only then take the step."""
    if not job.suspend:
        return KueueVerdict(held=words, step=KueueStep.STOP)
    return KueueVerdict(held=words, step=None if pods else step)


def _judge_suspended(workload: Manifest | None, pods: int) -> KueueVerdict:
    """Its owner has suspended or moved the job: its quota is released as soon as its workers are gone."""
    if workload is None or is_true(workload, FINISHED):
        return KueueVerdict()
    if is_active(workload):
        return KueueVerdict(step=KueueStep.DEACTIVATE)
    return KueueVerdict(step=KueueStep.RELEASE if is_true(workload, QUOTA) and not pods else None)


def _judge_inactive(job: ElasticJob, workload: Manifest, pods: int) -> KueueVerdict:
    """Its Workload is inactive: the job was suspended by its owner and is resumed now, or somebody else deactivated
    it."""
    if at(workload, "metadata", "annotations", SUSPENDED_BY_OWNER) is not None:
        return KueueVerdict(held=f"returns to Kueue's queue {job.queue}", step=KueueStep.ACTIVATE)
    words = f"will not be admitted: its Workload {at(workload, 'metadata', 'name')} was deactivated"
    step = KueueStep.RELEASE if is_true(workload, QUOTA) else None
    return _hold(job, pods, words + _reason(workload, EVICTED), step)


def _judge_admitted(job: ElasticJob, workload: Manifest, pods: int) -> KueueVerdict:
    if not asks_for_such_pods(job, workload):
        words = f"asks for different workers than were admitted, and returns to Kueue's queue {job.queue}"
        return _hold(job, pods, words, KueueStep.DELETE)
    if job.suspend:
        return KueueVerdict(held=f"is admitted to Kueue's queue {job.queue}, and starts", step=KueueStep.START)
    started = job.admitted == at(workload, "metadata", "uid")
    ready = job.status.phase is Phase.RUNNING and not is_true(workload, PODS_READY)
    step = KueueStep.START if not started else KueueStep.READY if ready else None
    return KueueVerdict(workers=admitted_workers(workload), step=step)


def _explain_waiting(job: ElasticJob, workload: Manifest) -> str:
    if is_true(workload, QUOTA):
        checks = at(workload, "status", "admissionChecks")
        missing = [str(at(item, "name")) for item in checks or () if at(item, "state") != "Ready"]
        waits = f"waits for its checks: {join_and(missing)}" if missing else "is about to be admitted"
        return f"has quota in Kueue's queue {job.queue}, and {waits}"
    return f"waits to be admitted to Kueue's queue {job.queue}{_reason(workload, QUOTA)}"


def _reason(workload: Manifest, type_: str) -> str:
    message = condition_message(workload, type_)
    return f": {message}" if message else ""


def apply_placement(template: Mapping[str, Any], workload: Manifest, flavors: Iterable[Manifest]) -> Manifest:
    """The template with the node labels and tolerations of its flavors, and the updates of admission checks.

    Fields that the template sets itself stay: Kueue has chosen flavors that fit them.
    """
    specs = [as_mapping(flavor.get("spec")) for flavor in flavors]
    additions: list[Mapping[str, Any]] = [
        {"nodeSelector": spec.get("nodeLabels"), "tolerations": spec.get("tolerations")} for spec in specs
    ]
    additions += _check_updates(workload)
    metadata, spec = dict(as_mapping(template.get("metadata"))), dict(as_mapping(template.get("spec")))
    for added in additions:
        _add_keys(metadata, "labels", added.get("labels"))
        _add_keys(metadata, "annotations", added.get("annotations"))
        _add_keys(spec, "nodeSelector", added.get("nodeSelector"))
        _add_items(spec, "tolerations", added.get("tolerations"))
    return {**template, **({"metadata": metadata} if metadata else {}), "spec": spec}


def _check_updates(workload: Manifest) -> list[Mapping[str, Any]]:
    updates = [
        as_mapping(update)
        for check in as_list(at(workload, "status", "admissionChecks"))
        for update in as_list(at(check, "podSetUpdates"))
    ]
    return [update for update in updates if update.get("name") == POD_SET]


def _add_keys(target: Manifest, name: str, more: object) -> None:
    if as_mapping(more):
        target[name] = {**as_mapping(more), **as_mapping(target.get(name))}


def _add_items(target: Manifest, name: str, more: object) -> None:
    there = as_list(target.get(name))
    new = [item for item in as_list(more) if item not in there]
    if new:
        target[name] = [*there, *new]


def build_release(workload: Manifest, now: float) -> Manifest:
    """The status patch once the workers are gone: the quota is Kueue's again, and the Workload waits as before."""
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


def build_finish(workload: Manifest, job: ElasticJob, now: float) -> Manifest:
    """The status patch for a job that has ended."""
    reason = "Succeeded" if job.status.phase is Phase.SUCCEEDED else "Failed"
    return _patch(workload, [_condition(FINISHED, True, reason, job.status.message)], now)


def build_pods_ready(workload: Manifest, now: float) -> Manifest:
    """The status patch once enough workers run: Kueue may evict a Workload that does not get there in time."""
    return _patch(workload, [_condition(PODS_READY, True, PODS_READY, "the minimum number of workers is running")], now)


def _is_requeued(workload: Manifest) -> bool:
    """Whether the Workload may be admitted again immediately; otherwise Kueue decides when."""
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
