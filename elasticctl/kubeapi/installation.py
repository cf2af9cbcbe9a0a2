"""The objects that `elasticctl install` applies: read from the package and adapted to one cluster.

The files can be applied with kubectl unchanged; only what differs between installations is changed here.

An installation for one namespace has the same objects, with rights in that namespace only. Rights to cluster-scoped
objects (nodes, quotas, Kueue's flavors) cannot be in a Role. They stay in a ClusterRole named after the namespace,
which an administrator of the cluster applies if the feature was requested.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.yamltext import parse_yaml
from elasticctl.kubeapi.features import ALL, FOR_THE_CLUSTER, LABEL_FEATURE, Feature, format_features

NAMESPACE = "elasticctl-system"
DEPLOYMENT = "elasticctl-controller"
DASHBOARD = "elasticctl-dashboard"
ACCOUNT = "elasticctl-controller"
LEASE = "elasticctl-controller"
KEY_SECRET = "elasticctl-rendezvous-key"  # noqa: S105 - the name of one
LABEL = "app.kubernetes.io/name"
LABEL_VALUE = "elasticctl"
LABEL_MANAGER = "app.kubernetes.io/managed-by"

_FILES = ("crd.yaml", "access.yaml", "features.yaml", "quota.yaml", "limits.yaml", "controller.yaml")
_DASHBOARD_FILE = "dashboard/dashboard.yaml"
_CAPACITY = "--capacity="
_SHARING = ("--sharing", _CAPACITY)
_WEBHOOKS = "--webhook-to="
_FEATURES = "--features="
_WATCHED = "--watch-namespace="


def manifests(
    *,
    namespace: str = NAMESPACE,
    image: str = "",
    replicas: int | None = None,
    flags: Sequence[str] = (),
    features: Collection[Feature] = FOR_THE_CLUSTER,
    confined: bool = False,
) -> list[Manifest]:
    """All objects in the order in which they are applied; an empty `image` leaves the one in the file.

    `flags` are added to the controller's flags in the file (`sharing_flags`, `webhook_flags`); it gets the rights for
    `features`. `confined`: for jobs of `namespace` alone, with no rights elsewhere.
    """
    read = [_with_namespace(item, namespace) for name in _FILES for item in _read_objects(name)]
    found = [item for item in read if item["metadata"].get("labels", {}).get(LABEL_FEATURE, "") in {"", *features}]
    found = confine(found, namespace, ACCOUNT) if confined else found
    deployment = next(item for item in found if item["kind"] == "Deployment")
    flags = [f"{_FEATURES}{format_features(features)}", *([f"{_WATCHED}{namespace}"] if confined else []), *flags]
    if image:
        deployment["spec"]["template"]["spec"]["containers"][0]["image"] = image
    if replicas is not None:
        deployment["spec"]["replicas"] = replicas
    deployment["spec"]["template"]["spec"]["containers"][0]["args"] += flags
    return found


def dashboard_manifests(namespace: str, image: str = "", flags: Sequence[str] = ()) -> list[Manifest]:
    """The objects of the shared dashboard, which has no rights of its own; `flags` are added to those in the file."""
    found = [_with_namespace(item, namespace) for item in _read_objects(_DASHBOARD_FILE)]
    container = found[-1]["spec"]["template"]["spec"]["containers"][0]
    container["image"] = image or container["image"]
    container["args"] += flags
    return found


def key_secret(namespace: str, key: str) -> Manifest:
    """The Secret with the key from which jobs' tokens are derived; `key` is hexadecimal."""
    metadata = {"name": KEY_SECRET, "namespace": namespace, "labels": {LABEL: LABEL_VALUE}}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": {"key": key}}


def lease(namespace: str) -> Manifest:
    """The Lease by which the replicas elect a leader; they create it in their namespace."""
    metadata = {"name": LEASE, "namespace": namespace}
    return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata}


def image_of(deployment: Manifest) -> str:
    """The image that a Deployment of ours runs."""
    return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])


def features_of(deployment: Manifest) -> frozenset[Feature]:
    """The features that a Deployment of ours was installed with; all, if it predates the choice."""
    given = _args_of(deployment, (_FEATURES,))
    if not given:
        return ALL
    return frozenset(feature for feature in Feature if feature in given[0].removeprefix(_FEATURES).split(","))


def watched_by(deployment: Manifest) -> str:
    """The namespace whose jobs a Deployment of ours runs; "" for all namespaces."""
    return next((arg.removeprefix(_WATCHED) for arg in _args_of(deployment, (_WATCHED,))), "")


def sharing_flags(capacity: Mapping[str, int]) -> list[str]:
    """The controller's flags for sharing; `capacity`: slots by pool up to which an autoscaler may scale."""
    return ["--sharing", *(f"{_CAPACITY}{kind}={slots}" for kind, slots in sorted(capacity.items()))]


def sharing_of(deployment: Manifest) -> list[str]:
    """The sharing flags that a Deployment of ours runs with; empty if it does not share."""
    return _args_of(deployment, _SHARING)


def webhook_flags(hosts: Sequence[str]) -> list[str]:
    """The controller's flags for the hosts whose webhooks it may call."""
    return [f"{_WEBHOOKS}{host}" for host in hosts]


def webhooks_of(deployment: Manifest) -> list[str]:
    """The same flags of a Deployment of ours; empty if it may call every public host."""
    return _args_of(deployment, (_WEBHOOKS,))


def _args_of(deployment: Manifest, starts: tuple[str, ...]) -> list[str]:
    args = deployment["spec"]["template"]["spec"]["containers"][0].get("args") or []
    return [arg for arg in args if isinstance(arg, str) and arg.startswith(starts)]


def capacity_of(flags: Iterable[str]) -> dict[str, int]:
    """The slots by pool that such flags name."""
    given = (flag.removeprefix(_CAPACITY).partition("=") for flag in flags if flag.startswith(_CAPACITY))
    return {kind: int(slots) for kind, _, slots in given if slots.isascii() and slots.isdigit()}


@functools.cache
def _read_objects(name: str) -> tuple[Manifest, ...]:
    text = resources.files("elasticctl_controller").joinpath("deploy", *name.split("/")).read_text("utf-8")
    return tuple(parse_yaml(part, name).data for part in text.split("\n---\n"))


def _with_namespace(value: Any, namespace: str) -> Any:
    """A copy with the default namespace replaced everywhere: in objects, in their subjects, in URLs."""
    if isinstance(value, dict):
        return {key: _with_namespace(item, namespace) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_namespace(item, namespace) for item in value]
    return value.replace(NAMESPACE, namespace) if isinstance(value, str) else value


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

    `account` is the controller's service account; its roles are the ones that are bound to it.
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
