"""On which nodes a worker's pod is to run, and on which not, beside what its template says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.goal import SPOT, capacity_of, zone_of
from elasticctl.api.gpu_types import AWS_CAPACITY_LABELS, GKE_SPOT_LABEL, INSTANCE_LABEL
from elasticctl.api.objects import as_list, as_mapping
from elasticctl.api.spec import ANNOTATION_POOL

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
_ZONE = "topology.kubernetes.io/zone"


def prefer_node(pod: Manifest, node: str) -> Manifest:
    """Return the pod with a preference for this node."""
    on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    preferences = as_list(_by_node(pod).get(_PREFERRED))
    return _with(pod, _PREFERRED, [*preferences, {"weight": 100, "preference": on_node}])


def avoid_nodes(pod: Manifest, nodes: Collection[str]) -> Manifest:
    """Return the pod with the requirement to be on none of these nodes.

    By name for the scheduler, and by the label that is the name almost everywhere: autoscalers read labels only.
    """
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    label = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    terms = as_list(as_mapping(_by_node(pod).get(_REQUIRED)).get("nodeSelectorTerms"))
    elsewhere = [
        {
            **as_mapping(term),
            "matchExpressions": [*as_list(as_mapping(term).get("matchExpressions")), label],
            "matchFields": [*as_list(as_mapping(term).get("matchFields")), *fields],
        }
        for term in terms or [{}]
        if term or not terms  # an empty one matches no node, and is not to match others now
    ]
    return _with(pod, _REQUIRED, {"nodeSelectorTerms": elsewhere})


def require_node_types(pod: Manifest, types: Collection[str]) -> Manifest:
    """Return the pod with the requirement to be on a node of one of these types, whatever else it requires."""
    label = {"key": INSTANCE_LABEL, "operator": "In", "values": list(types)}
    terms = as_list(as_mapping(_by_node(pod).get(_REQUIRED)).get("nodeSelectorTerms"))
    typed = [
        {**as_mapping(term), "matchExpressions": [*as_list(as_mapping(term).get("matchExpressions")), label]}
        for term in terms or [{}]
        if term or not terms  # an empty one matches no node, and is not to match others now
    ]
    return _with(pod, _REQUIRED, {"nodeSelectorTerms": typed})


def ask_for_pool(pod: Manifest, pool: str) -> Manifest:
    """Return the pod with a mark of its pool, and on the machines of that: of its capacity, where the template names a
    capacity at all, and of its zone."""
    spot, zone = capacity_of(pool) == SPOT, zone_of(pool)
    metadata, spec = dict(as_mapping(pod.get("metadata"))), dict(pod["spec"])
    metadata["annotations"] = {**as_mapping(metadata.get("annotations")), ANNOTATION_POOL: pool}
    labels = {label: (spot_value,) if spot else others for label, spot_value, others in AWS_CAPACITY_LABELS}
    if spec.get("nodeSelector"):
        selector = {key: labels.get(key, (value,))[0] for key, value in as_mapping(spec["nodeSelector"]).items()}
        if GKE_SPOT_LABEL in selector and not spot:
            del selector[GKE_SPOT_LABEL]  # on demand is its absence
        spec["nodeSelector"] = selector
    pod = {**pod, "metadata": metadata, "spec": spec}
    terms = as_list(as_mapping(_by_node(pod).get(_REQUIRED)).get("nodeSelectorTerms"))
    in_zone = [{"key": _ZONE, "operator": "In", "values": [zone]}] if zone else []
    if not terms and not in_zone:
        return pod
    asked = [
        {
            **term,
            "matchExpressions": [
                *(_of_capacity(as_mapping(one), labels, spot) for one in as_list(term.get("matchExpressions"))),
                *in_zone,
            ],
        }
        for term in map(as_mapping, terms or [{}])
    ]
    return _with(pod, _REQUIRED, {"nodeSelectorTerms": asked})


def _of_capacity(one: Mapping[str, Any], labels: Mapping[str, tuple[str, ...]], spot: bool) -> Mapping[str, Any]:
    """A requirement about the capacity's label, with what the pool wants; any other as it is."""
    key = str(one.get("key"))
    if key in labels:
        return {"key": key, "operator": "In", "values": list(labels[key])}
    if key == GKE_SPOT_LABEL:
        return {"key": key, "operator": "In", "values": ["true"]} if spot else {"key": key, "operator": "DoesNotExist"}
    return one


def _by_node(pod: Manifest) -> Manifest:
    return dict(as_mapping(as_mapping(pod["spec"].get("affinity")).get("nodeAffinity")))


def _with(pod: Manifest, name: str, value: object) -> Manifest:
    affinity = {**as_mapping(pod["spec"].get("affinity")), "nodeAffinity": {**_by_node(pod), name: value}}
    return pod | {"spec": pod["spec"] | {"affinity": affinity}}
