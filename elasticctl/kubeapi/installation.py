"""The objects that `elasticctl install` applies: read from the package and adapted to one cluster.

The files can be applied with kubectl unchanged; only what differs between installations is changed here.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.yamltext import parse_yaml
from elasticctl.kubeapi.features import ALL, FOR_THE_CLUSTER, LABEL_FEATURE, Feature, format_features
from elasticctl.kubeapi.single_namespace import confine

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
