"""What a cluster reveals of its platform: of EKS and GKE, and of its network plugin.

docs/clouds.md has the source of each label, taint and annotation. Whether the network enforces NetworkPolicies is known
only from the name of its plugin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.gpu_types import GKE_SPOT_LABEL, GPU_TYPES, place
from elasticctl.api.objects import as_list, as_mapping, as_text, at
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.text import plural
from elasticctl.doctor import Check, CheckOutcome
from elasticctl.kubeapi.connection import Connection, resource_path

_PASSING = (
    "node.kubernetes.io/",
    "node.cloudprovider.kubernetes.io/",
    "karpenter.sh/",
    "ToBeDeleted",
    "DeletionCandidate",
)
"""Taints that come and go with a node's state."""
_QUEUED = "cloud.google.com/gke-queued"
_IDENTITIES = {
    "eks.amazonaws.com/role-arn": "the IAM role {} (IRSA)",
    "iam.gke.io/gcp-service-account": "the Google service account {} (workload identity)",
}


@dataclass(frozen=True, slots=True)
class Trait:
    """What a label means for its node; `value` "" matches any value."""

    says: str
    label: str
    value: str = ""


TRAITS = (
    Trait("of managed node groups", "eks.amazonaws.com/nodegroup"),
    Trait("of EKS Auto Mode", "eks.amazonaws.com/compute-type", "auto"),
    Trait("of Karpenter", "karpenter.sh/nodepool"),
    Trait("of GKE node pools", "cloud.google.com/gke-nodepool"),
    Trait("spot", "eks.amazonaws.com/capacityType", "SPOT"),
    Trait("spot", "karpenter.sh/capacity-type", "spot"),
    Trait("spot", GKE_SPOT_LABEL, "true"),
    Trait("preemptible", "cloud.google.com/gke-preemptible", "true"),
    Trait("on demand", "eks.amazonaws.com/capacityType", "ON_DEMAND"),
    Trait("on demand", "karpenter.sh/capacity-type", "on-demand"),
    Trait("of a capacity block", "eks.amazonaws.com/capacityType", "CAPACITY_BLOCK"),
    Trait("of a capacity block", "karpenter.k8s.aws/capacity-reservation-type", "capacity-block"),
    Trait("reserved", "karpenter.sh/capacity-type", "reserved"),
    Trait("flex-start", "cloud.google.com/gke-flex-start", "true"),
    Trait("in a placement group", "cloud.google.com/gke-placement-group"),
    Trait("with a known place in the network", "topology.k8s.aws/network-node-layer-1"),
    Trait("with a known place in the network", "cloud.google.com/gce-topology-block"),
)


def check_cloud(nodes: Sequence[Manifest], provider: str) -> Check:
    """Check the labels of nodes, and whether taints keep jobs off the nodes with GPUs."""
    found: Counter[str] = Counter()
    for node in nodes:
        found.update(dict.fromkeys(_traits(node), 1))
    if not found:
        return Check("cloud", CheckOutcome.SKIPPED, "no node has a label of EKS, GKE or Karpenter")
    says = ", ".join(f"{number} {name}" for name, number in found.items())
    says = f"of {plural(len(nodes), 'node')} {says}"
    taints = sorted({taint for node in nodes if allocatable_gpus(node) for taint in _unknown_taints(node, provider)})
    if not taints:
        return Check("cloud", CheckOutcome.OK, says)
    fix = "submit with --toleration, or put it into the template"
    if any(taint.startswith(_QUEUED) for taint in taints):
        fix = "such nodes come only through a ProvisioningRequest, which Kueue creates: docs/clouds.md"
    return Check("cloud", CheckOutcome.WARNING, f"{says}; jobs do not tolerate {', '.join(taints)}", fix)


def check_identity(connection: Connection, namespace: str, account: str) -> Check:
    """Check which cloud identity the workers use, according to their service account."""
    try:
        found = connection.request("GET", resource_path("v1", namespace, "serviceaccounts", account))
    except NotFoundError:
        fix = f"kubectl create serviceaccount {account} -n {namespace}"
        return Check("identity", CheckOutcome.FAILED, f"{namespace} has no service account {account}", fix)
    annotations = as_mapping(as_mapping(found.get("metadata")).get("annotations"))
    roles = [says.format(annotations[key]) for key, says in _IDENTITIES.items() if as_text(annotations.get(key))]
    if roles:
        return Check("identity", CheckOutcome.OK, f"workers run as {account}: {' and '.join(roles)}")
    says = (
        f"workers run as {account}, without an annotation; what EKS Pod Identity or GKE grants it is not visible here"
    )
    return Check("identity", CheckOutcome.OK, says)


