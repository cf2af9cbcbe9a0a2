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
from tests.support.worker_access_contract import Room, WorkerAccessContract


@pytest.fixture
def kubelet(api: FakeApi, kubeconfig: WriteKubeconfig, tmp_path: Path) -> Iterator[Kubelet]:
    found = Kubelet(api, tmp_path, {"PATH": os.environ["PATH"], "MARK": "here it is"})
    kubeconfig(found.url)
    yield found
    found.close()


@pytest.fixture
def room(kubelet: Kubelet, tmp_path: Path) -> Iterator[Room]:
    connection = connect()
    job = KubeCluster(connection).create_job(shell_job("room", FOREVER))
    said: list[str] = []
    yield Room(KubeWorkerAccess(connection, said.append, linger_s=0.2), add_pod(kubelet.api, job, 0), tmp_path)
    connection.close()


class TestKubeWorkerAccess(WorkerAccessContract):
    pass


def test_the_container_that_trains_is_entered(room: Room, kubelet: Kubelet) -> None:
    assert room.run("true") == (0, b"", b"")
    (asked,) = kubelet.asked
    assert asked["container"] == ["elasticjob-worker"]
    assert asked["command"][:2] == ["sh", "-c"]
    assert asked["command"][3:] == ["sh", "true"]
    assert (asked["stdin"], asked["tty"]) == (["false"], ["false"])


def test_who_may_not_is_told_which_right_is_missing(room: Room, kubelet: Kubelet) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        message = 'pods "room-worker-0" is forbidden: User "eve" cannot create resource "pods/exec" in API group ""'
        return (403, {"message": message}, {}) if request.path.endswith("/exec") else None

    kubelet.api.refuse = refuse
    with pytest.raises(ForbiddenError, match=r'"eve" cannot create resource "pods/exec".* FIX: ask the cluster'):
        room.run("true")


def test_credentials_that_have_expired_are_read_again(
    room: Room, kubelet: Kubelet, kubeconfig: WriteKubeconfig
) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        known = request.headers["Authorization"] == "Bearer t2" or not request.path.endswith("/exec")
        return None if known else (401, {"message": "Unauthorized"}, {})

    kubelet.api.refuse = refuse
    with pytest.raises(CredentialsError, match="FIX: log in again"):
        room.run("true")
    kubeconfig(kubelet.url, user={"token": "t2"})
    assert room.run("true")[0] == 0


def test_a_connection_that_is_cut_is_no_success(room: Room, kubelet: Kubelet) -> None:
    kubelet.cut = True
    with pytest.raises(UnreachableError, match="the connection to room-worker-0 is lost; the command may still run"):
        room.run("sh", "-c", f"echo begun; {FOREVER}")
    kubelet.api.remove(f"{NAMESPACE}/pods/room-worker-0")
    with pytest.raises(NotFoundError, match="room-worker-0 has ended"):
        room.run("true")


def test_a_pod_whose_container_has_gone_is_refused_in_words(room: Room, kubelet: Kubelet) -> None:
    def refuse(request: Request) -> tuple[int, object, dict[str, str]] | None:
        message = {"message": "container not found (elasticjob-worker)"}
        return (500, message, {}) if request.path.endswith("/exec") else None

    kubelet.api.refuse = refuse
    with pytest.raises(ClusterError, match="container not found"):
        room.run("true")


def test_an_older_cluster_cannot_be_told_that_input_has_ended(room: Room, kubelet: Kubelet) -> None:
    kubelet.protocols = (OLDER,)
    assert room.run("head", "-c", "3", given=b"abc") == (0, b"abc", b"")
    assert room.run("true") == (0, b"", b"")


def test_a_server_that_knows_no_such_connections(room: Room, kubelet: Kubelet) -> None:
    kubelet.api.refuse = lambda request: (200, {}, {}) if request.path.endswith("/exec") else None
    with pytest.raises(ClusterError, match="opens no connection into pods"):
        room.access.run(room.worker, ["true"], Streams())
