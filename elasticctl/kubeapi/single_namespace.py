"""An installation for one namespace: the same objects as for a whole cluster, with rights in that namespace only.

Rights to cluster-scoped objects (nodes, quotas, Kueue's flavors) cannot be in a Role. They stay in a ClusterRole named
after the namespace, which an administrator of the cluster applies if the feature was requested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticctl.api.codec import Manifest

LABEL_NAMESPACE = "elasticctl.dev/for-namespace"
OF_THE_CLUSTER = frozenset(
    {
        "nodes",
        "elasticquotas",
        "elasticquotas/status",
        "resourceflavors",
        "workloadpriorityclasses",
        "priorityclasses",
    }
)
"""The resources among the controller's rights that are in no namespace."""
OF_ONE_CONTROLLER = frozenset({"PriorityLevelConfiguration", "FlowSchema"})
"""A share of the API server's time is an administrator's to give: to the controller of the whole cluster."""


def confine(manifests: list[Manifest], namespace: str, account: str) -> list[Manifest]:
    """Turn the objects for a cluster into those for one namespace, which exists already.

    `account` is the controller's service account: its roles are those that are bound to it.
    """
    bound = {item["roleRef"]["name"] for item in manifests if _binds(item, account)}
    roles = {_name(item): item for item in manifests if item["kind"] == "ClusterRole" and _name(item) in bound}
    confined: list[Manifest] = []
    for item in manifests:
        if item["kind"] == "Namespace" or item["kind"] in OF_ONE_CONTROLLER:
            continue
        if item["kind"] == "ClusterRole" and _name(item) in bound:
            confined += _split(item, namespace)
        elif _binds(item, account):
            confined += (_bind(item, role, namespace) for role in _split(roles[item["roleRef"]["name"]], namespace))
        else:
            confined.append(item)
    return confined


def is_for_all(manifest: Manifest) -> bool:
    """True for objects that all installations in a cluster share: definitions, users' roles, admission policies."""
    metadata = manifest["metadata"]
    return "namespace" not in metadata and LABEL_NAMESPACE not in metadata.get("labels", {})


def _binds(item: Manifest, account: str) -> bool:
    return item["kind"] == "ClusterRoleBinding" and any(subject["name"] == account for subject in item["subjects"])


def _split(role: Manifest, namespace: str) -> Iterator[Manifest]:
    """The role's rules for namespaced resources, then those for cluster-scoped ones; an empty part is left out."""
    of_cluster = [rule for rule in role["rules"] if OF_THE_CLUSTER.issuperset(rule["resources"])]
    inside = [rule for rule in role["rules"] if rule not in of_cluster]
    if inside:
        yield {**role, "kind": "Role", "metadata": {**role["metadata"], "namespace": namespace}, "rules": inside}
    if of_cluster:
        yield {**role, "metadata": _apart(role["metadata"], namespace), "rules": of_cluster}


def _bind(binding: Manifest, role: Manifest, namespace: str) -> Manifest:
    inside = role["kind"] == "Role"
    metadata = binding["metadata"]
    metadata = {**metadata, "namespace": namespace} if inside else _apart(metadata, namespace)
    reference = {**binding["roleRef"], "kind": role["kind"], "name": _name(role)}
    return {**binding, "kind": f"{role['kind']}Binding", "metadata": metadata, "roleRef": reference}


def _apart(metadata: dict[str, Any], namespace: str) -> dict[str, Any]:
    """The metadata of a cluster-scoped object that belongs to the installation in this namespace."""
    labels = {**metadata.get("labels", {}), LABEL_NAMESPACE: namespace}
    return {**metadata, "name": f"{metadata['name']}-{namespace}", "labels": labels}


def _name(item: Manifest) -> str:
    return str(item["metadata"]["name"])
