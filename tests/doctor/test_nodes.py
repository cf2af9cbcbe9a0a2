"""What nodes' labels and offers are taken for."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.doctor import Check, CheckOutcome
from elasticctl.doctor.cluster import check_nodes, gpu_name

T4_SPOT = {"node.kubernetes.io/instance-type": "g4dn.12xlarge", "karpenter.sh/capacity-type": "spot"}
GKE_L4 = {"cloud.google.com/gke-accelerator": "nvidia-l4", "cloud.google.com/gke-spot": "true"}


def node(name: str, labels: dict[str, str] | None = None, gpus: int = 0, ready: str = "True") -> dict[str, Any]:
    offers = {"cpu": "8", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
    conditions = [{"type": "Ready", "status": ready}]
    return {
        "metadata": {"name": name, "labels": labels or {}},
        "status": {"allocatable": offers, "conditions": conditions},
    }


def checks(nodes: list[dict[str, Any]], provider: str) -> dict[str, Check]:
    return {check.name: check for check in check_nodes(nodes, provider)}


@pytest.mark.parametrize(
    ("labels", "name"),
    [(T4_SPOT, "t4"), (GKE_L4, "l4"), ({"node.kubernetes.io/instance-type": "m5.large"}, ""), ({}, "")],
)
def test_labels_name_the_gpu_type(labels: dict[str, str], name: str) -> None:
    assert gpu_name(node("a", labels)) == name


def test_an_accelerator_that_the_catalog_does_not_know_keeps_its_name() -> None:
    assert gpu_name(node("a", {"cloud.google.com/gke-accelerator": "nvidia-tomorrow"})) == "nvidia-tomorrow"


def test_gpus_are_counted_by_type() -> None:
    found = checks([node("a", T4_SPOT, 4), node("b", T4_SPOT, 4), node("c", {}, 2), node("d")], "aws")
    assert found["nodes"] == Check("nodes", CheckOutcome.OK, "4 nodes, all ready")
    assert (found["GPUs"].outcome, found["GPUs"].says) == (CheckOutcome.OK, "2 of an unknown type, 8 t4")
    assert (found["spot"].outcome, found["spot"].says) == (CheckOutcome.OK, "2 spot nodes")


def test_a_gpu_node_that_offers_none_lacks_the_device_plugin() -> None:
    found = checks([node("a", GKE_L4), node("b", GKE_L4, 1)], "gcp")["GPUs"]
    assert found.outcome is CheckOutcome.FAILED
    assert found.says == "1 node with GPUs offers none: a (no nvidia.com/gpu is allocatable)"
    assert "device plugin" in found.mend


def test_what_an_autoscaler_would_add_is_no_failure() -> None:
    found = checks([], "aws")
    assert [check.outcome for check in found.values()] == [CheckOutcome.WARNING] * 3
    assert "--on-demand" in found["spot"].mend


def test_nodes_that_are_not_ready_are_told_of_and_count_for_nothing() -> None:
    found = checks([node("a", T4_SPOT, 4, ready="Unknown"), node("b")], "aws")
    assert (found["nodes"].outcome, found["nodes"].says) == (CheckOutcome.WARNING, "1 of 2 nodes ready")
    assert found["GPUs"].outcome is found["spot"].outcome is CheckOutcome.WARNING
    assert checks([node("a", ready="False")], "aws")["nodes"].outcome is CheckOutcome.FAILED


def test_of_any_other_cluster_nothing_is_known_of_spot_nodes() -> None:
    assert checks([node("a", T4_SPOT, 4)], "kubernetes")["spot"].outcome is CheckOutcome.SKIPPED
