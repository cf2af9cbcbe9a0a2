"""From a job to the Workload that asks Kueue for its workers. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.podtemplate import at
from elasticctl.api.spec import GROUP, KUEUE, ElasticJob
from elasticctl_controller.core.owned_objects import owned

POD_SET = "workers"
ASKED = f"{GROUP}/asked"
"""Annotation of a Workload: digests of the pod and of all that was asked for; no server's defaults touch them."""
LEFT = f"{GROUP}/left"
"""Annotation of a Workload that is not active because the job's owner has suspended it."""

QUOTA, ADMITTED, EVICTED, FINISHED = "QuotaReserved", "Admitted", "Evicted", "Finished"
REQUEUED, PODS_READY = "Requeued", "PodsReady"
TRUE = "True"
"""Kueue's conditions, and the status of one that holds."""
_SAID_CHARS = 300


class Step(Enum):
    """What is to be told next: to Kueue, or to the job."""

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
class Verdict:
    """What Kueue's answer means: `workers` that may run at most (None: none), or the words why the job is held.

    Without either it is suspended because its owner wants that.
    """

    workers: int | None = None
    held: str = ""
    step: Step | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """A job as Kueue lets it be now, and what is to be done about it once that was carried out.

    `again_s`: look again after that many seconds, as nothing will tell of a change.
    """

    job: ElasticJob
    step: Step | None = None
    workload: Manifest | None = None
    again_s: float | None = None


def condition(workload: Manifest, type_: str) -> Mapping[str, Any]:
    """The condition of this type; empty when there is none."""
    found = at(workload, "status", "conditions")
    items = found if isinstance(found, list) else []
    return next((item for item in items if isinstance(item, Mapping) and item.get("type") == type_), {})


def is_true(workload: Manifest, type_: str) -> bool:
    """True when that condition holds."""
    return condition(workload, type_).get("status") == TRUE


def said(workload: Manifest, type_: str) -> str:
    """What a condition says, on one line; "" when it says nothing."""
    return " ".join(str(condition(workload, type_).get("message") or "").split())[:_SAID_CHARS]


def is_active(workload: Manifest) -> bool:
    """False for a Workload that Kueue leaves aside."""
    return at(workload, "spec", "active") is not False


def assignment(workload: Manifest) -> Mapping[str, Any]:
    """What was admitted of our pods: `count`, and `flavors` by resource."""
    found = at(workload, "status", "admission", "podSetAssignments")
    items = found if isinstance(found, list) else []
    return next((item for item in items if isinstance(item, Mapping) and item.get("name") == POD_SET), {})


def admitted_workers(workload: Manifest) -> int:
    """How many pods were admitted: where it is not said, as many as were asked for."""
    sets = at(workload, "spec", "podSets")
    asked = at(sets[0], "count") if isinstance(sets, list) and sets else 0
    count = assignment(workload).get("count", asked)
    return count if isinstance(count, int) and count >= 0 else 0


def flavor_names(workload: Manifest) -> tuple[str, ...]:
    """The ResourceFlavors that were given to our pods, each once."""
    flavors = assignment(workload).get("flavors")
    return tuple(sorted({str(name) for name in flavors.values()})) if isinstance(flavors, Mapping) else ()


JOB_UID_LABEL = f"{KUEUE}/job-uid"
"""By which Kueue's own tools find the Workload of a job."""
_POD_FIELDS = ("nodeSelector", "affinity", "tolerations", "priorityClassName", "runtimeClassName", "overhead")
_CONTAINER_FIELDS = ("name", "image", "resources", "restartPolicy")
"""What of a pod decides where it fits; all else, its variables above all, is nobody's business there."""
_PRIORITY_FIELDS = ("priority", "priorityClassName", "priorityClassSource", "priorityClassRef")


@dataclass(frozen=True, slots=True)
class PriorityClass:
    """The class by which a job is ranked: of Kueue's own kind, or that of its pods."""

    name: str
    of_pods: bool


