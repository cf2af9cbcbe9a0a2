"""Is a Kubernetes cluster ready for jobs, as far as this user may look?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from elasticctl.api.codec import Manifest, from_rfc3339
from elasticctl.api.errors import ClusterError, ForbiddenError, NotFoundError
from elasticctl.api.spec import GROUP, KIND, PLURAL, VERSION
from elasticctl.api.text import span
from elasticctl.doctor.check import Check, Outcome
from elasticctl.doctor.nodes import node_checks
from elasticctl.kubeapi import installation
from elasticctl.kubeapi.connection import Connection, all_items, resource_path
from elasticctl.kubeapi.refusals import NoSuchApiError
from elasticctl.settings.contexts import Context


@dataclass(frozen=True, slots=True)
class Right:
    """One right: a verb of Kubernetes on a resource. `needed_by`: the verbs of ours that do not work without it."""

    verb: str
    resource: str
    needed_by: str
    group: str = ""
    part: str = ""
    vital: bool = False

    def review(self, namespace: str) -> dict[str, Any]:
        """The SelfSubjectAccessReview that asks for it."""
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


OLDEST = (1, 20)
"""The oldest release of Kubernetes that is tested."""
LEASE_STALE_S = 30.0
"""A leader renews every two seconds (`elasticctl_controller.kube.election`)."""
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def cluster_checks(connection: Connection, context: Context, namespace: str, system: str) -> Iterator[Check]:
    """Look at a cluster, one check after the other, and stop where it does not answer.

    `system` is the namespace of the controller. Changes nothing in the cluster.
    """
    answer = _guarded("cluster", lambda: _release(connection), f"kubectl --context {context.kube_context} version")
    yield answer
    if answer.outcome is Outcome.FAILED:
        return
    install = f"elasticctl install --context {context.name}"
    yield _guarded("definition", lambda: _definition(connection, install), install)
    yield _guarded("controller", lambda: _controller(connection, system, install), install)
    yield _guarded("namespace", lambda: _namespace(connection, namespace), f"kubectl create namespace {namespace}")
    yield _guarded("rights", lambda: _rights(connection, namespace), "")
    try:
        yield from node_checks(all_items(connection, resource_path("v1", None, "nodes")), context.provider)
    except ForbiddenError as e:
        yield Check("nodes", Outcome.SKIPPED, f"not allowed to look: {e}")
    except ClusterError as e:
        yield Check("nodes", Outcome.FAILED, str(e))


def _guarded(name: str, look: Callable[[], Check], mend: str) -> Check:
    """Make a check; what cannot be looked at is no failure, any other refusal is."""
    try:
        return look()
    except ForbiddenError as e:
        return Check(name, Outcome.SKIPPED, f"not allowed to look: {e}")
    except ClusterError as e:
        return Check(name, Outcome.FAILED, str(e), mend)


def _release(connection: Connection) -> Check:
    began = time.monotonic()
    version = connection.request("GET", "/version")
    took_ms = 1000 * (time.monotonic() - began)
    says = f"Kubernetes {version.get('gitVersion', 'of an unknown release')} at {connection.server}, {took_ms:.0f} ms"
    if _release_number(version) < OLDEST:
        says += f"; {'.'.join(map(str, OLDEST))} is the oldest that is tested"
        return Check("cluster", Outcome.WARNING, says, "upgrade the cluster")
    return Check("cluster", Outcome.OK, says)


def _release_number(version: Manifest) -> tuple[int, int]:
    """(1, 20) of {"major": "1", "minor": "20+"}."""
    parts = ["".join(filter(str.isdigit, str(version.get(part, "")))) for part in ("major", "minor")]
    return int(parts[0] or 0), int(parts[1] or 0)


def _definition(connection: Connection, install: str) -> Check:
    """Compare the fields of the cluster's definition with those that this command line writes."""
    ours = next(item for item in installation.manifests() if item["kind"] == "CustomResourceDefinition")
    path = resource_path("apiextensions.k8s.io/v1", None, "customresourcedefinitions", f"{PLURAL}.{GROUP}")
    try:
        theirs = connection.request("GET", path)
    except ForbiddenError:
        return _served(connection, install)
    except NotFoundError:
        return Check("definition", Outcome.FAILED, f"the cluster knows no {KIND}s", install)
    missing = sorted(_fields(ours) - _fields(theirs))
    if missing:
        names = ", ".join(islice(missing, 3)) + (", …" if len(missing) > 3 else "")
        return Check("definition", Outcome.FAILED, f"older than this command line: it has no {names}", install)
    return Check("definition", Outcome.OK, f"{PLURAL}.{GROUP}, {VERSION}")


