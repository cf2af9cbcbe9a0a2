"""Whose clusters kubeconfig's contexts are, and what they are called here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import ConfigError
from elasticctl.settings.kubeconfig import KubeContext, kubeconfig_paths, read_contexts

EKS = "arn:aws:eks:eu-west-1:123456789012:cluster/train"
GKE = "gke_my-project_europe-west4-a_train_1"


def write(path: Path, *entries: tuple[str, dict[str, Any], dict[str, Any]]) -> Path:
    """A kubeconfig of (context, cluster, user); a context USER@CLUSTER is named as eksctl does it."""
    content: dict[str, Any] = {"contexts": [], "clusters": [], "users": []}
    for name, cluster, user in entries:
        called = name.rpartition("@")[2]
        content["contexts"].append({"name": name, "context": {"cluster": called, "user": name, "namespace": "ml"}})
        content["clusters"].append({"name": called, "cluster": cluster})
        content["users"].append({"name": name, "user": user})
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("name", "cluster", "user", "provider", "short"),
    [
        (EKS, {}, {}, "aws", "train"),
        ("me@train.eu-west-1.eksctl.io", {}, {"exec": {"command": "aws"}}, "aws", "train"),
        ("a", {"server": "https://ABC.gr7.eu-west-1.eks.amazonaws.com"}, {}, "aws", "a"),
        ("a", {}, {"exec": {"command": "/usr/local/bin/aws-iam-authenticator"}}, "aws", "a"),
        (GKE, {}, {}, "gcp", "train_1"),
        ("a", {}, {"exec": {"command": "gke-gcloud-auth-plugin.exe"}}, "gcp", "a"),
        ("kind-a", {"server": "https://127.0.0.1:6443"}, {"token": "t"}, "kubernetes", "kind-a"),
        ("a", {"server": "::nonsense"}, {"exec": {"command": ["x"]}}, "kubernetes", "a"),
        ("a", {"server": "https://[half-an-address"}, {}, "kubernetes", "a"),
    ],
)
def test_a_context_reveals_its_provider(
    tmp_path: Path, name: str, cluster: dict[str, Any], user: dict[str, Any], provider: str, short: str
) -> None:
    found = read_contexts([write(tmp_path / "config", (name, cluster, user))])[name]
    context = found.as_context(())
    assert (context.provider, context.name, context.kube_context, context.namespace) == (provider, short, name, "ml")


def test_a_name_that_is_taken_is_made_longer() -> None:
    assert KubeContext(EKS).as_context({"train"}).name == EKS
    assert KubeContext(EKS).as_context({"train", EKS}).name == "train-aws"
    assert KubeContext("local").as_context(()).name == "local-kubernetes"


def test_the_first_of_several_files_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(tmp_path / "1", ("a", {}, {"exec": {"command": "aws"}}))
    second = write(tmp_path / "2", ("a", {}, {}), ("b", {}, {}))
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(map(str, (first, tmp_path / "absent", second))))
    found = read_contexts(kubeconfig_paths())
    assert {name: context.provider for name, context in found.items()} == {"a": "aws", "b": "kubernetes"}


def test_a_home_of_an_unknown_user_is_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "~nobody-of-that-name/config")
    assert read_contexts(kubeconfig_paths()) == {}


def test_files_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "config"
    for text in ("", "[]", "contexts: 3", "contexts: [3, {name: 4}, {name: a, context: 5}]", "a: b"):
        path.write_text(text)
        assert read_contexts([path]) == {}
    path.write_text("contexts: [")
    with pytest.raises(ConfigError, match=r"config:1: .*. FIX: "):
        read_contexts([path])
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_contexts([tmp_path])
