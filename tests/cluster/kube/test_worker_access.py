"""Access to workers on Kubernetes, through a fake API server whose containers are this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.api.errors import ClusterError, CredentialsError, ForbiddenError, NotFoundError, UnreachableError
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.cluster.kube.worker_access import KubeWorkerAccess
from elasticctl.cluster.worker_access import Streams
from elasticctl.kubeapi.connection import connect
from tests.support.fakeapi import FakeApi, Request
from tests.support.jobs import FOREVER, shell_job
from tests.support.kube import NAMESPACE, WriteKubeconfig, add_pod
from tests.support.kubelet import OLDER, Kubelet
from tests.support.worker_access_contract import RunningWorker, WorkerAccessContract


@pytest.fixture
def kubelet(api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path) -> Iterator[Kubelet]:
    found = Kubelet(api, tmp_path, {"PATH": os.environ["PATH"], "MARK": "here it is"})
    kubeconfig(found.url)
    yield found
    found.close()


@pytest.fixture
def running(kubelet: Kubelet, tmp_path: Path) -> Iterator[RunningWorker]:
    connection = connect()
    job = KubeCluster(connection).create_job(shell_job("shell", FOREVER))
    said: list[str] = []
    yield RunningWorker(KubeWorkerAccess(connection, said.append, linger_s=0.2), add_pod(kubelet.api, job, 0), tmp_path)
    connection.close()


class TestKubeWorkerAccess(WorkerAccessContract):
    pass


def test_the_container_that_trains_is_entered(running: RunningWorker, kubelet: Kubelet) -> None:
    assert running.run("true") == (0, b"", b"")
    (asked,) = kubelet.asked
    assert asked["container"] == ["elasticjob-worker"]
    assert asked["command"][:2] == ["sh", "-c"]
    assert asked["command"][3:] == ["sh", "true"]
    assert (asked["stdin"], asked["tty"]) == (["false"], ["false"])


def test_an_error_names_the_missing_right(running: RunningWorker, kubelet: Kubelet) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        message = 'pods "shell-worker-0" is forbidden: User "eve" cannot create resource "pods/exec" in API group ""'
        return (403, {"message": message}, {}) if request.path.endswith("/exec") else None

    kubelet.api.refuse = refuse
    with pytest.raises(ForbiddenError, match=r'"eve" cannot create resource "pods/exec".* FIX: ask the cluster'):
        running.run("true")


def test_credentials_that_have_expired_are_read_again(
    running: RunningWorker, kubelet: Kubelet, kubeconfig: WriteKubeconfig
) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        known = request.headers["Authorization"] == "Bearer t2" or not request.path.endswith("/exec")
        return None if known else (401, {"message": "Unauthorized"}, {})

    kubelet.api.refuse = refuse
    with pytest.raises(CredentialsError, match="FIX: log in again"):
        running.run("true")
    kubeconfig(kubelet.url, user={"token": "t2"})
    assert running.run("true")[0] == 0


def test_a_connection_that_is_cut_is_no_success(running: RunningWorker, kubelet: Kubelet) -> None:
    kubelet.cut = True
    with pytest.raises(UnreachableError, match="the connection to shell-worker-0 is lost; the command may still run"):
        running.run("sh", "-c", f"echo begun; {FOREVER}")
    kubelet.api.remove(f"{NAMESPACE}/pods/shell-worker-0")
    with pytest.raises(NotFoundError, match="shell-worker-0 has ended"):
        running.run("true")


def test_a_pod_whose_container_has_gone_is_refused_in_words(running: RunningWorker, kubelet: Kubelet) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        message = {"message": "container not found (elasticjob-worker)"}
        return (500, message, {}) if request.path.endswith("/exec") else None

    kubelet.api.refuse = refuse
    with pytest.raises(ClusterError, match="container not found"):
        running.run("true")


def test_an_older_cluster_cannot_learn_that_input_has_ended(running: RunningWorker, kubelet: Kubelet) -> None:
    kubelet.protocols = (OLDER,)
    assert running.run("head", "-c", "3", given=b"abc") == (0, b"abc", b"")
    assert running.run("true") == (0, b"", b"")


def test_a_server_that_knows_no_such_connections(running: RunningWorker, kubelet: Kubelet) -> None:
    kubelet.api.refuse = lambda request: (200, {}, {}) if request.path.endswith("/exec") else None
    with pytest.raises(ClusterError, match="opens no connection into pods"):
        running.access.run(running.worker, ["true"], Streams())
