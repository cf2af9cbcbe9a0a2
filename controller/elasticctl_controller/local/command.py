"""Builds the command of a worker's process from its pod's manifest.

It does what a kubelet does with the worker's container, as far as that makes sense for a process: command and args, env
with `fieldRef` and `$(NAME)` references, secrets by reference, `workingDir`, the GPU limit. Images, volumes and probes
have no meaning here.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import WORKER_CONTAINER
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.capacity import VISIBLE_GPUS_VARIABLE
from elasticctl_protocol import variables

_INHERITED = frozenset(
    {"HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "PATH", "LD_LIBRARY_PATH", variables.HOME}
)


def base_environment() -> dict[str, str]:
    """Return the environment that a worker's container adds its own env to.

    PATH begins with this Python's folder, so a worker runs the same `python` and `elasticctl-launch` as elasticctl.
    """
    base = {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith("LC_")}
    base["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    base["PYTHONUNBUFFERED"] = "1"
    return base


TOKEN_NAME, PEER_KEY_NAME = "token", "peers"


def termination_log(pod_dir: Path) -> Path:
    """Where the worker may write a message about its end, as in a Kubernetes container."""
    return pod_dir / "termination-log"


def pinned_environment(pod_dir: Path, pod: Mapping[str, Any], gpus: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that a container's env cannot change: paths in the pod's folder, its identity, its GPUs."""
    containers = _mappings(pod["spec"].get("containers"))
    asked = [entry.get("name") for container in containers for entry in _mappings(container.get("env"))]
    peer_key = {variables.PEER_KEY_FILE: str(pod_dir / PEER_KEY_NAME)} if variables.PEER_KEY_FILE in asked else {}
    return {
        **peer_key,
        variables.POD_UID: pod["metadata"]["uid"],
        variables.TOKEN_FILE: str(pod_dir / TOKEN_NAME),
        variables.TERMINATION_LOG: str(termination_log(pod_dir)),
        VISIBLE_GPUS_VARIABLE: ",".join(gpus),
    }


POD_IP = "127.0.0.1"

_REFERENCE = re.compile(r"\$(?:(\$)|\(([^)]*)\))")
_KEYED_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


ReadSecret = Callable[[str], Mapping[str, str] | None]
"""From the name of a secret to its values by key, or None when there is no such secret."""


class StartError(Exception):
    """The manifest asks for something that cannot be started on this machine."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """The process to start; `working_dir` "" means the worker's own folder."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    working_dir: str


def no_secrets(_: str) -> None:
    """A `ReadSecret` where there are no secrets."""


def build_command(
    pod: Manifest, base: Mapping[str, str], pinned: Mapping[str, str], read_secret: ReadSecret = no_secrets
) -> WorkerCommand:
    """Build the worker's command: the container's env overrides `base`, `pinned` overrides both. Raises StartError."""
    container = worker_container(pod)
    env, hidden = {**base, **pinned}, set[str]()
    for ref in _secret_refs(container):
        values = read_secret(ref.secret)
        if ref.key is None:
            found = {f"{ref.prefix}{key}": value for key, value in (values or {}).items()}
            env |= found
            hidden |= found.keys()
    for entry in _mappings(container.get("env")):
        name, key_ref = str(entry.get("name")), _key_ref(entry)
        if key_ref is None:
            text = _env_value(entry, pod)
            env[name] = _expand(text, env)
            hidden = hidden | {name} if _referenced_names(text) & hidden else hidden - {name}
            continue
        value = (read_secret(key_ref.secret) or {}).get(key_ref.key or "")
        if value is not None:
            env[name] = value
            hidden.add(name)
    env |= pinned
    words = [*_strings(container.get("command"), "command"), *_strings(container.get("args"), "args")]
    if not words:
        raise StartError("command: the local cluster runs no images. FIX: give the container a command")
    shown = next((name for word in words for name in sorted(_referenced_names(word) & (hidden - pinned.keys()))), None)
    if shown is not None:
        raise StartError(
            f"args: $({shown}) would show a secret to anyone who can run ps. FIX: read the variable in the program"
        )
    argv = tuple(_expand(word, env) for word in words)
    return WorkerCommand(argv=argv, env=env, working_dir=str(container.get("workingDir") or ""))


