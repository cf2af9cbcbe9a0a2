"""A real cluster keeps the contract of `Cluster`, and what only a real one can show of the client."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elasticctl.api.errors import NotFoundError, SpecError
from elasticctl.cluster.base import Cluster, LogLine, LogQuery
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection
from tests.on_cluster.images import ClusterOfImages
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.waiting import wait_until
from tests.support.cluster_contract import ClusterContract, phase, running, scale
from tests.support.jobs import FOREVER, shell_job


@pytest.fixture
def cluster(api: Connection, replicas: Replicas) -> Iterator[Cluster]:
    """The cluster, without jobs or pods before and after."""
    found = ClusterOfImages(api)
    clear(found)
    yield found
    clear(found)


def clear(cluster: KubeCluster) -> None:
    names = [job["metadata"]["name"] for job in cluster.list_jobs("default")]
    for name in names:
        cluster.delete_job("default", name)
    wait_until(lambda: not cluster.list_jobs("default"))


class TestKubeCluster(ClusterContract):
    AGE_RESOLUTION_S = 1.0
    KEEPS_LOGS = False


def test_a_manifest_that_the_schema_refuses_is_refused_by_field(cluster: Cluster) -> None:
    with pytest.raises(SpecError, match="minReplicas") as error:
        cluster.create_job(shell_job("wrong", "true", minReplicas=0))
    assert error.value.path == "spec.minReplicas"
    with pytest.raises(SpecError, match="minReplicas"):
        cluster.create_job(shell_job("wrong", "true", minReplicas=0), dry_run=True)


def test_a_namespace_that_is_not_there_is_said(cluster: Cluster) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        cluster.create_job(shell_job("lost", "true", namespace="nowhere"))


def test_names_of_any_content_are_not_found(cluster: Cluster) -> None:
    for name in ("../x", "..", "a/b", "a?b", "ä ö", "%2e%2e", "a\nb", "a#b"):
        with pytest.raises(NotFoundError):
            cluster.get_job("default", name)


def test_a_follow_goes_on_through_scaling_and_replacement(cluster: Cluster) -> None:
    script = f"trap 'echo bye; exit 143' TERM; echo here $HOSTNAME; {FOREVER.replace('sleep 1', 'sleep 0.1')}"
    cluster.create_job(shell_job("talks", script, workers=2, minReplicas=1, maxReplicas=3, grace_s=10))
    got: list[LogLine] = []
    reader = threading.Thread(
        target=_keep, args=(got, cluster.logs("default", "talks", LogQuery(follow=True))), daemon=True
    )
    reader.start()

    def said(text: str) -> list[str]:
        return sorted(line.worker[-1] for line in list(got) if line.text.startswith(text))

    wait_until(lambda: said("here") == ["0", "1"])
    cluster.evict_pod("default", "talks-worker-1", grace_s=10.0)
    wait_until(lambda: len(said("here")) == 3 and said("bye") == ["1"])
    cluster.patch_job("default", "talks", scale(3))
    wait_until(lambda: len(said("here")) == 4)
    wait_until(lambda: len(running(cluster, "talks")) == 3)
    cluster.patch_job("default", "talks", {"spec": {"cancel": True}})
    wait_until(lambda: not reader.is_alive())
    assert phase(cluster, "talks") == "Cancelled"
    assert len(said("here")) == 4


def _keep(into: list[LogLine], lines: Iterator[LogLine]) -> None:
    for line in lines:
        into.append(line)
