"""Reduces objects to the few fields that the controller reads, so that thousands of pods fit in its memory. Pure.

An ElasticJob only loses its managedFields, because pods are built from its template. One that is large is kept
compressed: a template of 1.3 MB takes 18 MB as Python objects, and a user may create many.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from sys import intern
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.gpu_types import AWS_CAPACITY_LABELS, GKE_GPU_LABEL, GKE_SPOT_LABEL, INSTANCE_LABEL
from elasticctl.api.objects import as_list, as_mapping, as_text
from elasticctl.api.observed.workers import sidecars_of
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import CPU_SLOTS
from elasticctl.api.spec import ANNOTATION_POOL, ANNOTATION_PREEMPTED, LABEL_GROUP, LABEL_INDEX, LABEL_JOB, LABEL_TYPE
from elasticctl_controller.core.sharing.claims import slot_count

_METADATA = ("name", "namespace", "uid", "resourceVersion", "creationTimestamp")
_DELETION = ("deletionTimestamp", "deletionGracePeriodSeconds", "finalizers")
_LABELS = (LABEL_GROUP, LABEL_JOB, LABEL_TYPE, LABEL_INDEX)
_ANNOTATIONS = (ANNOTATION_PREEMPTED, ANNOTATION_POOL)
_OWNER = ("kind", "name", "uid", "controller")
_POD_SPEC = ("nodeName", "schedulerName", "schedulingGates", "schedulingGroup")
_POD_STATUS = ("phase", "reason", "message", "startTime")
_CONDITIONS = ("DisruptionTarget", "PodScheduled", "Ready")
_WAITING = ("reason", "message")
_TRUE_CONDITION = ("type", "status", "reason")
_NODE_LABELS = (INSTANCE_LABEL, GKE_GPU_LABEL, GKE_SPOT_LABEL, *(label for label, _, _ in AWS_CAPACITY_LABELS))
_MOST = 8
"""How many finalizers, scheduling gates and owners of a pod are kept: a pod may have thousands."""
_MOST_CHARS = 253
"""Longer text in these is cut: names are not longer, but an owner's name or an annotation may have a megabyte."""
_MOST_CONTAINERS = 128
"""An ElasticJob's template has 100 at most."""
FOLD_CHARS = 8_192
"""A job whose metadata and spec are longer than this as JSON is folded: as objects, they may take 24 times as much."""
_FOLDED = "folded"
_TERMINATED = ("exitCode", "reason", "message", "startedAt", "finishedAt")


def prune_pod(pod: Manifest) -> Manifest:
    """A pod as `elasticctl.api.observed.workers.Pod` reads it, and the `gpus` it holds; some 2 KB instead of 15."""
    metadata, spec, status = (as_mapping(pod.get(part)) for part in ("metadata", "spec", "status"))
    fields = _shorten(_pick(metadata, _METADATA + _DELETION))
    fields["labels"] = _pick(as_mapping(metadata.get("labels")), _LABELS)
    fields["annotations"] = _shorten(_pick(as_mapping(metadata.get("annotations")), _ANNOTATIONS))
    owners = map(as_mapping, as_list(metadata.get("ownerReferences")))
    fields["ownerReferences"] = [_shorten(_pick(ref, _OWNER)) for ref in sorted(owners, key=_is_other)[:_MOST]]
    containers = [_pick(as_mapping(item), ("name",)) for item in as_list(spec.get("containers"))[:_MOST_CONTAINERS]]
    statuses = [_container_status(as_mapping(item)) for item in as_list(status.get("containerStatuses"))]
    return {
        "metadata": fields,
        "spec": {**_shorten(_pick(spec, _POD_SPEC)), "containers": containers},
        "gpus": _gpus(spec),
        "status": {
            **_pick(status, _POD_STATUS),
            "conditions": _conditions(status, _CONDITIONS),
            "containerStatuses": statuses,
            **_before(spec, status),
        },
    }


