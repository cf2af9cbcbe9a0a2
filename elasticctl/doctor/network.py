"""Checks that a cluster's network enforces NetworkPolicies, which is known only from the name of its network plugin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.objects import as_list, as_mapping, at
from elasticctl.doctor import Check, CheckOutcome

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
"""Of those that do not."""
_AWS, _AWS_FLAG = "aws-node", "--enable-network-policy=true"
"""EKS's own, which does if that is configured."""
_BUILT_IN = ("+k3s",)
"""Distributions that enforce them without a DaemonSet, by a part of the kubelet's version."""
_OPEN = "a job's ports may be open to every pod of the cluster"
_MEND = "use a network plugin that enforces NetworkPolicies, such as Cilium or Calico (docs/security.md)"


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
        return Check("network", CheckOutcome.WARNING, f"{silent} enforces no NetworkPolicies: {_OPEN}", _MEND)
    return Check("network", CheckOutcome.SKIPPED, f"NetworkPolicies may not be enforced: if not, {_OPEN}")


def _enforces(name: str, daemon_set: Manifest) -> bool:
    if name == _AWS:
        return any(_AWS_FLAG in as_list(container.get("args")) for container in _containers(daemon_set))
    return any(part in name for part in ENFORCING)


def _containers(daemon_set: Manifest) -> Iterator[Mapping[str, Any]]:
    yield from map(as_mapping, as_list(at(daemon_set, "spec", "template", "spec", "containers")))
