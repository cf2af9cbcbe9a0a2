"""Put the controller into a cluster, bring it up to date, and take it out again.

Everything is applied on the server's side under one name, so that a second time is an upgrade and what others have
added to the objects stays. Whatever is interrupted can be done again.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import BusyError, ClusterError, ConflictError, NotFoundError, UnreachableError
from elasticctl.api.spec import API_VERSION, PLURAL, ElasticJob
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import APPLY_PATCH, Connection, list_objects, resource_path
from elasticctl.kubeapi.refusals import NoSuchApiError

FIELD_MANAGER = "elasticctl"
KEY_BYTES = 32
POLL_S = 0.5
ESTABLISH_TIMEOUT_S = 60.0
_CRD = "CustomResourceDefinition"
_CLUSTER_WIDE = ("Namespace", _CRD, "ClusterRole", "ClusterRoleBinding")


@dataclass(frozen=True, slots=True)
class Installed:
    """What is there: the jobs of the whole cluster, the living among them, and the objects of ours."""

    jobs: tuple[str, ...]
    living: tuple[str, ...]
    objects: tuple[Manifest, ...]


class Installer:
    """Works on one cluster; `say` gets a line for each thing done."""

    def __init__(self, connection: Connection, say: Callable[[str], None]) -> None:
        self._connection, self._say = connection, say

    def running(self, namespace: str) -> Manifest | None:
        """The controller's Deployment as it is now; None when there is none."""
        try:
            path = resource_path("apps/v1", namespace, "deployments", installation.DEPLOYMENT)
            return self._connection.request("GET", path)
        except NotFoundError:
            return None

    def apply(self, manifests: list[Manifest]) -> None:
        """Apply all objects in order; waits until the cluster knows ElasticJobs before what comes after.

        Raises ForbiddenError for whoever may not do this, ClusterError when the definition is not accepted in time.
        """
        for manifest in manifests:
            if manifest["kind"] == "Deployment":
                self._keep_key(manifest["metadata"]["namespace"])
            if manifest["kind"] == _CRD:
                self._define(manifest)
            else:
                self._apply(manifest)

    def await_available(self, namespace: str, timeout_s: float) -> None:
        """Wait until the new controller runs, all replicas of it; ClusterError, with what keeps it, otherwise."""
        path = resource_path("apps/v1", namespace, "deployments", installation.DEPLOYMENT)
        deadline = time.monotonic() + timeout_s
        said = ""
        while True:
            try:
                standing = rollout(self._connection.request("GET", path))
            except (UnreachableError, BusyError) as e:
                standing = str(e)
            if not standing:
                self._say("the controller runs")
                return
            if standing != said:
                self._say(f"waiting: {standing}")
                said = standing
            if time.monotonic() > deadline:
                trouble = "; ".join(self._pod_troubles(namespace)) or standing
                raise ClusterError(f"the controller does not run after {timeout_s:.0f} s: {trouble}")
            time.sleep(POLL_S)

    def look(self, manifests: list[Manifest]) -> Installed:
        """What an uninstallation would meet and remove."""
        jobs = self._jobs()
        living = tuple(job.key for job in jobs if not job.status.phase.terminal)
        present = (self._found(item) for item in self._removable(manifests))
        return Installed(tuple(job.key for job in jobs), living, tuple(item for item in present if item))

    def remove(self, objects: tuple[Manifest, ...]) -> None:
        """Delete what `look` has found; with the jobs' definition, the first, the cluster deletes jobs and workers."""
        for item in objects:
            try:
                self._connection.request("DELETE", path_of(item), {"propagationPolicy": "Background"})
            except NotFoundError:
                continue
            self._say(f"{name_of(item)}: removed")

    def _apply(self, manifest: Manifest) -> None:
        before = self._found(manifest)
        if manifest["kind"] == "Namespace" and before is not None and not _is_ours(before):
            self._say(f"{name_of(manifest)}: left as it is")
            return
        params = {"fieldManager": FIELD_MANAGER, "force": "true"}
        try:
            after = self._connection.request("PATCH", path_of(manifest), manifest, params, content_type=APPLY_PATCH)
        except NoSuchApiError:
            if manifest["kind"] != "PodDisruptionBudget":
                raise
            self._say(f"{name_of(manifest)}: left out, for this cluster has no policy/v1 (Kubernetes 1.21)")
            return
        done = "created" if before is None else "unchanged" if _version(before) == _version(after) else "updated"
        self._say(f"{name_of(manifest)}: {done}")

    def _define(self, manifest: Manifest) -> None:
        """Apply the definition and wait until the cluster serves it."""
        try:
            self._apply(manifest)
        except ClusterError as e:
            if installation.RULES not in str(e):
                raise
            self._say("rules between fields are left out: the command line and the controller keep them instead")
            self._apply(installation.without_rules(manifest))
        self._await_established(manifest)

    def _keep_key(self, namespace: str) -> None:
        """Make the key of the tokens, once: running workers hold tokens made from it."""
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

    def _found(self, manifest: Manifest) -> Manifest | None:
        try:
            return self._connection.request("GET", path_of(manifest))
        except NotFoundError:
            return None

    def _jobs(self) -> list[ElasticJob]:
        try:
            items = list_objects(self._connection, resource_path(API_VERSION, None, PLURAL))
        except NoSuchApiError:
            return []
        return [ElasticJob.from_manifest(item) for item in items]

    def _removable(self, manifests: list[Manifest]) -> Iterator[Manifest]:
        """In order: the definition and with it all jobs, what stands in the namespace, and the namespace if ours."""
        namespace = next(item for item in manifests if item["kind"] == "Namespace")
        yield from (item for item in manifests if item["kind"] == _CRD)
        yield installation.key_secret(namespace["metadata"]["name"], "")
        yield from (item for item in reversed(manifests) if item["kind"] not in (_CRD, "Namespace"))
        yield installation.lease(namespace["metadata"]["name"])  # when nobody has the right to make it again
        found = self._found(namespace)
        if found is not None and _is_ours(found):
            yield namespace

    def _pod_troubles(self, namespace: str) -> Iterator[str]:
        params = {"labelSelector": f"{installation.LABEL}={installation.LABEL_VALUE}"}
        pods = self._connection.request("GET", resource_path("v1", namespace, "pods"), None, params)
        for pod in pods.get("items") or []:
            for trouble in pod_troubles(pod):
                yield f"{pod['metadata']['name']}: {trouble}"