def workload_name(job: ElasticJob) -> str:
    """The Workload's name, which no other job ever has."""
    return f"elasticjob-{job.name}-{job.uid[:8]}"


def priority_class(job: ElasticJob) -> PriorityClass | None:
    """The class that the job's label names, or else its pods' template; None for the cluster's default."""
    if job.priority_class:
        return PriorityClass(job.priority_class, of_pods=False)
    name = at(job.template, "spec", "priorityClassName")
    return PriorityClass(name, of_pods=True) if isinstance(name, str) and name else None


def build_workload(job: ElasticJob, api_version: str, priority: int | None) -> Manifest:
    """The Workload; `priority` is the value of the job's priority class, which Kueue wants beside the name."""
    metadata = owned(job, workload_name(job))
    return {
        "apiVersion": api_version,
        "kind": "Workload",
        "metadata": {
            **metadata,
            "labels": {**metadata["labels"], JOB_UID_LABEL: job.uid},
            "annotations": {ASKED: digests(job)},
        },
        "spec": {
            "queueName": job.queue,
            "podSets": [_pod_set(job)],
            **_ranked(priority_class(job), priority, api_version),
        },
    }


def revision(workload: Manifest) -> Manifest:
    """The merge patch by which a Workload that waits asks for what `workload`, newly built, does."""
    return {
        "metadata": {"annotations": workload["metadata"]["annotations"]},
        "spec": {**dict.fromkeys(_PRIORITY_FIELDS), **workload["spec"]},
    }


def digests(job: ElasticJob) -> str:
    """`POD.ALL`: what tells whether a Workload still asks for what the job wants."""
    ranked = priority_class(job)
    everything = [job.queue, _pod_set(job), [ranked.name, ranked.of_pods] if ranked is not None else None]
    return f"{_digest(_template(job))}.{_digest(everything)}"


def asks_for(job: ElasticJob, workload: Manifest) -> bool:
    """True when the Workload asks for all that the job wants now."""
    return bool(at(workload, "metadata", "annotations", ASKED) == digests(job))


def asks_for_such_pods(job: ElasticJob, workload: Manifest) -> bool:
    """True when the Workload's pods are the job's, however many it wants by now."""
    found = at(workload, "metadata", "annotations", ASKED)
    return isinstance(found, str) and found.partition(".")[0] == digests(job).partition(".")[0]


def _pod_set(job: ElasticJob) -> Manifest:
    """All workers; fewer will do, down to the minimum, for a job whose size may be chosen for it."""
    least = max(1, job.min)
    fewer = {"minCount": least} if job.sharing.automatic and least < job.desired else {}
    return {"name": POD_SET, "count": job.desired, **fewer, "template": _template(job)}


def _template(job: ElasticJob) -> Manifest:
    spec = at(job.template, "spec")
    spec = spec if isinstance(spec, Mapping) else {}
    kept = {name: spec[name] for name in _POD_FIELDS if name in spec}
    for name in ("initContainers", "containers"):
        items = spec.get(name)
        if isinstance(items, list):
            kept[name] = [_container(item) for item in items if isinstance(item, Mapping)]
    return {"spec": {**kept, "restartPolicy": "Never"}}


def _container(container: Mapping[str, Any]) -> Manifest:
    return {name: container[name] for name in _CONTAINER_FIELDS if name in container}


def _ranked(ranked: PriorityClass | None, priority: int | None, api_version: str) -> Manifest:
    """The priority, in the words of that version of the API."""
    if ranked is None or priority is None:
        return {}
    if api_version.endswith("/v1beta1"):
        source = "scheduling.k8s.io/priorityclass" if ranked.of_pods else f"{KUEUE}/workloadpriorityclass"
        return {"priority": priority, "priorityClassName": ranked.name, "priorityClassSource": source}
    group, kind = ("scheduling.k8s.io", "PriorityClass") if ranked.of_pods else (KUEUE, "WorkloadPriorityClass")
    return {"priority": priority, "priorityClassRef": {"group": group, "kind": kind, "name": ranked.name}}


def _digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
