"""A fake API server, a kubeconfig that leads to it, and clients on both."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_INDEX, LABEL_JOB
from elasticctl.cluster.base import LogLine
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


NAMESPACE = "/api/v1/namespaces/default"


def add_pod(api: FakeApi, job: dict[str, Any], index: int, phase: str = "Running", owner: str = "") -> dict[str, Any]:
    name = f"{job['metadata']['name']}-worker-{index}"
    labels = {LABEL_GROUP: GROUP, LABEL_JOB: job["metadata"]["name"], LABEL_INDEX: str(index)}
    owners = [{"uid": owner or job["metadata"]["uid"]}]
    metadata = {"name": name, "namespace": "default", "labels": labels, "ownerReferences": owners}
    spec = {"containers": [{"name": "elasticjob-worker"}]}
    return api.put(f"{NAMESPACE}/pods/{name}", {"metadata": metadata, "spec": spec, "status": {"phase": phase}})


JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs"


class Follower:
    """Reads a follow in a thread; `texts()` are the lines so far, by worker."""

    def __init__(self, lines: Iterator[LogLine]) -> None:
        self.got: list[LogLine] = []
        self.error: ElasticctlError | None = None
        self._lines = lines
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        try:
            for line in self._lines:
                self.got.append(line)
        except ElasticctlError as e:
            self.error = e

    def texts(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in list(self.got):
            found.setdefault(line.worker, []).append(line.text)
        return found

    def ended(self) -> bool:
        return not self.thread.is_alive()


def end(api: FakeApi, cluster: KubeCluster, name: str) -> None:
    """The job is over, as the controller would say."""
    api.put(f"{JOBS}/{name}", {**cluster.get_job("default", name), "status": {"phase": "Succeeded"}})