def _traits(node: Manifest) -> Iterator[str]:
    labels = labels_of(node)
    for trait in TRAITS:
        if trait.label in labels and trait.value in ("", labels[trait.label]):
            yield trait.says


def _unknown_taints(node: Manifest, provider: str) -> Iterator[str]:
    """The lasting taints that no job for a GPU of this provider tolerates, as kubectl writes them."""
    tolerated = _tolerated(provider)
    for item in map(as_mapping, as_list(as_mapping(node.get("spec")).get("taints"))):
        key, value, effect = (as_text(item.get(part)) for part in ("key", "value", "effect"))
        if effect != "PreferNoSchedule" and key not in tolerated and not key.startswith(_PASSING):
            yield f"{key}={value}:{effect}" if value else f"{key}:{effect}"


def _tolerated(provider: str) -> frozenset[str]:
    gpu = next((gpu for gpu in GPU_TYPES.values() if gpu.nodes(provider)), None)
    number = min(gpu.nodes(provider)) if gpu is not None else 1
    return frozenset(item["key"] for item in place(provider, gpu, number, spot=True).tolerations)


def labels_of(node: Manifest) -> Mapping[str, object]:
    """The labels of a node; never raises."""
    return as_mapping(as_mapping(node.get("metadata")).get("labels"))


def allocatable_gpus(node: Manifest) -> int:
    """The number of the node's GPUs that can be allocated to pods."""
    text = as_text(at(node, "status", "allocatable", GPU_RESOURCE))
    return int(text) if text.isascii() and text.isdigit() else 0


ENFORCING = (
    "anetd",  # GKE's Dataplane V2
    "antrea-agent",
    "azure-npm",
    "calico-node",
    "canal",
    "cilium",
    "kindnet",
    "kube-network-policies",
    "kube-router",
    "ovn-kubernetes",
    "ovnkube-node",
    "weave-net",
)
"""DaemonSets of plugins that enforce NetworkPolicies, by a part of their names."""
SILENT = ("flannel",)
"""Of plugins that do not."""
_AWS, _AWS_FLAG = "aws-node", "--enable-network-policy=true"
"""EKS's own, which does if that is configured."""
_BUILT_IN = ("+k3s",)
"""Distributions that enforce them without a DaemonSet, by a part of the kubelet's version."""
_OPEN = "a job's ports may be open to every pod of the cluster"
_FIX = "use a network plugin that enforces NetworkPolicies, such as Cilium or Calico (docs/security.md)"


def check_network(daemon_sets: list[Manifest], nodes: list[Manifest]) -> Check:
    """Report the plugin that enforces them, one that is known not to, or that it is unknown."""
    found = {str(at(item, "metadata", "name") or ""): item for item in daemon_sets}
    enforcing = next((name for name in sorted(found) if _enforces(name, found[name])), "")
    if enforcing:
        return Check("network", CheckOutcome.OK, f"{enforcing} enforces NetworkPolicies")
    versions = {str(at(node, "status", "nodeInfo", "kubeletVersion") or "") for node in nodes}
    if versions and all(any(part in version for part in _BUILT_IN) for version in versions):
        return Check("network", CheckOutcome.OK, "k3s enforces NetworkPolicies, unless its servers disable that")
    silent = next((name for name in sorted(found) if any(part in name for part in (*SILENT, _AWS))), "")
    if silent:
        return Check("network", CheckOutcome.WARNING, f"{silent} enforces no NetworkPolicies: {_OPEN}", _FIX)
    return Check("network", CheckOutcome.SKIPPED, f"NetworkPolicies may not be enforced: if not, {_OPEN}")


def _enforces(name: str, daemon_set: Manifest) -> bool:
    if name == _AWS:
        return any(_AWS_FLAG in as_list(container.get("args")) for container in _containers(daemon_set))
    return any(part in name for part in ENFORCING)


def _containers(daemon_set: Manifest) -> Iterator[Mapping[str, Any]]:
    yield from map(as_mapping, as_list(at(daemon_set, "spec", "template", "spec", "containers")))
