"""Installs the controller in a cluster, upgrades it and uninstalls it.

Objects are applied on the server's side under one field manager, so that applying them again is an upgrade and keeps
what others have added. An interrupted installation can be repeated.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import (
    BusyError,
    ClusterError,
    ConflictError,
    ForbiddenError,
    NotFoundError,
    UnreachableError,
)
from elasticctl.api.spec import API_VERSION, PLURAL, ElasticJob
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import APPLY_PATCH, Connection, list_objects, resource_path
from elasticctl.kubeapi.installation import is_for_all
from elasticctl.kubeapi.responses import NoSuchApiError

FIELD_MANAGER = "elasticctl"
KEY_BYTES = 32
POLL_S = 0.5
ESTABLISH_TIMEOUT_S = 60.0
_CRD = "CustomResourceDefinition"
_POLICIES = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
_PRIORITIES = ("PriorityLevelConfiguration", "FlowSchema")
_OPTIONAL = {
    **dict.fromkeys(_POLICIES, "admission policies (Kubernetes 1.30)"),
    **dict.fromkeys(_PRIORITIES, "priorities of requests (Kubernetes 1.29)"),
}
_CLUSTER_WIDE = ("Namespace", _CRD, "ClusterRole", "ClusterRoleBinding", *_POLICIES, *_PRIORITIES)


@dataclass(frozen=True, slots=True)
class Installed:
    """What is installed: the controller's objects, all jobs that it runs, and those of them that have not ended."""

    jobs: tuple[str, ...]
    living: tuple[str, ...]
    objects: tuple[Manifest, ...]


