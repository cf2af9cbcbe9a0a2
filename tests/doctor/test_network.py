"""Whether a network enforces policies: what is known of plugins, by the names of their DaemonSets."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.doctor import CheckOutcome
from elasticctl.doctor.network import check_network

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


def test_that_of_aws_does_if_it_is_told_to() -> None:
    assert check_network([daemon_set("aws-node", AWS_AGENT)], []).outcome is CheckOutcome.OK


def test_k3s_does_by_itself() -> None:
    assert check_network([], [node("v1.30.1+k3s1")]).outcome is CheckOutcome.OK
    assert check_network([], [node("v1.30.1+k3s1"), node("v1.30.1")]).outcome is CheckOutcome.SKIPPED


@pytest.mark.parametrize("odd", [{}, {"metadata": None}, {"metadata": {"name": "aws-node"}, "spec": []}])
def test_what_is_not_known_is_not_claimed(odd: dict[str, Any]) -> None:
    assert check_network([odd], [{}]).outcome in (CheckOutcome.SKIPPED, CheckOutcome.WARNING)
    assert check_network([], []).outcome is CheckOutcome.SKIPPED
