"""Recorded shapes of the nodes of EKS and GKE, of their service accounts and network plugins: what doctor reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.gpu_types import gpu_type, place
from elasticctl.doctor import CheckOutcome
from elasticctl.doctor.platform import TRAITS, check_cloud, check_identity, check_network
from tests.support.control import ControlApi

DOCS = (Path(__file__).parents[2] / "docs" / "clouds.md").read_text("utf-8")
GPU_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
QUEUED = {"key": "cloud.google.com/gke-queued", "value": "true", "effect": "NoSchedule"}


EKS_SPOT = {
    "metadata": {
        "name": "ip-10-0-1-17.ec2.internal",
        "labels": {
            "eks.amazonaws.com/capacityType": "SPOT",
            "eks.amazonaws.com/nodegroup": "t4-spot",
            "node.kubernetes.io/instance-type": "g4dn.xlarge",
            "topology.kubernetes.io/zone": "us-east-1a",
        },
    },
    "spec": {"taints": [GPU_TAINT], "providerID": "aws:///us-east-1a/i-0123456789abcdef0"},
    "status": {"allocatable": {"nvidia.com/gpu": "1"}},
}
EKS_BLOCK = {
    "metadata": {
        "name": "ip-10-0-2-4.ec2.internal",
        "labels": {
            "karpenter.sh/nodepool": "p5",
            "karpenter.sh/capacity-type": "reserved",
            "karpenter.k8s.aws/capacity-reservation-type": "capacity-block",
            "node.kubernetes.io/instance-type": "p5.48xlarge",
            "topology.k8s.aws/network-node-layer-1": "nn-1",
        },
    },
    "spec": {"taints": [GPU_TAINT, {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]},
    "status": {"allocatable": {"nvidia.com/gpu": "8"}},
}
GKE_SPOT = {
    "metadata": {
        "name": "gke-training-t4-spot-3f1c-x2vb",
        "labels": {
            "cloud.google.com/gke-accelerator": "nvidia-tesla-t4",
            "cloud.google.com/gke-nodepool": "t4-spot",
            "cloud.google.com/gke-spot": "true",
            "node.kubernetes.io/instance-type": "n1-standard-4",
        },
    },
    "spec": {
        "taints": [GPU_TAINT, {"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}],
    },
    "status": {"allocatable": {"nvidia.com/gpu": "1"}},
}
GKE_FLEX = {
    "metadata": {
        "name": "gke-training-h100-flex-9a-1",
        "labels": {
            "cloud.google.com/gke-accelerator": "nvidia-h100-80gb",
            "cloud.google.com/gke-nodepool": "h100-flex",
            "cloud.google.com/gke-flex-start": "true",
            "cloud.google.com/gce-topology-block": "b1",
        },
    },
    "spec": {"taints": [GPU_TAINT, QUEUED]},
    "status": {"allocatable": {"nvidia.com/gpu": "8"}},
}


@pytest.mark.parametrize(
    ("provider", "nodes", "outcome", "says"),
    [
        ("aws", [EKS_SPOT, EKS_SPOT], CheckOutcome.OK, "of 2 nodes 2 of managed node groups, 2 spot"),
        (
            "aws",
            [EKS_SPOT, EKS_BLOCK],
            CheckOutcome.OK,
            "of 2 nodes 1 of managed node groups, 1 spot, 1 of Karpenter, 1 of a capacity block, 1 reserved,"
            " 1 with a known place in the network",
        ),
        ("gcp", [GKE_SPOT], CheckOutcome.OK, "of 1 node 1 of GKE node pools, 1 spot"),
        (
            "gcp",
            [GKE_FLEX],
            CheckOutcome.WARNING,
            "of 1 node 1 of GKE node pools, 1 flex-start, 1 with a known place in the network; jobs do not tolerate"
            " cloud.google.com/gke-queued=true:NoSchedule",
        ),
    ],
)
def test_facts_about_nodes_are_reported(
    provider: str, nodes: list[dict[str, Any]], outcome: CheckOutcome, says: str
) -> None:
    found = check_cloud(nodes, provider)
    assert (found.outcome, found.says) == (outcome, says)
    assert ("ProvisioningRequest" in found.mend) is (outcome is CheckOutcome.WARNING)


def test_taints_of_a_teams_own_are_named() -> None:
    team = {"key": "dedicated", "value": "ml", "effect": "NoSchedule"}
    found = check_cloud([{**EKS_SPOT, "spec": {"taints": [GPU_TAINT, team]}}], "aws")
    assert found.says.endswith("; jobs do not tolerate dedicated=ml:NoSchedule")
    assert "--toleration" in found.mend
    without_gpus = {**EKS_SPOT, "spec": {"taints": [team]}, "status": {}}
    assert check_cloud([without_gpus], "aws").outcome is CheckOutcome.OK


def test_nothing_is_reported_of_other_clusters_and_nothing_breaks() -> None:
    for nodes in ([], [{}], [{"metadata": None, "spec": {"taints": "x"}, "status": 3}]):
        assert check_cloud(nodes, "kubernetes").outcome is CheckOutcome.SKIPPED


def test_a_job_on_demand_takes_what_is_reserved() -> None:
    terms = place("aws", gpu_type("h100"), 8, spot=False).terms
    labels = EKS_BLOCK["metadata"]["labels"]  # type: ignore[index]
    assert any(all(labels.get(key) in values for key, values in term.items()) for term in terms)


@pytest.mark.parametrize(
    ("annotations", "says"),
    [
        ({"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/t"}, "the IAM role arn:aws:iam::1:role/t (IRSA)"),
        ({"iam.gke.io/gcp-service-account": "t@p.iam"}, "the Google service account t@p.iam (workload identity)"),
        ({}, "without an annotation"),
    ],
)
def test_the_identity_of_workers_is_reported(annotations: dict[str, str], says: str) -> None:
    api = ControlApi()
    try:
        account = {"metadata": {"name": "trainer", "annotations": annotations}}
        api.put("/api/v1/namespaces/ml/serviceaccounts/trainer", account)
        found = check_identity(api.connection(), "ml", "trainer")
        assert (found.outcome, says in found.says) == (CheckOutcome.OK, True)
        missing = check_identity(api.connection(), "ml", "other")
        assert (missing.outcome, missing.mend) == (
            CheckOutcome.FAILED,
            "kubectl create serviceaccount other -n ml",
        )
    finally:
        api.close()


def test_every_label_is_documented_with_its_source() -> None:
    for trait in TRAITS:
        assert f"`{trait.label}" in DOCS


AWS_AGENT = {"name": "aws-eks-nodeagent", "args": ["--enable-ipv6=false", "--enable-network-policy=true"]}


def daemon_set(name: str, *containers: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"template": {"spec": {"containers": [*containers]}}}}


def node(version: str) -> dict[str, Any]:
    return {"metadata": {"name": "n"}, "status": {"nodeInfo": {"kubeletVersion": version}}}


@pytest.mark.parametrize("name", ["cilium", "calico-node", "rke2-canal", "anetd", "kube-router", "kindnet"])
def test_a_plugin_that_enforces_them_is_named(name: str) -> None:
    found = check_network([daemon_set("nvidia-device-plugin"), daemon_set(name)], [])
    assert (found.outcome, found.says) == (CheckOutcome.OK, f"{name} enforces NetworkPolicies")


@pytest.mark.parametrize("plugin", [daemon_set("kube-flannel-ds"), daemon_set("aws-node", {"name": "aws-node"})])
def test_one_that_does_not_is_a_warning(plugin: dict[str, Any]) -> None:
    found = check_network([plugin], [node("v1.31.0-eks-1")])
    assert found.outcome is CheckOutcome.WARNING
    assert "open to every pod" in found.says
    assert found.mend


def test_that_of_aws_does_if_it_is_configured() -> None:
    assert check_network([daemon_set("aws-node", AWS_AGENT)], []).outcome is CheckOutcome.OK


def test_k3s_does_by_itself() -> None:
    assert check_network([], [node("v1.30.1+k3s1")]).outcome is CheckOutcome.OK
    assert check_network([], [node("v1.30.1+k3s1"), node("v1.30.1")]).outcome is CheckOutcome.SKIPPED


@pytest.mark.parametrize("odd", [{}, {"metadata": None}, {"metadata": {"name": "aws-node"}, "spec": []}])
def test_unknown_facts_are_not_claimed(odd: dict[str, Any]) -> None:
    assert check_network([odd], [{}]).outcome in (CheckOutcome.SKIPPED, CheckOutcome.WARNING)
    assert check_network([], []).outcome is CheckOutcome.SKIPPED
