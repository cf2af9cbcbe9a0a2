"""Two projects share the GPUs of a real cluster: slots that its nodes offer, though no GPU is behind them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.replicas import Replicas
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError, SpecError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import GPU, Quota
from elasticctl.api.status import Phase
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, list_objects
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import FOREVER, shell_job
from tests.support.sharing_story import give_way_and_grow_back, status

PROJECTS = ("a", "b")
SLOTS = 4
FOLDER = HOST_FOLDER / "sharing"


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
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    FOLDER.chmod(0o777)  # workers are nobody in particular
    controllers = Replicas(tmp_path_factory.mktemp("controllers"))
    try:
        controllers.start(flags=["--sharing"])
        controllers.leader()
        yield found
    finally:
        for project in PROJECTS:
            for job in found.list_jobs(project):
                found.delete_job(project, job["metadata"]["name"])
            found.delete_quota(project)
        try:
            controllers.stop()
        finally:
            for replica in controllers.running:
                print(f"--- {replica.log.name}", replica.log.read_text(), sep="\n")
            offer(api, 0)


@pytest.fixture(autouse=True)
def nobody_else(cluster: KubeCluster, api: Connection) -> None:
    """All slots are free when a test begins."""
    for project in PROJECTS:
        for job in cluster.list_jobs(project):
            cluster.delete_job(project, job["metadata"]["name"])
    wait_until(lambda: not _pods(api), 90)


def on_a_gpu(manifest: Manifest) -> Manifest:
    """The job with a GPU for each worker, and what its pods need in the lab."""
    spec = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    spec["volumes"] = [{"name": "state", "hostPath": {"path": str(FOLDER), "type": "Directory"}}]
    for container in spec["containers"]:
        container |= {
            "image": IMAGE,
            "volumeMounts": [{"name": "state", "mountPath": "/state"}],
            "resources": {"limits": {GPU_RESOURCE: "1"}},
        }
    return manifest


def test_a_job_grows_gives_way_and_grows_back(cluster: KubeCluster) -> None:
    give_way_and_grow_back(cluster, lambda job: cluster.create_job(on_a_gpu(job)), "file:///state")


def test_a_gang_waits_without_a_pod_until_all_of_it_fits(cluster: KubeCluster) -> None:
    cluster.create_job(on_a_gpu(shell_job("first", FOREVER, 3, namespace="a", grace_s=1, minReplicas=3)))
    wait_until(lambda: status(cluster, "a", "first").phase is Phase.RUNNING, 120)
    cluster.create_job(on_a_gpu(shell_job("second", FOREVER, 4, namespace="a", grace_s=1, minReplicas=4)))
    wait_until(lambda: status(cluster, "a", "second").reason == "Queued", 30)
    assert cluster.list_pods("a", "second") == []
    cluster.delete_job("a", "first")
    wait_until(lambda: status(cluster, "a", "second").phase is Phase.RUNNING, 120)


def test_quotas_are_checked_by_the_server_too(cluster: KubeCluster, api: Connection) -> None:
    path = "/apis/elastic.pytorch.org/v1alpha1/elasticquotas"
    wrong = Quota("c", guaranteed={GPU: 1}).to_manifest()
    wrong["spec"]["weight"] = -1
    with pytest.raises(SpecError, match="weight"):
        api.request("POST", path, wrong)
    with pytest.raises(NotFoundError):
        cluster.delete_quota("c")


def _pods(api: Connection) -> list[Manifest]:
    return [
        pod
        for project in PROJECTS
        for pod in list_objects(api, f"/api/v1/namespaces/{project}/pods")  # of jobs that are gone too
    ]
