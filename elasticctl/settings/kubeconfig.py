"""kubeconfig files: their contexts, and which provider each cluster seems to be of.

Credentials are not read here but when a server is called (`elasticctl.kubeapi.credentials`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticctl.api.errors import ConfigError, SpecError
from elasticctl.api.objects import as_list, as_text, at
from elasticctl.settings.contexts import KUBERNETES, LOCAL, Context

_PLUGINS = {
    "aws": "aws",
    "aws-iam-authenticator": "aws",
    "eksctl": "aws",
    "gke-gcloud-auth-plugin": "gcp",
    "gcloud": "gcp",
}


@dataclass(frozen=True, slots=True)
class KubeContext:
    """One context of a kubeconfig; `plugin` is the command that creates its credentials, if any."""

    name: str
    cluster: str = ""
    namespace: str = ""
    server: str = ""
    plugin: str = ""

    @property
    def provider(self) -> str:
        """The provider, guessed from the names that the clouds' tools give and the plugins that they install."""
        if self.plugin in _PLUGINS:
            return _PLUGINS[self.plugin]
        named_by_aws = any(name.startswith("arn:aws") for name in (self.name, self.cluster))
        if named_by_aws or ".eks.amazonaws.com" in self.server:
            return "aws"
        if any(name.startswith("gke_") for name in (self.name, self.cluster)):
            return "gcp"
        return KUBERNETES

    def as_context(self, taken: Iterable[str]) -> Context:
        """A context of ours, named after the cluster's short name if that is free."""
        names = (self.short_name, self.name, f"{self.short_name}-{self.provider}")
        used = {LOCAL, *taken}
        free = next((name for name in names if name not in used), f"{self.name}-{self.provider}")
        return Context(free, self.provider, self.name, self.namespace or "default")

    @property
    def short_name(self) -> str:
        """`train` of `arn:aws:eks:REGION:ACCOUNT:cluster/train`, `gke_PROJECT_ZONE_train` and eksctl's names."""
        if self.name.startswith("arn:aws"):
            return self.name.rpartition("/")[2] or self.name
        if self.name.startswith("gke_"):
            return self.name.split("_", 3)[-1] or self.name
        if self.cluster.endswith(".eksctl.io"):
            return self.cluster.split(".", 1)[0]
        return self.name


def kubeconfig_paths() -> tuple[Path, ...]:
    """The files that kubectl would read: those of $KUBECONFIG, or the one in the user's home."""
    given = [part for part in os.environ.get("KUBECONFIG", "").split(os.pathsep) if part]
    return tuple(Path(os.path.expanduser(part)) for part in given or ["~/.kube/config"])


@dataclass(frozen=True, slots=True)
class KubeconfigEntry:
    """A context, cluster or user; paths in it are relative to the `folder` of its file."""

    content: Mapping[str, Any]
    folder: Path


@dataclass(frozen=True, slots=True)
class Kubeconfig:
    """All files merged, by name; of two entries with the same name the first wins, as in kubectl."""

    current: str
    contexts: Mapping[str, KubeconfigEntry]
    clusters: Mapping[str, KubeconfigEntry]
    users: Mapping[str, KubeconfigEntry]


def read_kubeconfig(paths: Iterable[Path]) -> Kubeconfig:
    """Read and merge files; missing ones are skipped. Raises ConfigError, naming the file, for an invalid one."""
    parts: dict[str, dict[str, KubeconfigEntry]] = {"contexts": {}, "clusters": {}, "users": {}}
    current = ""
    for path in paths:
        content = _read_file(path)
        current = current or as_text(content.get("current-context"))
        for kind, found in parts.items():
            for entry in as_list(content.get(kind)):
                name, inner = at(entry, "name"), at(entry, kind.removesuffix("s"))
                if isinstance(name, str) and isinstance(inner, dict):
                    found.setdefault(name, KubeconfigEntry(inner, path.parent.absolute()))
    return Kubeconfig(current, parts["contexts"], parts["clusters"], parts["users"])


def read_contexts(paths: Iterable[Path]) -> dict[str, KubeContext]:
    """The contexts of all files by name. Raises ConfigError, naming the file, for one that cannot be read."""
    found = read_kubeconfig(paths)
    return {name: _context(name, entry.content, found) for name, entry in found.contexts.items()}


def _context(name: str, inner: Mapping[str, Any], found: Kubeconfig) -> KubeContext:
    nothing = KubeconfigEntry({}, Path())
    cluster, user = as_text(inner.get("cluster")), found.users.get(as_text(inner.get("user")), nothing).content
    command = as_text(at(user, "exec", "command"))
    server = as_text(found.clusters.get(cluster, nothing).content.get("server"))
    return KubeContext(name, cluster, as_text(inner.get("namespace")), server, Path(command).name.removesuffix(".exe"))


def _read_file(path: Path) -> Mapping[str, Any]:
    from elasticctl.api.yamltext import parse_yaml

    try:
        data = parse_yaml(path.read_bytes(), str(path)).data
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from e
    except SpecError as e:
        raise ConfigError(f"{e}. FIX: $KUBECONFIG has to name kubeconfig files") from e
    return data if isinstance(data, dict) else {}
