"""The whole of what a researcher types, once through, on the cluster that $KUBECONFIG points at.

The same walk as tests/cli/test_walk.py takes on the local cluster.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection
from elasticctl.settings.contexts import user_config
from tests.on_cluster.conftest import Replicas
from tests.on_cluster.trainer import HOST_FOLDER
from tests.on_cluster.trainer import IMAGE as TRAINER_IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import shell_job
from tests.support.walk import Place, Walk, training


@pytest.fixture
def folder(api: Connection, replicas: Replicas) -> Iterator[Path]:
    """A folder that this machine and all nodes have at the same path, and a namespace without jobs."""
    cluster, made = KubeCluster(api), HOST_FOLDER / "walk-state"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    made.chmod(0o777)  # workers run as any user
    _clear(cluster)
    yield made
    _clear(cluster)


def _clear(cluster: KubeCluster) -> None:
    for job in cluster.list_jobs("default"):
        cluster.delete_job("default", job["metadata"]["name"])
    wait_until(lambda: not cluster.list_jobs("default"))


def mounted(manifest: Manifest, folder: Path) -> Manifest:
    """The manifest with the folder in its workers."""
    pod: dict[str, Any] = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    pod["volumes"] = [{"name": "state", "hostPath": {"path": str(folder), "type": "Directory"}}]
    pod["containers"][0]["volumeMounts"] = [{"name": "state", "mountPath": str(folder)}]
    pod["containers"][0]["image"] = TRAINER_IMAGE
    return manifest


def test_everything_once_through(
    folder: Path, private_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = Walk(_place(folder), tmp_path)
    assert walk.run("config", "import").code == 0
    (name,) = (context.name for context in user_config().contexts if context.name != "local")
    walk = Walk(_place(folder, name), tmp_path, walk.typed)
    walk.run("config", "use-context", name)
    found = walk.everything()
    assert found["cluster"] in ("ok", "warning")
    assert found["storage"] == "ok"
    assert "not running" in walk.run("local", "status").out
    walk.run("local", "down")
    assert walk.left_out() == []


def _place(folder: Path, context: str = "") -> Place:
    return Place(
        context=context,
        folder=folder,
        train=lambda name: mounted(training(name, folder), folder),
        shell=lambda name, script: mounted(shell_job(name, script, backoffLimit=1), folder),
        kube_context=context,
        patience_s=480,
    )
