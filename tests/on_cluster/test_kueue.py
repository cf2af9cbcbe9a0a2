"""A job in a queue of Kueue's on a real cluster: the objects are Kueue's, and the test plays its part."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from benchmarks.replicas import Replicas
from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.errors import ConflictError, ElasticctlError, NotFoundError
from elasticctl.api.spec import QUEUE_LABEL
from elasticctl.api.status import Phase
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection
from tests.on_cluster.conftest import tell
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.sharing_story import AUTOMATIC, status, training, trains

NAMESPACE = "queued"
GROUP, VERSION = "kueue.x-k8s.io", "v1beta1"
ROOT = f"/apis/{GROUP}/{VERSION}"
WORKLOADS = f"{ROOT}/namespaces/{NAMESPACE}/workloads"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
FLAVOR_LABEL = "elasticctl.dev/test-flavor"
FOLDER = HOST_FOLDER / "kueue"
PATIENCE_S = 120.0


def definition(plural: str, kind: str, scope: str) -> Manifest:
    """A CRD of Kueue's that takes anything; as there, a status is written by itself."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}} if kind == "Workload" else {},
        "schema": {"openAPIV3Schema": anything},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {"plural": plural, "singular": kind.lower(), "kind": kind, "listKind": f"{kind}List"},
            "versions": [version],
        },
    }


@pytest.fixture(scope="module")
def cluster(api: Connection, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    """A cluster with Kueue's definitions, one flavor that all nodes are of, and a controller."""
    found = KubeCluster(api)
    definitions = [
        definition("workloads", "Workload", "Namespaced"),
        definition("resourceflavors", "ResourceFlavor", "Cluster"),
    ]
    for item in definitions:
        try:
            api.request("POST", CRDS, item)
        except ConflictError:
            pytest.skip(f"{item['metadata']['name']} is there: a Kueue of the cluster's own would play its part too")
    with suppress(ConflictError):
        api.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    FOLDER.chmod(0o777)  # workers are nobody in particular
    controllers = Replicas(tmp_path_factory.mktemp("controllers"))
    try:
        wait_until(lambda: served(api), 30)
        label(api, "spot")
        flavor = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "ResourceFlavor", "metadata": {"name": "spot"}}
        api.request("POST", f"{ROOT}/resourceflavors", {**flavor, "spec": {"nodeLabels": {FLAVOR_LABEL: "spot"}}})
        controllers.start()
        controllers.leader()
        yield found
    finally:
        for job in found.list_jobs(NAMESPACE):
            found.delete_job(NAMESPACE, job["metadata"]["name"])
        wait_until(lambda: not found.list_jobs(NAMESPACE), 60)
        try:
            controllers.stop()
        finally:
            tell(controllers)
            for item in definitions:
                api.request("DELETE", f"{CRDS}/{item['metadata']['name']}")
            label(api, None)


def served(api: Connection) -> bool:
    with suppress(ElasticctlError):
        for plural in ("workloads", "resourceflavors"):
            api.request("GET", f"{ROOT}/{plural}")
        return True
    return False


def label(api: Connection, value: str | None) -> None:
    """Have all nodes be of that flavor, or of none."""
    for node in api.request("GET", "/api/v1/nodes")["items"]:
        patch = {"metadata": {"labels": {FLAVOR_LABEL: value}}}
        api.request("PATCH", f"/api/v1/nodes/{node['metadata']['name']}", patch, content_type=MERGE_PATCH)


def in_the_queue(manifest: Manifest) -> Manifest:
    """The job as `submit --queue team` makes it, and with what its pods need in the lab."""
    manifest["metadata"]["labels"] = {QUEUE_LABEL: "team"}
    manifest["spec"]["suspend"] = True
    spec = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    spec["volumes"] = [{"name": "state", "hostPath": {"path": str(FOLDER), "type": "Directory"}}]
    for container in spec["containers"]:
        container |= {"image": IMAGE, "volumeMounts": [{"name": "state", "mountPath": "/state"}]}
    return manifest


