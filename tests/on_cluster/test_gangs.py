"""Kubernetes' own gang scheduling, where the cluster has it: `kubelab up --feature GenericWorkload`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection
from tests.on_cluster.conftest import stopping
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.trainer import IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import shell_job

NAMESPACE = "default"
GANGS = "/apis/scheduling.k8s.io/v1beta1"
PLACES = 4
QUIET = "trap 'exit 0' TERM; while :; do sleep 0.2; done"


@pytest.fixture(scope="module")
def cluster(api: Connection, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    """A cluster with four places for workers, and a controller that does not share them out."""
    with suppress(NotFoundError):
        served = api.request("GET", GANGS)
        if not any(item["name"] == "podgroups" for item in served["resources"]):
            pytest.skip("the cluster serves no PodGroups: its gate GenericWorkload is closed")
        found = KubeCluster(api)
        offer(api, PLACES)
        try:
            with stopping(Replicas(tmp_path_factory.mktemp("controllers"))) as controllers:
                try:
                    controllers.start()
                    controllers.leader()
                    yield found
                finally:
                    for name in ("first", "second"):
                        with suppress(ElasticctlError):
                            found.delete_job(NAMESPACE, name)
        finally:
            offer(api, 0)
        return
    pytest.skip("the cluster serves no scheduling.k8s.io/v1beta1: its gate GenericWorkload is closed")


def offer(api: Connection, places: int) -> None:
    """Have the first node offer so many GPUs, and the others none."""
    for number, node in enumerate(api.request("GET", "/api/v1/nodes")["items"]):
        own = {GPU_RESOURCE: str(0 if number else places)}
        path = f"/api/v1/nodes/{node['metadata']['name']}/status"
        patch = {"status": {"capacity": own, "allocatable": own}}
        api.request("PATCH", path, patch, content_type=MERGE_PATCH)


def a_job(name: str) -> Manifest:
    container = {"image": IMAGE, "resources": {"limits": {GPU_RESOURCE: 1}}}
    return shell_job(name, QUIET, 3, namespace=NAMESPACE, container=container, minReplicas=3, maxReplicas=4)


def placed(cluster: KubeCluster, name: str) -> int:
    pods = cluster.list_pods(NAMESPACE, name)
    return sum(bool(pod["spec"].get("nodeName")) and "deletionTimestamp" not in pod["metadata"] for pod in pods)


def test_two_jobs_never_hold_half_of_what_each_needs(cluster: KubeCluster, api: Connection) -> None:
    seen = set[tuple[int, int]]()

    def count() -> tuple[int, int]:
        counts = placed(cluster, "first"), placed(cluster, "second")
        seen.add(counts)
        return counts

    for name in ("first", "second"):
        cluster.create_job(a_job(name))
    wait_until(lambda: sorted(count()) == [0, 3] and len(cluster.list_pods(NAMESPACE, "second")) == 3)
    assert (2, 2) not in seen
    first = "first" if count()[0] else "second"
    second = "second" if first == "first" else "first"
    [one, *_] = cluster.list_pods(NAMESPACE, first)
    uid = one["metadata"]["uid"]
    api.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{one['metadata']['name']}")
    wait_until(lambda: uid not in [pod["metadata"]["uid"] for pod in cluster.list_pods(NAMESPACE, first)])
    wait_until(lambda: placed(cluster, first) == 3)  # a replaced worker does not wait for two more
    assert placed(cluster, second) == 0

    replicas = cluster.get_job(NAMESPACE, second)["spec"]["replicaSpecs"]
    replicas["Worker"]["replicas"] = 3
    cluster.patch_job(NAMESPACE, second, {"spec": {"minReplicas": 1}})
    wait_until(lambda: placed(cluster, second) == 1)  # its minimum is less now, and the fourth place is free
