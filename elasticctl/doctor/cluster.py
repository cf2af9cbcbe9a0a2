"""Checks that a Kubernetes cluster is ready for this user's jobs: the API, the installation, rights, nodes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.errors import ClusterError, ForbiddenError, NotFoundError
from elasticctl.api.gpu_types import AWS_CAPACITY_LABELS, GKE_GPU_LABEL, GKE_SPOT_LABEL, GPU_TYPES, INSTANCE_LABEL
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import GROUP, KIND, PLURAL, VERSION
from elasticctl.api.text import plural, span
from elasticctl.doctor import Check, CheckOutcome
from elasticctl.doctor.platform import (
    allocatable_gpus,
    check_cloud,
    check_identity,
    check_network,
    labels_of,
)
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection, list_objects, resource_path
from elasticctl.kubeapi.responses import NoSuchApiError
from elasticctl.settings.contexts import Context

OLDEST = (1, 34)
"""The oldest release of Kubernetes that is tested."""
LEASE_STALE_S = 30.0
"""A leader renews every two seconds (`elasticctl_controller.kube.election`)."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_SCALES = "fine if an autoscaler adds them on demand"
_PLUGIN = "install NVIDIA's device plugin, or the provider's GPU image: docs/clouds.md"


@dataclass(frozen=True, slots=True)
class Right:
    """A Kubernetes permission: a verb on a resource. `needed_by`: our verbs that do not work without it."""

    verb: str
    resource: str
    needed_by: str
    group: str = ""
    part: str = ""
    vital: bool = False

    def review(self, namespace: str) -> dict[str, Any]:
        """The SelfSubjectAccessReview that asks whether this user has it."""
        asked = {
            "namespace": namespace,
            "verb": self.verb,
            "group": self.group,
            "resource": self.resource,
            "subresource": self.part,
        }
        return {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": asked},
        }

    def __str__(self) -> str:
        resource = f"{self.resource}/{self.part}" if self.part else self.resource
        return f"{self.verb} {resource} ({self.needed_by})"


RIGHTS = (
    Right("list", PLURAL, "list, status", GROUP, vital=True),
    Right("get", PLURAL, "all verbs on a job", GROUP, vital=True),
    Right("create", PLURAL, "submit, rerun", GROUP, vital=True),
    Right("patch", PLURAL, "scale, suspend, resume, cancel", GROUP),
    Right("delete", PLURAL, "delete, prune", GROUP),
    Right("list", "pods", "status, explain"),
    Right("watch", "pods", "logs -f"),
    Right("get", "pods", "preempt"),
    Right("delete", "pods", "preempt"),
    Right("patch", "pods", "preempt, to be recorded as one"),
    Right("get", "pods", "logs", part="log"),
    Right("list", "events", "events, describe"),
)


def check_cluster(connection: Connection, context: Context, namespace: str, system: str) -> Iterator[Check]:
    """Check a cluster, one thing after another; stop if it does not answer.

    `system` is the namespace of the controller. Changes nothing in the cluster.
    """
    answer = _run_check(
        "cluster", lambda: _check_release(connection), f"kubectl --context {context.kube_context} version"
    )
    yield answer
    if answer.outcome is CheckOutcome.FAILED:
        return
    install = f"elasticctl install --context {context.name}"
    yield _run_check("definition", lambda: _check_definition(connection, install), install)
    home = _controllers_home(connection, namespace, system)
    yield _run_check("controller", lambda: _check_controller(connection, home, install), install)
    yield _run_check(
        "namespace", lambda: _check_namespace(connection, namespace), f"kubectl create namespace {namespace}"
    )
    yield _run_check("rights", lambda: _check_rights(connection, namespace), "")
    if context.service_account:
        yield _run_check("identity", lambda: check_identity(connection, namespace, context.service_account), "")
    nodes: list[Manifest] = []
    try:
        nodes = list_objects(connection, resource_path("v1", None, "nodes"))
        yield from check_nodes(nodes, context.provider)
        yield check_cloud(nodes, context.provider)
    except ForbiddenError as e:
        yield Check("nodes", CheckOutcome.SKIPPED, f"not allowed to check: {e}")
    except ClusterError as e:
        yield Check("nodes", CheckOutcome.FAILED, str(e))
    plugins = resource_path("apps/v1", None, "daemonsets")
    yield _run_check("network", lambda: check_network(list_objects(connection, plugins), nodes), "")


def _run_check(name: str, check: Callable[[], Check], fix: str) -> Check:
    """Run a check; a missing right skips it, any other refusal fails it."""
    try:
        return check()
    except ForbiddenError as e:
        return Check(name, CheckOutcome.SKIPPED, f"not allowed to check: {e}")
    except ClusterError as e:
        return Check(name, CheckOutcome.FAILED, str(e), fix)


