"""GPU types and what a pod asks for."""

from __future__ import annotations

import pytest

from elasticctl.api.errors import UsageError
from elasticctl.api.gpu_types import GPU_TYPES, gpu_type, place


def test_names_are_found_in_any_case_and_near_misses_are_named() -> None:
    assert gpu_type("T4") is GPU_TYPES["t4"]
    with pytest.raises(
        UsageError, match=r'unknown GPU type "a10" \(did you mean "a10g"\?\). FIX: use one of t4, v100, '
    ):
        gpu_type("a10")
    with pytest.raises(UsageError, match=r'^unknown GPU type "tpu-v5e". FIX: use one of t4, '):
        gpu_type("tpu-v5e")


def test_every_type_can_be_placed_wherever_it_is_offered() -> None:
    for gpu in GPU_TYPES.values():
        assert gpu.aws or gpu.gcp
        assert bool(gpu.gcp) == bool(gpu.gke_accelerator)
        for provider in ("aws", "gcp"):
            for gpus, instances in gpu.nodes(provider).items():
                placement = place(provider, gpu, gpus, spot=True)
                assert placement.instances == instances
                assert placement.terms
                assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in placement.tolerations


def test_aws_takes_managed_and_karpenter_nodes() -> None:
    assert place("aws", gpu_type("t4"), 4, spot=True).terms == (
        {"node.kubernetes.io/instance-type": ("g4dn.12xlarge",), "eks.amazonaws.com/capacityType": ("SPOT",)},
        {"node.kubernetes.io/instance-type": ("g4dn.12xlarge",), "karpenter.sh/capacity-type": ("spot",)},
    )
    assert place("aws", None, 0, spot=False).terms == (
        {"eks.amazonaws.com/capacityType": ("ON_DEMAND", "CAPACITY_BLOCK")},
        {"karpenter.sh/capacity-type": ("on-demand", "reserved")},
    )


def test_gke_spot_has_its_label_and_toleration() -> None:
    placement = place("gcp", gpu_type("t4"), 1, spot=True)
    assert placement.terms == (
        {"cloud.google.com/gke-accelerator": ("nvidia-tesla-t4",), "cloud.google.com/gke-spot": ("true",)},
    )
    assert placement.tolerations[-1]["key"] == "cloud.google.com/gke-spot"
    assert place("gcp", None, 0, spot=False).tolerations == ()


def test_an_error_names_what_a_provider_has() -> None:
    with pytest.raises(UsageError, match=r"gcp has no a10g GPUs\. FIX: use one of t4, v100, l4, a100, h100"):
        place("gcp", gpu_type("a10g"), 1, spot=True)
    with pytest.raises(UsageError, match=r"aws has no node with 3 t4 GPUs\. FIX: --gpus-per-node 1, 4 or 8"):
        place("aws", gpu_type("t4"), 3, spot=True)


def test_this_machine_has_no_nodes_to_choose_from() -> None:
    assert place("local", None, 1, spot=True).terms == ()
