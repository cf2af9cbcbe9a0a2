"""Two projects share the GPUs of a real cluster: slots that its nodes offer, though they have no GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError, SpecError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import GPU, Quota
from elasticctl.api.status import JobStatus, Phase
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, list_objects
from tests.on_cluster.conftest import stopping
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.trainer import IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import FOREVER, shell_job
from tests.support.sharing_scenario import status

PROJECTS = ("a", "b")
SLOTS = 4


def offer(api: Connection, slots: int) -> None:
    """Have the nodes offer so many GPUs in all, as a device plugin would."""
    nodes = api.request("GET", "/api/v1/nodes")["items"]
    for number, node in enumerate(nodes):
        own = str(slots // len(nodes) + (number < slots % len(nodes)))
        status = {"capacity": {GPU_RESOURCE: own}, "allocatable": {GPU_RESOURCE: own}}
        path = f"/api/v1/nodes/{node['metadata']['name']}/status"
        api.request("PATCH", path, {"status": status}, content_type=MERGE_PATCH)


@pytest.fixture(scope="module")
def cluster(api: Connection, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    """A cluster of four GPUs, two guaranteed to each project, and a controller that shares them."""
    found = KubeCluster(api)
    for project in PROJECTS:
        with suppress(ConflictError):
            api.request("POST", "/api/v1/namespaces", {"metadata": {"name": project}})
        found.put_quota(Quota(project, guaranteed={GPU: SLOTS // len(PROJECTS)}).to_manifest())
    offer(api, SLOTS)
    try:
        with stopping(Replicas(tmp_path_factory.mktemp("controllers"))) as controllers:
            controllers.start(flags=["--sharing"])
            controllers.leader()
            yield found
            clear(found, api)
    finally:
        for project in PROJECTS:
            found.delete_quota(project)
        offer(api, 0)


def clear(cluster: KubeCluster, api: Connection) -> None:
    """Delete all jobs, and wait until no pod is left, also of jobs that are gone."""
    for project in PROJECTS:
        for job in cluster.list_jobs(project):
            cluster.delete_job(project, job["metadata"]["name"])
    wait_until(lambda: not any(list_objects(api, f"/api/v1/namespaces/{project}/pods") for project in PROJECTS))


@pytest.fixture(autouse=True)
def nobody_else(cluster: KubeCluster, api: Connection) -> None:
    """All slots are free when a test begins."""
    clear(cluster, api)


def on_a_gpu(manifest: Manifest) -> Manifest:
    """The job with a GPU for each worker, and an image."""
    for container in manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"]:
        container |= {"image": IMAGE, "resources": {"limits": {GPU_RESOURCE: "1"}}}
    return manifest


def test_a_job_grows_gives_way_and_grows_back(cluster: KubeCluster) -> None:
    """That it trains on is for the local cluster to show, and for Kueue's tests."""

    def elastic() -> JobStatus:
        return status(cluster, "a", "elastic")

    automatic = {"sharing": {"automatic": True}, "minReplicas": 2, "maxReplicas": 4}
    cluster.create_job(on_a_gpu(shell_job("elastic", FOREVER, 4, namespace="a", grace_s=1, **automatic)))
    wait_until(lambda: elastic().active == 4)
    cluster.create_job(on_a_gpu(shell_job("guest", FOREVER, 2, namespace="b", grace_s=1, minReplicas=2)))
    wait_until(lambda: status(cluster, "b", "guest").phase is Phase.RUNNING)
    wait_until(lambda: elastic().active == 2)
    cluster.delete_job("b", "guest")
    wait_until(lambda: elastic().active == 4)
    assert elastic().interruptions == ()
    assert {item.by for item in elastic().scalings if item.from_workers} == {"sharing"}


def test_a_gang_waits_without_a_pod_until_all_of_it_fits(cluster: KubeCluster) -> None:
    cluster.create_job(on_a_gpu(shell_job("first", FOREVER, 3, namespace="a", grace_s=1, minReplicas=3)))
    wait_until(lambda: status(cluster, "a", "first").phase is Phase.RUNNING)
    cluster.create_job(on_a_gpu(shell_job("second", FOREVER, 4, namespace="a", grace_s=1, minReplicas=4)))
    wait_until(lambda: status(cluster, "a", "second").reason == "Queued")
    assert cluster.list_pods("a", "second") == []
    cluster.delete_job("a", "first")
    wait_until(lambda: status(cluster, "a", "second").phase is Phase.RUNNING)


def test_quotas_are_checked_by_the_server_too(cluster: KubeCluster, api: Connection) -> None:
    path = "/apis/elastic.pytorch.org/v1alpha1/elasticquotas"
    wrong = Quota("c", guaranteed={GPU: 1}).to_manifest()
    wrong["spec"]["weight"] = -1
    with pytest.raises(SpecError, match="weight"):
        api.request("POST", path, wrong)
    with pytest.raises(NotFoundError):
        cluster.delete_quota("c")