def prune_node(node: Manifest) -> Manifest:
    """A node's name, whether it is ready and schedulable, its taints, and its capacity to share."""
    metadata, spec, status = (as_mapping(node.get(part)) for part in ("metadata", "spec", "status"))
    taints = [_pick(as_mapping(taint), ("key", "effect")) for taint in as_list(spec.get("taints"))]
    return {
        "metadata": {
            **_pick(metadata, ("name", "uid", "resourceVersion")),
            "labels": _pick(as_mapping(metadata.get("labels")), _NODE_LABELS),
        },
        "spec": {**_pick(spec, ("unschedulable",)), "taints": taints},
        "status": {
            "conditions": _conditions(status, ("Ready",)),
            "allocatable": _pick(as_mapping(status.get("allocatable")), (GPU_RESOURCE, CPU_SLOTS)),
        },
    }


def prune_holder(pod: Manifest) -> Manifest:
    """The node of a pod that is not a worker, and how many `gpus` it holds there."""
    metadata, spec, status = (as_mapping(pod.get(part)) for part in ("metadata", "spec", "status"))
    return {
        "metadata": _pick(metadata, ("name", "namespace", "uid", "resourceVersion")),
        "spec": _pick(spec, ("nodeName",)),
        "gpus": _gpus(spec) if is_accepted(status) else 0,
    }


def is_accepted(status: Mapping[str, Any]) -> bool:
    """True for a pod that a scheduler has placed or a kubelet has accepted, and that has not ended.

    A pod may name any node and ask for any number of GPUs. It holds nothing until the kubelet has accepted it.
    """
    placing = next(iter(_conditions(status, ("PodScheduled",))), {})
    begun = status.get("phase") == "Running" or bool(status.get("startTime")) or placing.get("status") == "True"
    return begun and status.get("phase") not in ("Succeeded", "Failed")


def prune_workload(workload: Manifest) -> Manifest:
    """A Workload of Kueue without its pod templates and the requests that follow from them."""
    metadata, spec, status = (as_mapping(workload.get(part)) for part in ("metadata", "spec", "status"))
    fields = (*_METADATA, "deletionTimestamp", "generation", "annotations")
    pod_sets = [_pick(as_mapping(item), ("name", "count", "minCount")) for item in as_list(spec.get("podSets"))]
    owners = [_pick(as_mapping(ref), _OWNER) for ref in as_list(metadata.get("ownerReferences"))]
    return {
        "metadata": {**_pick(metadata, fields), "ownerReferences": owners},
        "spec": {**_pick(spec, ("queueName", "active", "priority")), "podSets": pod_sets},
        "status": {name: value for name, value in status.items() if name != "resourceRequests"},
    }


def prune_flavor(flavor: Manifest) -> Manifest:
    """The node labels and tolerations of a ResourceFlavor."""
    metadata, spec = as_mapping(flavor.get("metadata")), as_mapping(flavor.get("spec"))
    return {"metadata": _pick(metadata, _METADATA), "spec": _pick(spec, ("nodeLabels", "tolerations"))}


def prune_job(job: Manifest) -> Manifest:
    """An ElasticJob without its managedFields, which may be as large as all other fields; a large one is folded.

    A folded job still has its status, its identity and versions, and whether it is being deleted. `unfold_job` returns
    the rest.
    """
    metadata = {name: value for name, value in as_mapping(job.get("metadata")).items() if name != "managedFields"}
    text = json.dumps({"metadata": {**metadata, "resourceVersion": ""}, "spec": job.get("spec")})
    if len(text) <= FOLD_CHARS:
        return {**job, "metadata": metadata}
    kept = _pick(metadata, (*_METADATA, "generation", "deletionTimestamp"))
    rest = {name: value for name, value in job.items() if name != "spec"}
    return {**rest, "metadata": kept, _FOLDED: zlib.compress(text.encode(), level=1)}


