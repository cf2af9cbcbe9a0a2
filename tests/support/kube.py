"""A fake API server, a kubeconfig that leads to it, and clients on both."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection, connect
from tests.support.fakeapi import FakeApi

WriteKubeconfig = Callable[..., Path]


@pytest.fixture
def api() -> Iterator[FakeApi]:
    server = FakeApi()
    yield server
    server.close()


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteKubeconfig:
    """`kubeconfig(server, user={...}, cluster={...})` writes one whose context is `lab`, for $KUBECONFIG."""

    def write(server: str, user: dict[str, Any] | None = None, cluster: dict[str, Any] | None = None) -> Path:
        path = tmp_path / "kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": "me"}}],
            "clusters": [{"name": "lab", "cluster": {"server": server, **(cluster or {})}}],
            "users": [{"name": "me", "user": {"token": "t1"} if user is None else user}],
        }
        path.write_text(json.dumps(content))
        monkeypatch.setenv("KUBECONFIG", str(path))
        return path

    return write


@pytest.fixture
def connection(api: FakeApi, kubeconfig: WriteKubeconfig) -> Iterator[Connection]:
    kubeconfig(api.url)
    made = connect(connections=8)
    yield made
    made.close()


@pytest.fixture
def cluster(connection: Connection) -> KubeCluster:
    return KubeCluster(connection)