class Kueue:
    """What of Kueue's part a test plays for one job, through the API server."""

    def __init__(self, api: Connection, job: str) -> None:
        self._api, self._job = api, job

    def workload(self) -> Manifest | None:
        items = self._api.request("GET", WORKLOADS)["items"]
        owned = [i for i in items if any(ref["name"] == self._job for ref in i["metadata"]["ownerReferences"])]
        return owned[0] if owned else None

    def holds(self, name: str) -> bool:
        conditions = (self.workload() or {}).get("status", {}).get("conditions", [])
        return any(item["type"] == name and item["status"] == "True" for item in conditions)

    def admit(self, workers: int) -> None:
        given = {"name": "workers", "count": workers, "flavors": {"cpu": "spot"}}
        admission = {"clusterQueue": "cluster", "podSetAssignments": [given]}
        self._say({"QuotaReserved": True, "Admitted": True, "Evicted": False}, admission=admission)

    def evict(self) -> None:
        self._say({"Evicted": True})

    def _say(self, conditions: dict[str, bool], **more: Any) -> None:
        """Change conditions of the version that was read, as Kueue does, until nobody has been faster."""
        while True:
            found = self.workload()
            assert found is not None
            by_type = {item["type"]: item for item in found.get("status", {}).get("conditions", [])}
            for name, value in conditions.items():
                said = {"type": name, "status": str(value), "reason": "Preempted", "message": "by the test"}
                by_type[name] = {**said, "lastTransitionTime": to_rfc3339(float(int(time.time())))}
            body = {
                "metadata": {"resourceVersion": found["metadata"]["resourceVersion"]},
                "status": {"conditions": list(by_type.values()), **more},
            }
            path = f"{WORKLOADS}/{found['metadata']['name']}/status"
            with suppress(ConflictError):
                self._api.request("PATCH", path, body, content_type=MERGE_PATCH)
                return


def test_a_job_is_admitted_evicted_at_a_committed_step_and_admitted_again(
    cluster: KubeCluster, api: Connection
) -> None:
    kueue = Kueue(api, "elastic")
    cluster.create_job(in_the_queue(training("elastic", NAMESPACE, "file:///state", **AUTOMATIC)))

    def job() -> Any:
        return status(cluster, NAMESPACE, "elastic")

    def suspended() -> bool:
        return cluster.get_job(NAMESPACE, "elastic")["spec"]["suspend"] is True

    asked = wait_until(kueue.workload, 30)
    assert asked is not None
    [pods] = asked["spec"]["podSets"]
    assert (asked["spec"]["queueName"], pods["count"], pods["minCount"]) == ("team", 4, 2)
    wait_until(lambda: job().reason == "NotAdmitted" and "Kueue's queue team" in job().message, 30)
    assert cluster.list_pods(NAMESPACE, "elastic") == []

    kueue.admit(2)
    wait_until(lambda: trains(job(), 2), PATIENCE_S)
    assert not suspended()
    for pod in cluster.list_pods(NAMESPACE, "elastic"):
        placed = api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}")
        assert placed["spec"]["nodeSelector"] == {FLAVOR_LABEL: "spot"}
    wait_until(lambda: kueue.holds("PodsReady"), 30)
    wait_until(lambda: job().checkpoint.step, PATIENCE_S)

    kueue.evict()
    wait_until(lambda: not kueue.holds("QuotaReserved"), PATIENCE_S)
    phases = {pod["status"]["phase"] for pod in cluster.list_pods(NAMESPACE, "elastic")}
    assert phases <= {"Failed", "Succeeded"}, "quota is given back once no worker is left"
    assert kueue.holds("Requeued")
    assert suspended()
    assert (job().phase, job().steps_redone, job().failures) == (Phase.SUSPENDED, 0, 0)
    stopped = job().checkpoint.step

    kueue.admit(3)
    wait_until(lambda: trains(job(), 3), PATIENCE_S)
    assert (job().generations[-1].resumed_step or 0) >= stopped
    assert job().steps_redone == 0
    cluster.patch_job(NAMESPACE, "elastic", {"spec": {"cancel": True}})
    wait_until(lambda: kueue.holds("Finished"), 60)
    cluster.delete_job(NAMESPACE, "elastic")
    wait_until(lambda: kueue.workload() is None, 60)  # the cluster removes it with the job


def test_an_owner_who_suspends_a_job_leaves_its_quota_to_others(cluster: KubeCluster, api: Connection) -> None:
    kueue = Kueue(api, "asleep")
    cluster.create_job(in_the_queue(training("asleep", NAMESPACE, "file:///state", workers=1)))
    wait_until(kueue.workload, 30)
    kueue.admit(1)
    wait_until(lambda: trains(status(cluster, NAMESPACE, "asleep"), 1), PATIENCE_S)

    def active() -> object:
        return (kueue.workload() or {})["spec"].get("active", True)

    cluster.patch_job(NAMESPACE, "asleep", {"spec": {"suspend": True}})
    wait_until(lambda: active() is False, 30)
    kueue.evict()
    wait_until(lambda: not kueue.holds("QuotaReserved"), 60)
    assert not kueue.holds("Requeued")
    wait_until(lambda: status(cluster, NAMESPACE, "asleep").reason == "Suspended", 30)
    cluster.patch_job(NAMESPACE, "asleep", {"spec": {"suspend": False}})
    wait_until(lambda: active() is True, 30)
    kueue.admit(1)
    wait_until(lambda: trains(status(cluster, NAMESPACE, "asleep"), 1), PATIENCE_S)
    cluster.delete_job(NAMESPACE, "asleep")
    with pytest.raises(NotFoundError):
        cluster.get_job(NAMESPACE, "asleep")
