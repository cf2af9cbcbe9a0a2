"""What a worker's pod gets where its template leaves it open: the restricted Pod Security Standard, room, short waits.

Whatever the template says itself stays. Pure; for Kubernetes only: processes of a local cluster have no containers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elasticctl.codec import Manifest
from elasticctl.spec import WORKER_CONTAINER

USER_ID = 1000
_USER = {"runAsNonRoot": True, "runAsUser": USER_ID, "runAsGroup": USER_ID}
LOST_NODE_TOLERATION_S = 10
"""How long Kubernetes leaves a pod on a node that is not ready, should no controller run. Its own default: 300."""
DNS_OPTIONS = ({"name": "timeout", "value": "1"}, {"name": "attempts", "value": "3"})
"""PyTorch looks up the name of every peer's address when ranks connect; an answer that is lost costs 5 s by default."""
SCRATCH, SHARED_MEMORY = "/tmp", "/dev/shm"  # noqa: S108 - paths inside a container
_LOST_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")


def harden(pod: Manifest) -> Manifest:
    """Return the pod with all of it; `pod` is not changed."""
    spec = dict(_mapping(pod.get("spec")))
    containers = [_contained(_mapping(item)) for item in _sequence(spec.get("containers"))]
    initial = [_contained(_mapping(item)) for item in _sequence(spec.get("initContainers"))]
    context = _secured(_mapping(spec.get("securityContext")), [*containers, *initial])
    containers, initial = ([_as_user(context, item) for item in items] for items in (containers, initial))
    spec["securityContext"] = context
    spec.setdefault("automountServiceAccountToken", False)
    spec.setdefault("dnsConfig", {"options": [dict(option) for option in DNS_OPTIONS]})
    spec["tolerations"] = _tolerant(_sequence(spec.get("tolerations")))
    names = [item.get("name") for item in containers]
    worker = names.index(WORKER_CONTAINER) if WORKER_CONTAINER in names else 0
    if containers:
        containers[worker] = _at_home(containers[worker])
    _add_volume(spec, containers, "elasticctl-scratch", SCRATCH, {})
    _add_volume(spec, containers[worker : worker + 1], "elasticctl-shm", SHARED_MEMORY, _shared(containers, worker))
    spec["containers"] = containers
    if initial:
        _add_volume(spec, initial, "elasticctl-scratch", SCRATCH, {})
        spec["initContainers"] = initial
    return {**pod, "spec": spec}


def _secured(context: Mapping[str, Any], containers: Sequence[Manifest]) -> Manifest:
    """The pod's own context. A user for all is in it only where no container chose one, which it might contradict."""
    found = {"seccompProfile": {"type": "RuntimeDefault"}, **context}
    chose = [_chose_user(item["securityContext"]) for item in containers]
    if _chose_user(context) or (chose and all(chose)):
        return found
    return {**({} if any(chose) else _USER), "fsGroup": USER_ID, **found}


def _as_user(pod_context: Manifest, container: Manifest) -> Manifest:
    """With the default user, unless it or the pod has one."""
    context = container["securityContext"]
    if _chose_user(pod_context) or _chose_user(context):
        return container
    missing = {key: value for key, value in _USER.items() if key not in pod_context}
    return {**container, "securityContext": {**missing, **context}}


def _chose_user(context: Mapping[str, Any]) -> bool:
    return "runAsUser" in context or "runAsNonRoot" in context


def _contained(container: Mapping[str, Any]) -> Manifest:
    """No privileges and a root filesystem that stays as it is; a privileged container must say so itself."""
    context = dict(_mapping(container.get("securityContext")))
    if context.get("privileged") is not True:
        context.setdefault("allowPrivilegeEscalation", False)
        context.setdefault("capabilities", {"drop": ["ALL"]})
    context.setdefault("readOnlyRootFilesystem", True)
    return {**container, "securityContext": context}


def _at_home(container: Manifest) -> Manifest:
    """A user that the image does not know needs a name and a place to write caches to."""
    env = _sequence(container.get("env"))
    named = [_mapping(item).get("name") for item in env]  # anything may stand there: it need not be hashable
    missing = [{"name": n, "value": v} for n, v in (("HOME", SCRATCH), ("USER", "elasticjob")) if n not in named]
    return {**container, "env": [*env, *missing]}


def _tolerant(tolerations: list[Any]) -> list[Any]:
    """With a short stay on lost nodes, unless the template has a say on those taints or on all."""
    keys = [_mapping(item).get("key") for item in tolerations]
    short = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_TOLERATION_S}
        for key in _LOST_NODE_TAINTS
        if key not in keys and None not in keys and "" not in keys
    ]
    return [*tolerations, *short]


def _add_volume(spec: Manifest, containers: list[Manifest], name: str, path: str, source: Manifest) -> None:
    """Mount an emptyDir at `path` in those of the containers that have nothing there."""
    bare = [item for item in containers if path not in _mount_paths(item)]
    if not bare:
        return
    volumes = _sequence(spec.get("volumes"))
    if all(_mapping(volume).get("name") != name for volume in volumes):
        spec["volumes"] = [*volumes, {"name": name, "emptyDir": source}]
    for container in bare:
        mounts = _sequence(container.get("volumeMounts"))
        container["volumeMounts"] = [*mounts, {"name": name, "mountPath": path}]


def _mount_paths(container: Mapping[str, Any]) -> set[str]:
    mounts = (_mapping(item) for item in _sequence(container.get("volumeMounts")))
    return {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}


def _shared(containers: list[Manifest], worker: int) -> Manifest:
    """Shared memory: as much as the worker may use at all. It counts as the worker's memory, so this is no extra."""
    resources = _mapping(containers[worker].get("resources")) if containers else {}
    limit = _mapping(resources.get("limits")).get("memory")
    return {"medium": "Memory", **({"sizeLimit": limit} if limit else {})}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sequence(value: object) -> list[Any]:
    return list(value) if isinstance(value, list) else []