def _check_release(connection: Connection) -> Check:
    began = time.monotonic()
    version = connection.request("GET", "/version")
    took_ms = 1000 * (time.monotonic() - began)
    says = f"Kubernetes {version.get('gitVersion', 'of unknown version')} at {connection.server}, {took_ms:.0f} ms"
    if _release_number(version) < OLDEST:
        says += f"; {'.'.join(map(str, OLDEST))} is the oldest tested version"
        return Check("cluster", CheckOutcome.WARNING, says, "upgrade the cluster")
    return Check("cluster", CheckOutcome.OK, says)


def _release_number(version: Manifest) -> tuple[int, int]:
    """(1, 34) of {"major": "1", "minor": "34+"}."""
    parts = ["".join(filter(str.isdigit, str(version.get(part, "")))) for part in ("major", "minor")]
    return int(parts[0] or 0), int(parts[1] or 0)


def _check_definition(connection: Connection, install: str) -> Check:
    """Compare the fields of the cluster's definition with those that this version writes."""
    ours = next(item for item in installation.manifests() if item["kind"] == "CustomResourceDefinition")
    path = resource_path("apiextensions.k8s.io/v1", None, "customresourcedefinitions", f"{PLURAL}.{GROUP}")
    try:
        theirs = connection.request("GET", path)
    except ForbiddenError:
        return _check_resource_is_served(connection, install)
    except NotFoundError:
        return Check("definition", CheckOutcome.FAILED, f"the cluster knows no {KIND}s", install)
    missing = sorted(_field_names(ours) - _field_names(theirs))
    if missing:
        names = ", ".join(islice(missing, 3)) + (", …" if len(missing) > 3 else "")
        return Check("definition", CheckOutcome.FAILED, f"older than this elasticctl: {names} missing", install)
    return Check("definition", CheckOutcome.OK, f"{PLURAL}.{GROUP}, {VERSION}")


def _check_resource_is_served(connection: Connection, install: str) -> Check:
    """Without the right to read definitions: check that the resource exists."""
    try:
        connection.request("GET", f"/apis/{GROUP}/{VERSION}")
    except (NoSuchApiError, NotFoundError):
        return Check("definition", CheckOutcome.FAILED, f"the cluster knows no {KIND}s", install)
    return Check("definition", CheckOutcome.OK, f"{PLURAL}.{GROUP}, {VERSION}; this user may not read its fields")


def _field_names(definition: Manifest) -> set[str]:
    """`spec.suspend` and so on: the fields of a job, two levels deep."""
    version = next((item for item in definition["spec"]["versions"] if item["name"] == VERSION), None)
    if version is None:
        return set()
    top = version["schema"]["openAPIV3Schema"].get("properties", {})
    return {f"{part}.{name}" for part in ("spec", "status") for name in top.get(part, {}).get("properties", {})}


def _controllers_home(connection: Connection, namespace: str, system: str) -> str:
    """The namespace of the controller that runs the jobs of `namespace`: the same one if it has its own controller."""
    try:
        connection.request("GET", resource_path("apps/v1", namespace, "deployments", installation.DEPLOYMENT))
    except ClusterError:
        return system
    return namespace


def _check_controller(connection: Connection, system: str, install: str) -> Check:
    path = resource_path("apps/v1", system, "deployments", installation.DEPLOYMENT)
    try:
        found = connection.request("GET", path)
    except NotFoundError:
        return Check("controller", CheckOutcome.FAILED, f"not installed in the namespace {system}", install)
    ready, wanted = found.get("status", {}).get("readyReplicas", 0), found["spec"].get("replicas", 1)
    says = f"{ready} of {wanted} replicas ready, {installation.image_of(found)}"
    if not ready:
        return Check("controller", CheckOutcome.FAILED, says, f"kubectl describe pods -n {system}")
    lease = connection.request("GET", resource_path("coordination.k8s.io/v1", system, "leases", installation.LEASE))
    renewed_at = from_rfc3339(lease["spec"].get("renewTime"))
    holder, age_s = lease["spec"].get("holderIdentity"), time.time() - (renewed_at or 0.0)
    if not holder or age_s > LEASE_STALE_S:
        since = f" since {span(age_s)}" if renewed_at else ""
        logs = f"kubectl logs -n {system} deployment/{installation.DEPLOYMENT}"
        return Check("controller", CheckOutcome.FAILED, f"{says}; none of them is the leader{since}", logs)
    return Check(
        "controller", CheckOutcome.OK if ready == wanted else CheckOutcome.WARNING, f"{says}; the leader is {holder}"
    )


