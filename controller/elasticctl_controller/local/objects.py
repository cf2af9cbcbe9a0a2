"""Changes of stored objects, as Kubernetes' API server and kubelet make them: admission, patches, pod status. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import SpecError
from elasticctl.api.objects import check_label, merge_patch
from elasticctl.api.spec import API_VERSION, KIND, WORKER_CONTAINER
from elasticctl.cluster.base import Manifest
from elasticctl_controller.local.command import POD_IP

MAX_JOB_NAME = 51
"""`<job>-worker-<index>`, of an index of four digits, has to fit the 63 characters of a DNS label."""

_PATCHABLE_METADATA = ("labels", "annotations")


def check_job(manifest: object) -> Manifest:
    """Raise SpecError for what cannot be stored as an ElasticJob; clients have validated it against the schema."""
    if not isinstance(manifest, dict):
        raise SpecError(f"an ElasticJob must be a mapping, not {type(manifest).__name__}")
    for field, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if manifest.get(field) != wanted:
            raise SpecError(f"must be {wanted!r}, not {manifest.get(field)!r}", path=field)
    metadata = manifest.get("metadata")
    if not isinstance(metadata, dict):
        raise SpecError("is missing or not a mapping", path="metadata")
    check_label(metadata.get("name"), "metadata.name", MAX_JOB_NAME)
    check_label(metadata.get("namespace", "default"), "metadata.namespace", 63)
    if not isinstance(manifest.get("spec"), dict):
        raise SpecError("is missing or not a mapping", path="spec")
    return manifest


def admit_object(manifest: Mapping[str, Any], *, uid: str, now: float) -> Manifest:
    """Return a new object as it will be stored: with metadata of ours and without a status."""
    stored = copy.deepcopy(dict(manifest))
    stored.pop("status", None)
    metadata = stored["metadata"]
    for field in ("resourceVersion", "deletionTimestamp", "deletionGracePeriodSeconds"):
        metadata.pop(field, None)
    metadata.setdefault("namespace", "default")
    metadata.update(uid=uid, generation=1, creationTimestamp=to_rfc3339(now))
    return stored


def apply_patch(stored: Manifest, patch: Mapping[str, Any]) -> Manifest:
    """Apply a JSON merge patch to labels, annotations and spec; a changed spec is a new generation.

    Everything else in the patch (status, identity) is ignored, as the API server does for the main resource.
    """
    result = copy.deepcopy(stored)
    metadata = patch.get("metadata")
    for field in _PATCHABLE_METADATA:
        if isinstance(metadata, Mapping) and field in metadata:
            result["metadata"][field] = merge_patch(result["metadata"].get(field), metadata[field]) or {}
    if "spec" in patch:
        result["spec"] = merge_patch(result["spec"], patch["spec"])
    if result["spec"] != stored["spec"]:
        result["metadata"]["generation"] += 1
    return result


def mark_deleted(pod: Manifest, *, grace_s: float, now: float) -> Manifest:
    """Return the pod with its deletion requested; as in Kubernetes, a second call can only shorten the grace period."""
    result = copy.deepcopy(pod)
    metadata = result["metadata"]
    if "deletionTimestamp" not in metadata or grace_s < metadata["deletionGracePeriodSeconds"]:
        metadata["deletionTimestamp"] = to_rfc3339(now + grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s
    return result


def grace_s_of(pod: Mapping[str, Any]) -> float:
    """`terminationGracePeriodSeconds` of a pod; by default 30, as in Kubernetes."""
    grace_s = pod.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    return float(grace_s) if isinstance(grace_s, int | float) and grace_s >= 0 else 30.0


ANNOTATION_PID = "local.elasticctl/pid"
"""Process id of the worker itself, not of its shim or its children."""
ANNOTATION_GPUS = "local.elasticctl/gpus"
"""Comma-separated ids of the GPUs that are assigned to the pod."""

KILLED_EXIT_CODE = 137


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker's process ended. `signal` is a number; `exit_code` is then 128 more, as in container runtimes."""

    exit_code: int
    finished_at: float
    signal: int | None = None
    reason: str = ""
    message: str = ""


def mark_waiting(pod: Manifest, reason: str, message: str) -> Manifest:
    """Return the pod with the reason why it cannot start yet."""
    return {**pod, "status": {**pod.get("status", {}), "phase": "Pending", "reason": reason, "message": message}}


def mark_scheduled(pod: Manifest, node: str, gpus: tuple[str, ...]) -> Manifest:
    """Return the pod with its node and its GPUs."""
    conditions = [{"type": "PodScheduled", "status": "True"}]
    annotated = _annotate(pod, {ANNOTATION_GPUS: ",".join(gpus)})
    return {
        **annotated,
        "spec": {**pod["spec"], "nodeName": node},
        "status": {"phase": "Pending", "conditions": conditions},
    }


def mark_running(pod: Manifest, pid: int, started_at: float) -> Manifest:
    """Return the pod with its worker's process running."""
    at = to_rfc3339(started_at)
    container = {"name": WORKER_CONTAINER, "ready": True, "restartCount": 0, "state": {"running": {"startedAt": at}}}
    status = {
        "phase": "Running",
        "podIP": POD_IP,
        "hostIP": POD_IP,
        "startTime": at,
        "conditions": [*pod["status"].get("conditions", []), {"type": "Ready", "status": "True"}],
        "containerStatuses": [container],
    }
    return {**_annotate(pod, {ANNOTATION_PID: str(pid)}), "status": status}


def mark_ended(pod: Manifest, exit_: Exit) -> Manifest:
    """Return the pod in its final phase, with how its worker ended."""
    terminated: dict[str, Any] = {
        "exitCode": exit_.exit_code,
        "reason": exit_.reason or ("Completed" if exit_.exit_code == 0 else "Error"),
        "message": exit_.message,
        "startedAt": pod["status"].get("startTime"),
        "finishedAt": to_rfc3339(exit_.finished_at),
    }
    if exit_.signal is not None:
        terminated["signal"] = exit_.signal
    container = {"name": WORKER_CONTAINER, "ready": False, "restartCount": 0, "state": {"terminated": terminated}}
    status = {
        **pod["status"],
        "phase": "Succeeded" if exit_.exit_code == 0 else "Failed",
        "conditions": [c for c in pod["status"].get("conditions", []) if c["type"] != "Ready"],
        "containerStatuses": [container],
    }
    if exit_.reason:
        status |= {"reason": exit_.reason, "message": exit_.message}
    return {**pod, "status": status}


def mark_disrupted(pod: Manifest, message: str) -> Manifest:
    """Return the pod with Kubernetes' mark of a worker that is ended for a reason that is not its own."""
    condition = {
        "type": "DisruptionTarget",
        "status": "True",
        "reason": "TerminationByKubelet",
        "message": message,
    }
    status = pod["status"]
    return {**pod, "status": {**status, "conditions": [*status.get("conditions", []), condition]}}


def has_ended(pod: Mapping[str, Any]) -> bool:
    """True once the pod is in a terminal phase."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def is_scheduled(pod: Mapping[str, Any]) -> bool:
    """True once the pod has been assigned to this machine."""
    return bool(pod["spec"].get("nodeName"))


def gpus_of(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the GPUs that are assigned to the pod."""
    return tuple(filter(None, pod["metadata"].get("annotations", {}).get(ANNOTATION_GPUS, "").split(",")))


def _annotate(pod: Manifest, annotations: Mapping[str, str]) -> Manifest:
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}}
