"""A pod's status through its life on this machine, in Kubernetes' words. Pure: each function returns a new manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.command import POD_IP
from elasticctl.codec import to_rfc3339
from elasticctl.spec import WORKER_CONTAINER

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


def waiting(pod: Manifest, reason: str, message: str) -> Manifest:
    """The pod cannot start yet; `message` says what it waits for."""
    return {**pod, "status": {**pod.get("status", {}), "phase": "Pending", "reason": reason, "message": message}}


def scheduled(pod: Manifest, node: str, gpus: tuple[str, ...]) -> Manifest:
    """The pod has its place on this machine and its GPUs."""
    conditions = [{"type": "PodScheduled", "status": "True"}]
    annotated = _annotated(pod, {ANNOTATION_GPUS: ",".join(gpus)})
    return {
        **annotated,
        "spec": {**pod["spec"], "nodeName": node},
        "status": {"phase": "Pending", "conditions": conditions},
    }


def running(pod: Manifest, pid: int, started_at: float) -> Manifest:
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
    return {**_annotated(pod, {ANNOTATION_PID: str(pid)}), "status": status}


def ended(pod: Manifest, exit_: Exit) -> Manifest:
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


def disrupted(pod: Manifest, reason: str, message: str) -> Manifest:
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


def _annotated(pod: Manifest, annotations: Mapping[str, str]) -> Manifest:
    metadata = pod["metadata"]
    return {**pod, "metadata": {**metadata, "annotations": {**metadata.get("annotations", {}), **annotations}}}
