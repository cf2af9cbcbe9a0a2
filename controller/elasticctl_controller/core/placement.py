"""On which nodes a worker's pod is to run, and on which not, beside what its template says."""

from __future__ import annotations

from collections.abc import Collection

from elasticctl.api.codec import Manifest
from elasticctl.api.objects import as_list, as_mapping

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


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


def _by_node(pod: Manifest) -> Manifest:
    return dict(as_mapping(as_mapping(pod["spec"].get("affinity")).get("nodeAffinity")))


def _with(pod: Manifest, name: str, value: object) -> Manifest:
    affinity = {**as_mapping(pod["spec"].get("affinity")), "nodeAffinity": {**_by_node(pod), name: value}}
    return pod | {"spec": pod["spec"] | {"affinity": affinity}}