class Installer:
    """Changes one cluster; `say` prints a line for each change."""

    def __init__(self, connection: Connection, say: Callable[[str], None]) -> None:
        self._connection, self._say = connection, say

    def deployment(self, namespace: str) -> Manifest | None:
        """Return the controller's Deployment; None when there is none."""
        try:
            path = resource_path("apps/v1", namespace, "deployments", installation.DEPLOYMENT)
            return self._connection.request("GET", path)
        except NotFoundError:
            return None

    def other(self, namespace: str, *, confined: bool) -> str:
        """The namespace of another controller that would run the same jobs; "" if none can be seen."""
        labels = {"labelSelector": f"{installation.LABEL}={installation.LABEL_VALUE}"}
        try:
            found = list_objects(self._connection, resource_path("apps/v1", None, "deployments"), labels)
        except ForbiddenError:
            return ""
        for item in found:
            where = str(item["metadata"]["namespace"])
            ours = item["metadata"]["name"] == installation.DEPLOYMENT and where != namespace
            if ours and not (confined and installation.watched_by(item)):
                return where
        return ""

    def apply(self, manifests: list[Manifest], *, confined: bool = False) -> list[Manifest]:
        """Apply all objects in order, and wait until the cluster knows ElasticJobs before those that depend on it.

        `confined`: what is in no namespace is left to an administrator, and returned, where it takes one to apply it.
        Raises ForbiddenError without the right to do this, ClusterError when the definition is not accepted in time.
        """
        left = []
        for manifest in manifests:
            try:
                if name_of(manifest) == f"Deployment {installation.DEPLOYMENT}":
                    self._create_key(manifest["metadata"]["namespace"])
                self._apply(manifest)
                if manifest["kind"] == _CRD:
                    self._await_established(manifest)
            except ForbiddenError as e:
                if not confined:
                    raise
                if manifest["kind"] not in _CLUSTER_WIDE or (manifest["kind"] == _CRD and not self._serves(manifest)):
                    raise ForbiddenError(f"{e}. FIX: have an administrator of the cluster run this command once") from e
                left.append(manifest)
                self._say(f"{name_of(manifest)}: left to an administrator of the cluster")
        return left

    def await_available(self, namespace: str, timeout_s: float, name: str = installation.DEPLOYMENT) -> None:
        """Wait until all replicas of a new Deployment run; ClusterError, with the reason, when they do not."""
        path = resource_path("apps/v1", namespace, "deployments", name)
        what = name.removeprefix("elasticctl-")
        deadline = time.monotonic() + timeout_s
        shown = ""
        while True:
            try:
                missing = rollout(self._connection.request("GET", path))
            except (UnreachableError, BusyError) as e:
                missing = str(e)
            if not missing:
                self._say(f"the {what} runs")
                return
            if missing != shown:
                self._say(f"waiting: {missing}")
                shown = missing
            if time.monotonic() > deadline:
                trouble = missing
                with suppress(ClusterError):  # the right to read Deployments does not include pods
                    trouble = "; ".join(self._pod_troubles(namespace, name)) or missing
                raise ClusterError(f"the {what} is not running after {timeout_s:.0f} s: {trouble}")
            time.sleep(POLL_S)

    def inspect(self, manifests: list[Manifest], *, confined: str = "") -> Installed:
        """Return what an uninstallation would remove; that of the namespace `confined` removes no job's record."""
        jobs = self._jobs(confined)
        living = tuple(job.key for job in jobs if not job.status.phase.terminal)
        look = self._find if confined else self._get
        present = (look(item) for item in self._removable(manifests, confined))
        return Installed(tuple(job.key for job in jobs), living, tuple(item for item in present if item))

    def present(self, manifests: list[Manifest]) -> tuple[Manifest, ...]:
        """Those of the objects that exist, as far as this user may read them."""
        return tuple(found for item in manifests if (found := self._find(item)) is not None)

    def remove(self, objects: tuple[Manifest, ...]) -> None:
        """Delete what `inspect` has returned. The definition comes first, and with it the cluster deletes all jobs."""
        for item in objects:
            try:
                self._connection.request("DELETE", path_of(item), {"propagationPolicy": "Background"})
            except NotFoundError:
                continue
            self._say(f"{name_of(item)}: removed")

    def _apply(self, manifest: Manifest) -> None:
        before = self._get(manifest)
        if manifest["kind"] == "Namespace" and before is not None and not _is_ours(before):
            self._say(f"{name_of(manifest)}: left as it is")
            return
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            after = self._connection.request("PATCH", path_of(manifest), manifest, params, content_type=APPLY_PATCH)
        except NoSuchApiError:
            if manifest["kind"] not in _OPTIONAL:
                raise
            self._say(f"{name_of(manifest)}: left out, as this cluster has no {_OPTIONAL[manifest['kind']]}")
            return
        done = "created" if before is None else "unchanged" if _content(before) == _content(after) else "updated"
        self._say(f"{name_of(manifest)}: {done}")

    def _create_key(self, namespace: str) -> None:
        """Create the key of the tokens unless there is one: running workers have tokens derived from it."""
        manifest = installation.key_secret(namespace, secrets.token_hex(KEY_BYTES))
        try:
            self._connection.request("POST", path_of(manifest).rpartition("/")[0], manifest)
        except ConflictError:
            self._say(f"{name_of(manifest)}: kept")
        else:
            self._say(f"{name_of(manifest)}: created")

    def _await_established(self, manifest: Manifest) -> None:
        deadline = time.monotonic() + ESTABLISH_TIMEOUT_S
        while True:
            found = self._connection.request("GET", path_of(manifest))
            conditions = {item.get("type"): item for item in (found.get("status") or {}).get("conditions") or []}
            if conditions.get("Established", {}).get("status") == "True":
                return
            if time.monotonic() > deadline:
                refused = conditions.get("NamesAccepted", {}).get("message", "")
                raise ClusterError(
                    f"{name_of(manifest)} is not established after {ESTABLISH_TIMEOUT_S:.0f} s: {refused}"
                )
            time.sleep(POLL_S)

    def _serves(self, definition: Manifest) -> bool:
        """True if the cluster serves this API, no matter who has defined it. Every user may read that."""
        spec = definition["spec"]
        try:
            served = self._connection.request("GET", f"/apis/{spec['group']}/{spec['versions'][0]['name']}")
        except NotFoundError:
            return False
        return any(item.get("name") == spec["names"]["plural"] for item in served.get("resources") or [])

    def _get(self, manifest: Manifest) -> Manifest | None:
        try:
            return self._connection.request("GET", path_of(manifest))
        except NotFoundError:
            return None

    def _find(self, manifest: Manifest) -> Manifest | None:
        """The same, with None for an object that this user may not read."""
        try:
            return self._get(manifest)
        except ForbiddenError:
            return None

    def _jobs(self, namespace: str) -> list[ElasticJob]:
        try:
            items = list_objects(self._connection, resource_path(API_VERSION, namespace or None, PLURAL))
        except NoSuchApiError:
            return []
        return [ElasticJob.from_manifest(item) for item in items]

    def _removable(self, manifests: list[Manifest], confined: str) -> Iterator[Manifest]:
        """Yield the definition (and with it all jobs), the objects in the namespace, and the namespace if ours.

        Of an installation for the namespace `confined`, what others in the cluster do not have in common with it.
        """
        if confined:
            yield installation.key_secret(confined, "")
            yield from (item for item in reversed(manifests) if not is_for_all(item))
            yield installation.lease(confined)
            return
        namespace = next(item for item in manifests if item["kind"] == "Namespace")
        yield from (item for item in manifests if item["kind"] == _CRD)
        yield installation.key_secret(namespace["metadata"]["name"], "")
        yield from (item for item in reversed(manifests) if item["kind"] not in (_CRD, "Namespace"))
        yield installation.lease(namespace["metadata"]["name"])  # last, when no one can create it again
        found = self._get(namespace)
        if found is not None and _is_ours(found):
            yield namespace

    def _pod_troubles(self, namespace: str, name: str) -> Iterator[str]:
        value = installation.LABEL_VALUE if name == installation.DEPLOYMENT else name
        params = {"labelSelector": f"{installation.LABEL}={value}"}
        pods = self._connection.request("GET", resource_path("v1", namespace, "pods"), None, params)
        for pod in pods.get("items") or []:
            for trouble in pod_troubles(pod):
                yield f"{pod['metadata']['name']}: {trouble}"