def _check_namespace(connection: Connection, namespace: str) -> Check:
    try:
        connection.request("GET", resource_path("v1", None, "namespaces", namespace))
    except NotFoundError:
        return Check(
            "namespace",
            CheckOutcome.FAILED,
            f"{namespace} does not exist",
            f"kubectl create namespace {namespace}",
        )
    return Check("namespace", CheckOutcome.OK, namespace)


def _check_rights(connection: Connection, namespace: str) -> Check:
    refused = []
    for right in RIGHTS:
        answer = connection.request("POST", _REVIEWS, right.review(namespace))
        if not answer.get("status", {}).get("allowed"):
            refused.append(right)
    if not refused:
        return Check("rights", CheckOutcome.OK, f"all that elasticctl needs in {namespace}")
    outcome = CheckOutcome.FAILED if any(right.vital for right in refused) else CheckOutcome.WARNING
    fix = f"kubectl create rolebinding NAME -n {namespace} --clusterrole=edit --user=YOU, by an administrator"
    return Check("rights", outcome, f"not allowed: {', '.join(map(str, refused))}", fix)


def check_nodes(nodes: Sequence[Manifest], provider: str) -> Iterator[Check]:
    """Check all nodes of a cluster of `provider`: readiness, GPUs, spot capacity."""
    ready = [node for node in nodes if _is_ready(node)]
    yield _check_readiness(len(ready), len(nodes))
    yield _check_gpus(ready, provider)
    spot = _count_spot_nodes(ready, provider)
    if spot is None:
        yield Check(
            "spot", CheckOutcome.SKIPPED, f"it is not known how a cluster of provider {provider} labels spot nodes"
        )
    elif spot:
        yield Check("spot", CheckOutcome.OK, plural(spot, "spot node"))
    else:
        yield Check(
            "spot",
            CheckOutcome.WARNING,
            f"no spot node now; {_SCALES}",
            "add a spot node group (docs/clouds.md), or submit with --on-demand",
        )


def gpu_name(node: Manifest) -> str:
    """The GPU type in a node's labels, with our name for it if there is one; empty for none."""
    labels = labels_of(node)
    accelerator, instance = str(labels.get(GKE_GPU_LABEL, "")), labels.get(INSTANCE_LABEL, "")
    for gpu in GPU_TYPES.values():
        if accelerator and gpu.gke_accelerator == accelerator:
            return gpu.name
        if any(instance in names for names in gpu.aws.values()):
            return gpu.name
    return accelerator


def _check_readiness(ready: int, of: int) -> Check:
    if ready and ready == of:
        return Check("nodes", CheckOutcome.OK, f"{plural(ready, 'node')}, all ready")
    if ready:
        return Check("nodes", CheckOutcome.WARNING, f"{ready} of {plural(of, 'node')} ready", "kubectl get nodes")
    if of:
        return Check("nodes", CheckOutcome.FAILED, f"none of {plural(of, 'node')} is ready", "kubectl describe nodes")
    return Check("nodes", CheckOutcome.WARNING, f"no node now; {_SCALES}", "kubectl get nodes")


def _check_gpus(nodes: Sequence[Manifest], provider: str) -> Check:
    found: Counter[str] = Counter()
    for node in nodes:
        if allocatable_gpus(node):
            found[gpu_name(node) or "of an unknown type"] += allocatable_gpus(node)
    silent = [node for node in nodes if gpu_name(node) and not allocatable_gpus(node)]
    if silent:
        names = ", ".join(node["metadata"]["name"] for node in silent[:3]) + (", …" if len(silent) > 3 else "")
        says = f"{plural(len(silent), 'node')} with GPUs {'offers' if len(silent) == 1 else 'offer'} none: {names}"
        return Check("GPUs", CheckOutcome.FAILED, f"{says} (no {GPU_RESOURCE} is allocatable)", _PLUGIN)
    if not found:
        fix = "add a GPU node group: docs/clouds.md" if provider in ("aws", "gcp") else _PLUGIN
        return Check("GPUs", CheckOutcome.WARNING, f"no node offers {GPU_RESOURCE} now; {_SCALES}", fix)
    return Check("GPUs", CheckOutcome.OK, ", ".join(f"{count} {name}" for name, count in sorted(found.items())))


def _count_spot_nodes(nodes: Sequence[Manifest], provider: str) -> int | None:
    """The number of nodes with the provider's spot label; None if that label is unknown."""
    if provider == "aws":
        wanted = {(label, spot) for label, spot, _ in AWS_CAPACITY_LABELS}
    elif provider == "gcp":
        wanted = {(GKE_SPOT_LABEL, "true")}
    else:
        return None
    return sum(any(labels_of(node).get(label) == value for label, value in wanted) for node in nodes)


def _is_ready(node: Manifest) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)
