"""From a Pod manifest to the command of a process of this machine. Pure.

What a kubelet would do with the worker's container, as far as it makes sense for a process: command and args, env with
`fieldRef` and `$(NAME)` references, `workingDir`, the GPU limit. Images, volumes and probes have no meaning here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.cluster.base import Manifest
from elasticctl.podtemplate import GPU_RESOURCE
from elasticctl.spec import WORKER_CONTAINER

POD_IP = "127.0.0.1"

_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


class StartError(Exception):
    """The manifest asks for something that this machine cannot start; the text says what."""


@dataclass(frozen=True, slots=True)
class Command:
    """What to start: `working_dir` "" means the worker's own folder."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str


def command_of(pod: Manifest, base: Mapping[str, str], pinned: Mapping[str, str]) -> Command:
    """Work out the worker's command; `base` is below the container's own env, `pinned` above it. Raises StartError."""
    container = worker_container(pod)
    env = {**base, **pinned}
    if container.get("envFrom"):
        raise StartError("envFrom: secrets and config maps do not exist on the local cluster; use env instead")
    for entry in _mappings(container.get("env")):
        env[str(entry.get("name"))] = _expanded(_value(entry, pod), env)
    env |= pinned
    words = [*_texts(container.get("command"), "command"), *_texts(container.get("args"), "args")]
    if not words:
        raise StartError("command: the local cluster has no images, so the container has to say what to run")
    argv = tuple(_expanded(word, env) for word in words)
    return Command(argv=argv, env=env, working_dir=str(container.get("workingDir") or ""))


def worker_container(pod: Manifest) -> Mapping[str, Any]:
    """Return the container that trains: the one of TorchElastic's name, or else the first."""
    containers = list(_mappings(pod.get("spec", {}).get("containers")))
    if not containers:
        raise StartError("spec.containers: there is none")
    return next((c for c in containers if c.get("name") == WORKER_CONTAINER), containers[0])


def gpus_wanted(pod_spec: Mapping[str, Any]) -> int:
    """Return how many GPUs the containers of a pod (or of a pod template) ask for together."""
    wanted = 0
    for container in _mappings(pod_spec.get("containers")):
        limits = (
            container.get("resources", {}).get("limits", {}) if isinstance(container.get("resources"), dict) else {}
        )
        text = str(limits.get(GPU_RESOURCE, 0)) if isinstance(limits, dict) else "0"
        wanted += int(text) if text.isascii() and text.isdigit() else 0
    return wanted


def _value(entry: Mapping[str, Any], pod: Manifest) -> str:
    source = entry.get("valueFrom")
    if source is None:
        return str(entry.get("value") or "")
    field = source.get("fieldRef", {}).get("fieldPath") if isinstance(source, dict) else None
    if not isinstance(field, str):
        raise StartError(f"env {entry.get('name')}: only fieldRef works on the local cluster; give the value itself")
    return _field(pod, field)


def _field(pod: Manifest, path: str) -> str:
    metadata = pod["metadata"]
    plain = {
        "metadata.name": metadata["name"],
        "metadata.namespace": metadata["namespace"],
        "metadata.uid": metadata["uid"],
        "spec.nodeName": pod.get("spec", {}).get("nodeName", ""),
        "status.podIP": POD_IP,
        "status.hostIP": POD_IP,
    }
    if path in plain:
        return str(plain[path])
    keyed = _KEYED_FIELD.fullmatch(path)
    if keyed is None:
        raise StartError(f"fieldRef {path!r} is not known on the local cluster")
    return str(metadata.get(keyed[1], {}).get(keyed[2], ""))


def _expanded(text: str, env: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the variable's value as Kubernetes does: `$$` is one `$`, an unknown name stays as it is."""

    def replacement(found: re.Match[str]) -> str:
        return "$" if found[1] else env.get(found[2], found[0])

    return _REFERENCE.sub(replacement, text)


def _texts(value: object, field: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise StartError(f"{field}: a list of strings is needed")
    return value


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())