def rollout(found: Manifest) -> str:
    """Return what a Deployment still lacks to run its newest version with all replicas; "" if nothing."""
    wanted, status = found["spec"].get("replicas", 1), found.get("status", {})
    if status.get("observedGeneration", 0) < found["metadata"].get("generation", 0):
        return "the cluster has not handled it yet"
    new, available = status.get("updatedReplicas", 0), status.get("availableReplicas", 0)
    if new < wanted or status.get("replicas", 0) > new:
        return f"{new} of {wanted} replicas are up to date"
    return f"{available} of {wanted} replicas are ready" if available < wanted else ""


def pod_troubles(pod: Manifest) -> Iterator[str]:
    """Yield why a pod does not run, in Kubernetes' words."""
    status = pod.get("status", {})
    for condition in status.get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            yield f"{condition.get('reason')}: {condition.get('message', '')}"
    for container in status.get("containerStatuses", []):
        for state in (container.get("state", {}), container.get("lastState", {})):
            reason = state.get("waiting") or state.get("terminated")
            if reason:
                yield " ".join(f"{reason.get('reason')}: {reason.get('message', '')}".split()).rstrip(": ")
                break


def path_of(manifest: Manifest) -> str:
    """Return the path of an object on the API server."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    namespace = None if kind in _CLUSTER_WIDE else metadata["namespace"]
    plural = f"{kind.lower().removesuffix('y')}ies" if kind.endswith("y") else f"{kind.lower()}s"
    return resource_path(manifest["apiVersion"], namespace, plural, metadata["name"])


def name_of(manifest: Manifest) -> str:
    """`Deployment elasticctl-controller`."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _is_ours(namespace: Manifest) -> bool:
    labels: dict[str, Any] = namespace["metadata"].get("labels") or {}
    return labels.get(installation.LABEL_MANAGER) == FIELD_MANAGER


def _content(found: Manifest) -> Manifest:
    """An object without what changes by itself, and by applying it once more: who wrote it when, and its status."""
    kept = {key: value for key, value in found["metadata"].items() if key not in ("resourceVersion", "managedFields")}
    return {**{key: value for key, value in found.items() if key != "status"}, "metadata": kept}