def rollout(found: Manifest) -> str:
    """What a Deployment still lacks to be at its newest state with all replicas; empty: nothing. Pure."""
    wanted, status = found["spec"].get("replicas", 1), found.get("status", {})
    if status.get("observedGeneration", 0) < found["metadata"].get("generation", 0):
        return "the cluster has not looked at it yet"
    new, available = status.get("updatedReplicas", 0), status.get("availableReplicas", 0)
    if new < wanted or status.get("replicas", 0) > new:
        return f"{new} of {wanted} replicas are up to date"
    return f"{available} of {wanted} replicas are ready" if available < wanted else ""


def pod_troubles(pod: Manifest) -> Iterator[str]:
    """Why a pod does not run, in Kubernetes' words. Pure."""
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
    """Where an object of ours is found."""
    kind, metadata = manifest["kind"], manifest["metadata"]
    namespace = None if kind in _CLUSTER_WIDE else metadata["namespace"]
    return resource_path(manifest["apiVersion"], namespace, f"{kind.lower()}s", metadata["name"])


def name_of(manifest: Manifest) -> str:
    """`Deployment elasticctl-controller`."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _is_ours(namespace: Manifest) -> bool:
    labels: dict[str, Any] = namespace["metadata"].get("labels") or {}
    return labels.get(installation.LABEL_MANAGER) == FIELD_MANAGER


def _version(manifest: Manifest) -> str:
    return str(manifest["metadata"]["resourceVersion"])
