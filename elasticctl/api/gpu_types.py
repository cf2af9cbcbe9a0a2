"""GPU types: the instance types that have them, and how a pod requests one of those, or spot capacity.

Sources: the instance tables of aws.amazon.com/ec2/instance-types and
cloud.google.com/compute/docs/gpus; the labels are those that EKS managed node groups, Karpenter and GKE put on nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticctl.api.errors import UsageError
from elasticctl.api.text import did_you_mean, join_or, quote

INSTANCE_LABEL = "node.kubernetes.io/instance-type"
GKE_GPU_LABEL = "cloud.google.com/gke-accelerator"
GKE_SPOT_LABEL = "cloud.google.com/gke-spot"
# Every AWS node has one of the two, depending on what created it; a pod accepts either. Reserved capacity, such as a
# capacity block, counts as on demand. Sources: docs/clouds.md.
AWS_CAPACITY_LABELS = (
    ("eks.amazonaws.com/capacityType", "SPOT", ("ON_DEMAND", "CAPACITY_BLOCK")),
    ("karpenter.sh/capacity-type", "spot", ("on-demand", "reserved")),
)

NodeTerm = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class GpuType:
    """One GPU type; `aws` and `gcp` map GPUs per node to instance types."""

    name: str
    aws: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    gcp: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    gke_accelerator: str = ""

    def nodes(self, provider: str) -> Mapping[int, tuple[str, ...]]:
        """GPUs per node -> instance types at `provider`."""
        return {"aws": self.aws, "gcp": self.gcp}.get(provider, {})


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker may run: any node that matches one of `terms` (label -> values; no values: label absent)."""

    terms: tuple[NodeTerm, ...] = ()
    tolerations: tuple[Mapping[str, str], ...] = ()
    instances: tuple[str, ...] = ()


def _sizes(family: str, *sizes: str) -> tuple[str, ...]:
    return tuple(f"{family}.{size}" for size in sizes)


_SMALL = ("xlarge", "2xlarge", "4xlarge", "8xlarge", "16xlarge")
_N1 = ("n1-standard",)

GPU_TYPES: Mapping[str, GpuType] = {
    gpu.name: gpu
    for gpu in (
        GpuType(
            "t4",
            aws={1: _sizes("g4dn", *_SMALL), 4: ("g4dn.12xlarge",), 8: ("g4dn.metal",)},
            gcp={1: _N1, 2: _N1, 4: _N1},
            gke_accelerator="nvidia-tesla-t4",
        ),
        GpuType(
            "v100",
            aws={1: ("p3.2xlarge",), 4: ("p3.8xlarge",), 8: ("p3.16xlarge",)},
            gcp={1: _N1, 2: _N1, 4: _N1, 8: _N1},
            gke_accelerator="nvidia-tesla-v100",
        ),
        GpuType(
            "a10g",
            aws={1: _sizes("g5", *_SMALL), 4: _sizes("g5", "12xlarge", "24xlarge"), 8: ("g5.48xlarge",)},
        ),
        GpuType(
            "l4",
            aws={1: _sizes("g6", *_SMALL), 4: _sizes("g6", "12xlarge", "24xlarge"), 8: ("g6.48xlarge",)},
            gcp={
                1: tuple(f"g2-standard-{cpus}" for cpus in (4, 8, 12, 16, 32)),
                2: ("g2-standard-24",),
                4: ("g2-standard-48",),
                8: ("g2-standard-96",),
            },
            gke_accelerator="nvidia-l4",
        ),
        GpuType(
            "a100",
            aws={8: ("p4d.24xlarge",)},
            gcp={gpus: (f"a2-highgpu-{gpus}g",) for gpus in (1, 2, 4, 8)},
            gke_accelerator="nvidia-tesla-a100",
        ),
        GpuType(
            "h100",
            aws={8: ("p5.48xlarge",)},
            gcp={8: ("a3-highgpu-8g",)},
            gke_accelerator="nvidia-h100-80gb",
        ),
    )
}


def gpu_type(name: str) -> GpuType:
    """Look up a GPU type. Raises UsageError with the nearest name if it is unknown."""
    found = GPU_TYPES.get(name.lower())
    if found is None:
        near = did_you_mean(name, GPU_TYPES)
        raise UsageError(f"unknown GPU type {quote(name)}{near}. FIX: use one of {', '.join(GPU_TYPES)}")
    return found


def accelerator_of(instance: str) -> str:
    """GKE's name for the GPU of a machine type; "" if it has none, or if any can be attached."""
    found = {gpu.gke_accelerator for gpu in GPU_TYPES.values() for types in gpu.gcp.values() if instance in types}
    return found.pop() if len(found) == 1 else ""


def place(provider: str, gpu: GpuType | None, gpus_per_node: int, *, spot: bool) -> Placement:
    """How a worker requests from `provider` a node with `gpus_per_node` GPUs of type `gpu` (None: any node).

    Raises UsageError if the provider has no such node.
    """
    if provider in ("local", "kubernetes"):
        return _place_without_labels(provider, gpu, gpus_per_node)
    instances: tuple[str, ...] = ()
    if gpu is not None:
        shapes = gpu.nodes(provider)
        if not shapes:
            offered = ", ".join(name for name, other in GPU_TYPES.items() if other.nodes(provider))
            raise UsageError(f"{provider} has no {gpu.name} GPUs. FIX: use one of {offered}")
        if gpus_per_node not in shapes:
            sizes = join_or(map(str, shapes))
            raise UsageError(
                f"{provider} has no node with {gpus_per_node} {gpu.name} GPUs. FIX: --gpus-per-node {sizes}"
            )
        instances = shapes[gpus_per_node]
    return _aws(instances, spot) if provider == "aws" else _gcp(gpu, instances, spot)


def _place_without_labels(provider: str, gpu: GpuType | None, gpus_per_node: int) -> Placement:
    """On the local cluster, and on clusters whose nodes have no labels in common."""
    if provider == "local":
        return Placement()
    if gpu is not None:
        raise UsageError(
            f"--gpu-type {gpu.name}: the GPU labels of a plain Kubernetes cluster are not known. FIX: leave it out, and"
            " choose nodes with --set spec.replicaSpecs.Worker.template.spec.nodeSelector={LABEL: VALUE}"
        )
    return Placement(tolerations=_gpu_tolerations(gpus_per_node > 0))


def _aws(instances: tuple[str, ...], spot: bool) -> Placement:
    wanted = {INSTANCE_LABEL: instances} if instances else {}
    terms = tuple(
        {**wanted, label: (spot_value,) if spot else on_demand_values}
        for label, spot_value, on_demand_values in AWS_CAPACITY_LABELS
    )
    return Placement(terms, _gpu_tolerations(bool(instances)), instances)


def _gcp(gpu: GpuType | None, instances: tuple[str, ...], spot: bool) -> Placement:
    # The machine type says nothing about the GPUs attached to an n1, so select by the GPU's label.
    wanted = {GKE_GPU_LABEL: (gpu.gke_accelerator,)} if gpu else {}
    tolerations = _gpu_tolerations(gpu is not None)
    if spot:
        tolerations += ({"key": GKE_SPOT_LABEL, "operator": "Equal", "value": "true", "effect": "NoSchedule"},)
    return Placement(({**wanted, GKE_SPOT_LABEL: ("true",) if spot else ()},), tolerations, instances)


def _gpu_tolerations(gpus: bool) -> tuple[Mapping[str, str], ...]:
    """GPU nodes are usually tainted to keep other pods off them."""
    return ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},) if gpus else ()
