"""GPU types: which instances carry them, and how a pod asks for one of those and for spot capacity.

Pure data and lookup. Sources: the instance tables of aws.amazon.com/ec2/instance-types and
cloud.google.com/compute/docs/gpus; the labels are those that EKS managed node groups, Karpenter and GKE put on nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elasticctl.api.errors import UsageError
from elasticctl.api.text import did_you_mean, listed, shown

INSTANCE_LABEL = "node.kubernetes.io/instance-type"
GKE_GPU_LABEL = "cloud.google.com/gke-accelerator"
GKE_SPOT_LABEL = "cloud.google.com/gke-spot"
# One of the two is on every AWS node, depending on who made it; a pod takes either.
AWS_CAPACITY_LABELS = (
    ("eks.amazonaws.com/capacityType", "SPOT", "ON_DEMAND"),
    ("karpenter.sh/capacity-type", "spot", "on-demand"),
)

NodeTerm = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class GpuType:
    """One GPU type; `aws` and `gcp` map the GPUs of a node to the instance types that have as many."""

    name: str
    aws: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    gcp: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    gke_accelerator: str = ""

    def nodes(self, provider: str) -> Mapping[int, tuple[str, ...]]:
        """GPUs per node -> instance types at `provider`."""
        return {"aws": self.aws, "gcp": self.gcp}.get(provider, {})


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a worker may run: any node that fits one of `terms` (label -> values; none: label absent)."""

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
    """Look a GPU type up; UsageError with the nearest name when there is none."""
    found = GPU_TYPES.get(name.lower())
    if found is None:
        near = did_you_mean(name, GPU_TYPES)
        raise UsageError(f"unknown GPU type {shown(name)}{near}; known are {', '.join(GPU_TYPES)}")
    return found


def place(provider: str, gpu: GpuType | None, gpus_per_node: int, *, spot: bool) -> Placement:
    """How a worker asks `provider` for a node with `gpus_per_node` GPUs of type `gpu` (None: any node).

    Raises UsageError when the provider has no such node. `local` and `kubernetes` have none to choose from.
    """
    if provider in ("local", "kubernetes"):
        return _unlabelled(provider, gpu, gpus_per_node)
    instances: tuple[str, ...] = ()
    if gpu is not None:
        shapes = gpu.nodes(provider)
        if not shapes:
            raise UsageError(f"{provider} has no {gpu.name} GPUs; there are {', '.join(_at(provider))}")
        if gpus_per_node not in shapes:
            sizes = listed(map(str, shapes))
            raise UsageError(
                f"{provider} has no node with {gpus_per_node} {gpu.name} GPUs; --gpus-per-node can be {sizes}"
            )
        instances = shapes[gpus_per_node]
    return _aws(instances, spot) if provider == "aws" else _gcp(gpu, instances, spot)


def _unlabelled(provider: str, gpu: GpuType | None, gpus_per_node: int) -> Placement:
    """This machine, and clusters whose nodes have no labels that all of them share."""
    if provider == "local":
        return Placement()
    if gpu is not None:
        raise UsageError(
            f"--gpu-type {gpu.name}: nothing says how a plain Kubernetes cluster labels its GPUs; leave it out, and"
            " choose nodes with --set spec.replicaSpecs.Worker.template.spec.nodeSelector={LABEL: VALUE}"
        )
    return Placement(tolerations=_gpu_tolerations(gpus_per_node > 0))


def _at(provider: str) -> list[str]:
    return [name for name, gpu in GPU_TYPES.items() if gpu.nodes(provider)]


def _aws(instances: tuple[str, ...], spot: bool) -> Placement:
    wanted = {INSTANCE_LABEL: instances} if instances else {}
    terms = tuple(
        {**wanted, label: (spot_value if spot else on_demand_value,)}
        for label, spot_value, on_demand_value in AWS_CAPACITY_LABELS
    )
    return Placement(terms, _gpu_tolerations(bool(instances)), instances)


def _gcp(gpu: GpuType | None, instances: tuple[str, ...], spot: bool) -> Placement:
    # An accelerator attached to an n1 says nothing about the machine's size, so the label of the GPU is what counts.
    wanted = {GKE_GPU_LABEL: (gpu.gke_accelerator,)} if gpu else {}
    tolerations = _gpu_tolerations(gpu is not None)
    if spot:
        tolerations += ({"key": GKE_SPOT_LABEL, "operator": "Equal", "value": "true", "effect": "NoSchedule"},)
    return Placement(({**wanted, GKE_SPOT_LABEL: ("true",) if spot else ()},), tolerations, instances)


def _gpu_tolerations(gpus: bool) -> tuple[Mapping[str, str], ...]:
    """GPU nodes are commonly tainted so that nothing else lands on them."""
    return ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},) if gpus else ()