def unfold_job(job: Manifest) -> Manifest:
    """The job as it was before `prune_job` folded it."""
    if _FOLDED not in job:
        return job
    found = json.loads(zlib.decompress(job[_FOLDED]))
    rest = {name: value for name, value in job.items() if name != _FOLDED}
    return {**rest, "metadata": {**found["metadata"], **job["metadata"]}, "spec": found["spec"]}


def _gpus(spec: Mapping[str, Any]) -> int:
    """The most GPUs that a pod needs at any time, as the scheduler counts them: containers and sidecars, or one init
    container.

    Init containers run one after the other before the containers. Those with `restartPolicy: Always` are sidecars and
    continue to run.
    """
    sidecars = peak = 0
    for container in map(as_mapping, as_list(spec.get("initContainers"))):
        own = _gpus_of(container)
        peak = max(peak, sidecars + own)
        sidecars += own if container.get("restartPolicy") == "Always" else 0
    return max(peak, sidecars + sum(_gpus_of(as_mapping(item)) for item in as_list(spec.get("containers"))))


def _gpus_of(container: Mapping[str, Any]) -> int:
    """GPUs are requested as limits, with equal requests, in whole numbers."""
    resources = as_mapping(container.get("resources"))
    return max(slot_count(as_mapping(resources.get(part)).get(GPU_RESOURCE)) for part in ("limits", "requests"))


def _container_status(status: Mapping[str, Any]) -> Manifest:
    state = as_mapping(status.get("state"))
    parts = (("terminated", _TERMINATED), ("waiting", _WAITING))
    kept = {part: _pick(as_mapping(state[part]), fields) for part, fields in parts if state.get(part)}
    return {**_pick(status, ("name",)), "state": kept}


def _before(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Manifest:
    """The init containers that cannot start, are running or have failed, if there are any. Sidecars are only included
    if they cannot start.
    """
    sidecars, kept = sidecars_of(spec), []
    for item in map(as_mapping, as_list(status.get("initContainerStatuses"))):
        state = as_mapping(item.get("state"))
        failed = as_mapping(state.get("terminated")).get("exitCode", 0) != 0
        if state.get("waiting") or (as_text(item.get("name")) not in sidecars and (state.get("running") or failed)):
            kept.append({**_pick(item, ("name",)), "state": {**_container_status(item)["state"], **_running(state)}})
    return {"initContainerStatuses": kept} if kept else {}


def _running(state: Mapping[str, Any]) -> Manifest:
    running = state.get("running")
    return {"running": _pick(running, ("startedAt",))} if isinstance(running, Mapping) else {}


def _conditions(status: Mapping[str, Any], types: tuple[str, ...]) -> list[Manifest]:
    """The conditions of these types; conditions that are false keep their message."""
    found = (as_mapping(item) for item in as_list(status.get("conditions")))
    return [
        _pick(item, ("type", "status", "reason", "message") if item.get("status") == "False" else _TRUE_CONDITION)
        for item in found
        if item.get("type") in types
    ]


def _is_other(owner: Mapping[str, Any]) -> bool:
    """Sorts last the owners that do not control the object."""
    return owner.get("controller") is not True


def _shorten(fields: Manifest) -> Manifest:
    """The fields, with lists of the first few items, and with the beginnings of long texts."""
    return {name: _beginning(value) for name, value in fields.items()}


def _beginning(value: Any) -> Any:
    if isinstance(value, str):
        return value[:_MOST_CHARS]
    return [_beginning(item) for item in value[:_MOST]] if isinstance(value, list) else value


def _pick(source: Mapping[str, Any], names: tuple[str, ...]) -> Manifest:
    """The given fields that exist; short strings are interned, as thousands of objects share them."""
    return {name: _interned(source[name]) for name in names if name in source}


def _interned(value: Any) -> Any:
    return intern(value) if type(value) is str and len(value) < 64 else value