def missing_secret(pod: Manifest, read_secret: ReadSecret) -> str:
    """Name the secret, or the key of one, that a worker waits for, in Kubernetes' words; "" if none is missing.

    Raises StartError for an invalid reference.
    """
    for ref in _secret_refs(worker_container(pod)):
        values = read_secret(ref.secret)
        if ref.optional:
            continue
        if values is None:
            return f'secret "{ref.secret}" not found'
        if ref.key is not None and ref.key not in values:
            return f'secret "{ref.secret}" has no key "{ref.key}"'
    return ""


def worker_container(pod: Manifest) -> Mapping[str, Any]:
    """Return the container that trains: the one of TorchElastic's name, or else the first."""
    containers = list(_mappings(pod.get("spec", {}).get("containers")))
    if not containers:
        raise StartError("spec.containers: is empty")
    return next((c for c in containers if c.get("name") == WORKER_CONTAINER), containers[0])


def gpus_requested(pod_spec: Mapping[str, Any]) -> int:
    """Return how many GPUs the containers of a pod (or of a pod template) request together."""
    wanted = 0
    for container in _mappings(pod_spec.get("containers")):
        limits = (
            container.get("resources", {}).get("limits", {}) if isinstance(container.get("resources"), dict) else {}
        )
        text = str(limits.get(GPU_RESOURCE, 0)) if isinstance(limits, dict) else "0"
        wanted += (
            int(text[:20]) if text.isascii() and text.isdigit() else 0
        )  # Python refuses to parse thousands of digits
    return wanted


@dataclass(frozen=True, slots=True)
class _SecretRef:
    """A reference to one key of a secret, or to all of them (`key` None), whose names get the `prefix`."""

    secret: str
    key: str | None
    optional: bool = False
    prefix: str = ""


def _secret_refs(container: Mapping[str, Any]) -> Iterator[_SecretRef]:
    """Yield all references to secrets of a container."""
    for entry in _mappings(container.get("envFrom")):
        source = entry.get("secretRef")
        if not isinstance(source, dict) or not isinstance(source.get("name"), str):
            raise StartError("envFrom: only secretRef works on the local cluster. FIX: give other values with env")
        yield _SecretRef(source["name"], None, source.get("optional") is True, str(entry.get("prefix") or ""))
    for entry in _mappings(container.get("env")):
        ref = _key_ref(entry)
        if ref is not None:
            yield ref


def _key_ref(entry: Mapping[str, Any]) -> _SecretRef | None:
    """Return the reference of a variable whose value is a key of a secret; None for any other variable."""
    source = entry.get("valueFrom")
    ref = source.get("secretKeyRef") if isinstance(source, dict) else None
    if ref is None:
        return None
    if not isinstance(ref, dict) or not isinstance(ref.get("name"), str) or not isinstance(ref.get("key"), str):
        raise StartError(f"env {entry.get('name')}: a secretKeyRef needs a name and a key")
    return _SecretRef(ref["name"], ref["key"], ref.get("optional") is True)


def _env_value(entry: Mapping[str, Any], pod: Manifest) -> str:
    source = entry.get("valueFrom")
    if source is None:
        return str(entry.get("value") or "")
    field = source.get("fieldRef", {}).get("fieldPath") if isinstance(source, dict) else None
    if not isinstance(field, str):
        raise StartError(
            f"env {entry.get('name')}: only fieldRef and secretKeyRef work on the local cluster."
            " FIX: give the value itself"
        )
    return _field_value(pod, field)


def _field_value(pod: Manifest, path: str) -> str:
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
        raise StartError(f"fieldRef {path!r} does not work on the local cluster")
    return str(metadata.get(keyed[1], {}).get(keyed[2], ""))


def _expand(text: str, env: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the variable's value as Kubernetes does: `$$` is one `$`, an unknown name stays as it is."""

    def replacement(found: re.Match[str]) -> str:
        return "$" if found[1] else env.get(found[2], found[0])

    return _REFERENCE.sub(replacement, text)


def _referenced_names(text: str) -> set[str]:
    """The variables that a text refers to."""
    return {found[2] for found in _REFERENCE.finditer(text) if found[2] is not None}


def _strings(value: object, field: str) -> list[str]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, str) and "\0" not in item for item in value):
        raise StartError(f"{field}: must be a list of strings")
    return value


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    return (item for item in value if isinstance(item, dict)) if isinstance(value, list) else iter(())
