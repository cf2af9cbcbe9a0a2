"""What a cluster's nodes say about GPUs and spot capacity; pure.

The labels are those that EKS managed node groups, Karpenter and GKE put on nodes (`elasticctl.api.gpu_types`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elasticctl.api.codec import Manifest
from elasticctl.api.gpu_types import AWS_CAPACITY_LABELS, GKE_GPU_LABEL, GKE_SPOT_LABEL, GPU_TYPES, INSTANCE_LABEL
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.text import counted
from elasticctl.doctor.check import Check, Outcome

_SCALES = "fine where an autoscaler adds them on demand"
_PLUGIN = "install NVIDIA's device plugin, or the provider's GPU image: docs/clouds.md"


def node_checks(nodes: Sequence[Manifest], provider: str) -> Iterator[Check]:
    """Judge all nodes of a cluster of `provider`: is there any that works, which GPUs, which spot capacity."""
    ready = [node for node in nodes if _is_ready(node)]
    yield _readiness(len(ready), len(nodes))
    yield _gpus(ready, provider)
    spot = _spot_nodes(ready, provider)
    if spot is None:
        yield Check("spot", Outcome.SKIPPED, f"nothing says how a cluster of provider {provider} labels spot nodes")
    elif spot:
        yield Check("spot", Outcome.OK, f"{counted(spot, 'node')} of spot capacity")
    else:
        yield Check(
            "spot",
            Outcome.WARNING,
            f"no node of spot capacity now; {_SCALES}",
            "add a spot node group (docs/clouds.md), or submit with --on-demand",
        )


def gpu_name(node: Manifest) -> str:
    """The GPU type that a node's labels promise, as the catalog calls it or as they do; empty for none."""
    labels = _labels(node)
    accelerator, instance = str(labels.get(GKE_GPU_LABEL, "")), labels.get(INSTANCE_LABEL, "")
    for gpu in GPU_TYPES.values():
        if accelerator and gpu.gke_accelerator == accelerator:
            return gpu.name
        if any(instance in names for names in gpu.aws.values()):
            return gpu.name
    return accelerator


def offered(node: Manifest) -> int:
    """How many GPUs the node's kubelet offers to pods."""
    text = str((node.get("status") or {}).get("allocatable", {}).get(GPU_RESOURCE, "0"))
    return int(text) if text.isascii() and text.isdigit() else 0


def _readiness(ready: int, of: int) -> Check:
    if ready and ready == of:
        return Check("nodes", Outcome.OK, f"{counted(ready, 'node')}, all ready")
    if ready:
        return Check("nodes", Outcome.WARNING, f"{ready} of {counted(of, 'node')} ready", "kubectl get nodes")
    if of:
        return Check("nodes", Outcome.FAILED, f"none of {counted(of, 'node')} is ready", "kubectl describe nodes")
    return Check("nodes", Outcome.WARNING, f"no node now; {_SCALES}", "kubectl get nodes")


def _gpus(nodes: Sequence[Manifest], provider: str) -> Check:
    found: Counter[str] = Counter()
    for node in nodes:
        if offered(node):
            found[gpu_name(node) or "of a type that no label names"] += offered(node)
    silent = [node for node in nodes if gpu_name(node) and not offered(node)]
    if silent:
        names = ", ".join(node["metadata"]["name"] for node in silent[:3]) + (", …" if len(silent) > 3 else "")
        says = f"{counted(len(silent), 'node')} with GPUs {'offers' if len(silent) == 1 else 'offer'} none: {names}"
        return Check("GPUs", Outcome.FAILED, f"{says} (no {GPU_RESOURCE} is allocatable)", _PLUGIN)
    if not found:
        mend = "add a GPU node group: docs/clouds.md" if provider in ("aws", "gcp") else _PLUGIN
        return Check("GPUs", Outcome.WARNING, f"no node offers {GPU_RESOURCE} now; {_SCALES}", mend)
    return Check("GPUs", Outcome.OK, ", ".join(f"{count} {name}" for name, count in sorted(found.items())))


def _spot_nodes(nodes: Sequence[Manifest], provider: str) -> int | None:
    """How many nodes carry the provider's spot label; None where nothing is known of it."""
    if provider == "aws":
        wanted = {(label, spot) for label, spot, _ in AWS_CAPACITY_LABELS}
    elif provider == "gcp":
        wanted = {(GKE_SPOT_LABEL, "true")}
    else:
        return None
    return sum(any(_labels(node).get(label) == value for label, value in wanted) for node in nodes)


def _is_ready(node: Manifest) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    return any(item.get("type") == "Ready" and item.get("status") == "True" for item in conditions)


def _labels(node: Manifest) -> Mapping[str, Any]:
    labels: Mapping[str, Any] = node["metadata"].get("labels") or {}
    return labels
