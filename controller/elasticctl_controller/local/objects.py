"""What Kubernetes' API server does to an object on its way in: defaults, merge patches, generations. Pure."""

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
    """Refuse what cannot be stored as an ElasticJob (SpecError); the full check against the schema is the caller's."""
    if not isinstance(manifest, dict):
        raise SpecError(f"an ElasticJob is a mapping, not {type(manifest).__name__}")
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
    """Return a new object as it will be stored: our metadata over the caller's, no status yet."""
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

    Everything else in the patch (status, identity) is left out, as the API server does for the main resource.
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
    """Return the pod with its deletion asked for; a second call can only bring the end nearer, as in Kubernetes."""
    result = copy.deepcopy(pod)
    metadata = result["metadata"]
    if "deletionTimestamp" not in metadata or grace_s < metadata["deletionGracePeriodSeconds"]:
        metadata["deletionTimestamp"] = to_rfc3339(now + grace_s)
        metadata["deletionGracePeriodSeconds"] = grace_s
    return result


def grace_s_of(pod: Mapping[str, Any]) -> float:
    """`terminationGracePeriodSeconds` in seconds; 30 where it is not said, as in Kubernetes."""
    grace_s = pod.get("spec", {}).get("terminationGracePeriodSeconds", 30)
    return float(grace_s) if isinstance(grace_s, int | float) and grace_s >= 0 else 30.0


ANNOTATION_PID = "local.elasticctl/pid"
"""Process id of the worker's own process (its children and the shim above it are not it)."""
ANNOTATION_GPUS = "local.elasticctl/gpus"
"""Comma-separated ids of the GPUs that are the pod's alone."""

KILLED_EXIT_CODE = 137


@dataclass(frozen=True, slots=True)
class Exit:
    """How a worker's process ended; `signal` is a number, and `exit_code` then 128 more, as container runtimes say."""

    exit_code: int
    finished_at: float
    signal: int | None = None
    reason: str = ""
    message: str = ""


def mark_waiting(pod: Manifest, reason: str, message: str) -> Manifest:
    """The pod cannot start yet; `message` says what it waits for."""
    return {**pod, "status": {**pod.get("status", {}), "phase": "Pending", "reason": reason, "message": message}}


def mark_scheduled(pod: Manifest, node: str, gpus: tuple[str, ...]) -> Manifest:
    """The pod has its place on this machine and its GPUs."""
    conditions = [{"type": "PodScheduled", "status": "True"}]
    annotated = _annotate(pod, {ANNOTATION_GPUS: ",".join(gpus)})
    return {
        **annotated,
        "spec": {**pod["spec"], "nodeName": node},
        "status": {"phase": "Pending", "conditions": conditions},
    }


def mark_running(pod: Manifest, pid: int, started_at: float) -> Manifest:
    """The worker's process runs."""
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
    """No process of the worker is left."""
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


def mark_disrupted(pod: Manifest, reason: str, message: str) -> Manifest:
    """The worker is about to be ended for a reason that is not its own, as Kubernetes marks it."""
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    status = pod["status"]
    return {**pod, "status": {**status, "conditions": [*status.get("conditions", []), condition]}}


def has_ended(pod: Mapping[str, Any]) -> bool:
    """True once the pod is in a terminal phase."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def is_scheduled(pod: Mapping[str, Any]) -> bool:
    """True once the pod has its place on this machine."""
    return bool(pod["spec"].get("nodeName"))


def gpus_of(pod: Mapping[str, Any]) -> tuple[str, ...]:
    """The GPUs that were given to the pod."""
    return tuple(filter(None, pod["metadata"].get("annotations", {}).get(ANNOTATION_GPUS, "").split(",")))


def _annotate(pod: Manifest, annotations: Mapping[str, str]) -> Manifest:
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}}
