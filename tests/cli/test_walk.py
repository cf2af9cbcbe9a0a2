"""The whole of what a researcher types, once through, on the local cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.cluster.local.client import LocalCluster
from tests.support.fakeapi import FakeApi
from tests.support.jobs import shell_job
from tests.support.walk import Place, Walk

ROOT = Path(__file__).parents[2]


def training(name: str, folder: Path, **container: Any) -> Manifest:
    """Two workers, up to four, that train on the digits for longer than any test, and save every second."""
    script = [sys.executable, str(ROOT / "examples/digits/train.py"), "--epochs", "100000", "--step-delay-s", "0.05"]
    worker = {
        "command": [str(Path(sys.executable).parent / "elasticctl-launch"), "--nproc-per-node", "1", "--"],
        "args": script,
        "env": [
            {"name": "ELASTICCTL_STORAGE", "value": (folder / name).as_uri()},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
        **container,
    }
    return shell_job(name, "", 2, container=worker, grace_s=10, minReplicas=1, maxReplicas=4)


@pytest.mark.timeout(400)
def test_everything_once_through(
    home: Path, local_cluster: LocalCluster, api: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    kubeconfig = {
        "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
        "clusters": [{"name": "lab", "cluster": {"server": api.url}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "kubeconfig").write_text(json.dumps({"apiVersion": "v1", "kind": "Config", **kubeconfig}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
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
