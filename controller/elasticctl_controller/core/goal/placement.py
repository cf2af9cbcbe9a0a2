"""Which nodes a worker's pod may run on, in addition to what its template says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.goal import SPOT, capacity_of, type_of, zone_of
from elasticctl.api.gpu_types import (
    AWS_CAPACITY_LABELS,
    GKE_GPU_LABEL,
    GKE_SPOT_LABEL,
    INSTANCE_LABEL,
    accelerator_of,
)
from elasticctl.api.objects import as_list, as_mapping, as_text
from elasticctl.api.spec import ANNOTATION_POOL

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
KARPENTER = "karpenter.sh/"
_ZONE = "topology.kubernetes.io/zone"


def asks_karpenter(pod: Manifest) -> bool:
    """True for a pod that asks for a machine of Karpenter, which adds none for pods that name nodes in any way."""
    keys = [key for term in _terms(pod) for key in _keys(term)]
    return any(key.startswith(KARPENTER) for key in (*keys, *as_mapping(pod["spec"].get("nodeSelector"))))


def prefer_node(pod: Manifest, node: str) -> Manifest:
    """Return the pod with a preference for this node."""
    on_node = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    preferences = as_list(_by_node(pod).get(_PREFERRED))
    return _with(pod, _PREFERRED, [*preferences, {"weight": 100, "preference": on_node}])


def avoid_nodes(pod: Manifest, nodes: Collection[str]) -> Manifest:
    """Return the pod with the requirement to run on none of these nodes.

    They are excluded by name for the scheduler, and by the hostname label, which is the name almost everywhere, for
    autoscalers, which only read labels.
    """
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in nodes]
    label = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(nodes)}
    terms = _terms(pod)
    elsewhere = [
        {
            **term,
            _LABELS: [*as_list(term.get(_LABELS)), label],
            "matchFields": [*as_list(term.get("matchFields")), *fields],
        }
        for term in terms or [{}]
        if term or not terms  # an empty one matches no node, and is not to match others now
    ]
    return _with(pod, _REQUIRED, {"nodeSelectorTerms": elsewhere})


def require_node_types(pod: Manifest, types: Collection[str]) -> Manifest:
    """Return the pod with the requirement to run on a node of one of these types, in addition to any others."""
    label = {"key": INSTANCE_LABEL, "operator": "In", "values": list(types)}
    terms = _terms(pod)
    typed = [
        {**term, _LABELS: [*as_list(term.get(_LABELS)), label]}
        for term in terms or [{}]
        if term or not terms  # an empty one matches no node, and is not to match others now
    ]
    return _with(pod, _REQUIRED, {"nodeSelectorTerms": typed})


def ask_for_pool(pod: Manifest, pool: str, *, insist: bool = False) -> Manifest:
    """Return the pod, annotated with its pool and restricted to machines of that pool's capacity, type and zone.

    The pool overrides what the template says about these. A capacity that the template does not mention is only
    required if we `insist`; otherwise all machines are assumed to be alike.
    """
    metadata, spec = dict(as_mapping(pod.get("metadata"))), dict(pod["spec"])
    metadata["annotations"] = {**as_mapping(metadata.get("annotations")), ANNOTATION_POOL: pool}
    wanted = _labels_of(pool)
    selector = as_mapping(spec.get("nodeSelector"))
    terms = _terms(pod)
    named = {*selector, *(key for term in terms for key in _keys(term))}
    if selector:
        kept = {key: value for key, value in selector.items() if wanted.get(key, (value,))}  # no values: its absence
        spec["nodeSelector"] = {key: wanted.get(key, (value,))[0] for key, value in kept.items()}
    pod = {**pod, "metadata": metadata, "spec": spec}
    either = _any_label_of(pool) if insist and not named & {*_CAPACITY_LABELS} else [[]]
    if not terms and either == [[]] and not wanted.keys() & {*_ADDED} - named:
        return pod
    asked = [
        {
            **term,
            _LABELS: [
                *(_replaced(as_mapping(one), wanted) for one in as_list(term.get(_LABELS))),
                *(_one(key, wanted[key]) for key in _ADDED if key in wanted and key not in {*selector, *_keys(term)}),
                *capacity,
            ],
        }
        for term in terms or [{}]
        for capacity in (either if term or not terms else [[]])
    ]
    return _with(pod, _REQUIRED, {"nodeSelectorTerms": asked})


def _terms(pod: Manifest) -> list[Mapping[str, Any]]:
    """The terms that the pod requires of its node; any one of them is enough."""
    return list(map(as_mapping, as_list(as_mapping(_by_node(pod).get(_REQUIRED)).get("nodeSelectorTerms"))))


def _keys(term: Mapping[str, Any]) -> list[str]:
    """The labels that a term names."""
    return [as_text(as_mapping(one).get("key")) for one in as_list(term.get(_LABELS))]


_LABELS = "matchExpressions"
_ADDED = (INSTANCE_LABEL, _ZONE)
"""Labels that are required of a pool's machines even if the template does not mention them."""
_CAPACITY_LABELS = (*(label for label, _, _ in AWS_CAPACITY_LABELS), GKE_SPOT_LABEL)


def _labels_of(pool: str) -> dict[str, tuple[str, ...]]:
    """Label -> the values that nodes of this pool have; no values: the label must be absent."""
    spot, named = capacity_of(pool) == SPOT, type_of(pool)
    found: dict[str, tuple[str, ...]] = {}
    if capacity_of(pool):
        found = {label: (spot_value,) if spot else others for label, spot_value, others in AWS_CAPACITY_LABELS}
        found[GKE_SPOT_LABEL] = ("true",) if spot else ()
    if named:
        found[INSTANCE_LABEL] = (named,)
        accelerator = accelerator_of(named)
        found |= {GKE_GPU_LABEL: (accelerator,)} if accelerator else {}
    return found | ({_ZONE: (zone_of(pool),)} if zone_of(pool) else {})


def _any_label_of(pool: str) -> list[list[Manifest]]:
    """Alternative requirements for the pool's capacity, one for each kind of label that nodes may have for it."""
    if not capacity_of(pool):
        return [[]]
    wanted = _labels_of(pool)
    if capacity_of(pool) == SPOT:
        return [[_one(label, wanted[label])] for label in reversed(_CAPACITY_LABELS)]
    named = [[_one(label, wanted[label])] for label, _, _ in reversed(AWS_CAPACITY_LABELS)]
    return [*named, [_one(label, ()) for label in _CAPACITY_LABELS]]  # on GKE on demand is the absence of a label


def _replaced(one: Mapping[str, Any], wanted: Mapping[str, tuple[str, ...]]) -> Mapping[str, Any]:
    """A requirement about a label that the pool determines, with the pool's values; any other requirement unchanged."""
    key = str(one.get("key"))
    return _one(key, wanted[key]) if key in wanted else one


def _one(key: str, values: Collection[str]) -> Manifest:
    return (
        {"key": key, "operator": "In", "values": list(values)} if values else {"key": key, "operator": "DoesNotExist"}
    )


def _by_node(pod: Manifest) -> Manifest:
    return dict(as_mapping(as_mapping(pod["spec"].get("affinity")).get("nodeAffinity")))


def _with(pod: Manifest, name: str, value: object) -> Manifest:
    affinity = {**as_mapping(pod["spec"].get("affinity")), "nodeAffinity": {**_by_node(pod), name: value}}
    return pod | {"spec": pod["spec"] | {"affinity": affinity}}