def _served(connection: Connection, install: str) -> Check:
    """What somebody without rights to read definitions can tell: is the resource there?"""
    try:
        connection.request("GET", f"/apis/{GROUP}/{VERSION}")
    except (NoSuchApiError, NotFoundError):
        return Check("definition", Outcome.FAILED, f"the cluster knows no {KIND}s", install)
    return Check("definition", Outcome.OK, f"{PLURAL}.{GROUP}, {VERSION}; its fields are not for this user to read")


def _fields(definition: Manifest) -> set[str]:
    """`spec.suspend` and so on: the fields of a job, two levels deep."""
    version = next((item for item in definition["spec"]["versions"] if item["name"] == VERSION), None)
    if version is None:
        return set()
    top = version["schema"]["openAPIV3Schema"].get("properties", {})
    return {f"{part}.{name}" for part in ("spec", "status") for name in top.get(part, {}).get("properties", {})}


def _controller(connection: Connection, system: str, install: str) -> Check:
    path = resource_path("apps/v1", system, "deployments", installation.DEPLOYMENT)
    try:
        found = connection.request("GET", path)
    except NotFoundError:
        return Check("controller", Outcome.FAILED, f"there is none in the namespace {system}", install)
    ready, wanted = found.get("status", {}).get("readyReplicas", 0), found["spec"].get("replicas", 1)
    says = f"{ready} of {wanted} replicas ready, {installation.image_of(found)}"
    if not ready:
        return Check("controller", Outcome.FAILED, says, f"kubectl describe pods -n {system}")
    lease = connection.request("GET", resource_path("coordination.k8s.io/v1", system, "leases", installation.LEASE))
    renewed_at = from_rfc3339(lease["spec"].get("renewTime"))
    holder, age_s = lease["spec"].get("holderIdentity"), time.time() - (renewed_at or 0.0)
    if not holder or age_s > LEASE_STALE_S:
        since = f" since {span(age_s)}" if renewed_at else ""
        logs = f"kubectl logs -n {system} deployment/{installation.DEPLOYMENT}"
        return Check("controller", Outcome.FAILED, f"{says}; none of them acts{since}", logs)
    return Check("controller", Outcome.OK if ready == wanted else Outcome.WARNING, f"{says}; {holder} acts")


def _namespace(connection: Connection, namespace: str) -> Check:
    try:
        connection.request("GET", resource_path("v1", None, "namespaces", namespace))
    except NotFoundError:
        return Check("namespace", Outcome.FAILED, f"no {namespace}", f"kubectl create namespace {namespace}")
    return Check("namespace", Outcome.OK, namespace)


def _rights(connection: Connection, namespace: str) -> Check:
    refused = []
    for right in RIGHTS:
        answer = connection.request("POST", _REVIEWS, right.review(namespace))
        if not answer.get("status", {}).get("allowed"):
            refused.append(right)
    if not refused:
        return Check("rights", Outcome.OK, f"all that the command line asks for in {namespace}")
    outcome = Outcome.FAILED if any(right.vital for right in refused) else Outcome.WARNING
    mend = f"kubectl create rolebinding NAME -n {namespace} --clusterrole=edit --user=YOU, by an administrator"
    return Check("rights", outcome, f"not allowed: {', '.join(map(str, refused))}", mend)
