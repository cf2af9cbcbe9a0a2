"""The whole of what a researcher types, once through, on the local cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elasticctl.cluster.local.client import LocalCluster
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job
from tests.support.walk import Place, Walk, training


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_workers")
def test_everything_once_through(
    home: Path, local_cluster: LocalCluster, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kubeconfig = {
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
        "clusters": [{"name": "lab", "cluster": {"server": api.url}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    config = home / "kubeconfig"  # not in the folder that goes along with jobs: credentials are refused there
    config.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **kubeconfig}))
    monkeypatch.setenv("KUBECONFIG", str(config))
    state = home / "state-of-jobs"
    walk = Walk(
        Place(
            context="local",
            folder=state,
            train=lambda name: training(name, state),
            shell=lambda name, script: shell_job(name, script, backoffLimit=1),
            kube_context="lab",
        ),
        tmp_path,
    )
    assert walk.everything()["storage"] == "ok"
    assert json.loads(walk.run("local", "status", "-o", "json").out)["running"] is True
    assert walk.run("local", "down").err.endswith("the local cluster is down\n")
    assert walk.left_out() == []
