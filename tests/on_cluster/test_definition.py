"""What an API server makes of the definition of ElasticJobs: its refusals, and whose fields are whose."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import NotFoundError
from elasticctl.api.spec import API_VERSION, PLURAL
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from tests.on_cluster.commands import kubectl, refusal
from tests.on_cluster.patient import PatientConnection
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import shell_job

pytestmark = pytest.mark.each_release

NAME = "defined"
STATUS = resource_path(API_VERSION, "default", PLURAL, NAME, "status")
CONTROLLER = "elasticctl-controller"


@pytest.fixture(autouse=True)
def nothing_left(crd: None, api: Connection) -> Iterator[None]:
    """No job before and after; no controller runs, so a job is nothing but its object."""
    remove(api)
    yield
    remove(api)


def remove(api: Connection) -> None:
    cluster = KubeCluster(api)
    try:
        cluster.delete_job("default", NAME)
    except NotFoundError:
        return
    wait_until(lambda: NAME not in [job["metadata"]["name"] for job in cluster.list_jobs("default")])


def job(**spec: Any) -> Manifest:
    return shell_job(NAME, "true", 2, **{"minReplicas": 1, "maxReplicas": 4, **spec})


def apply(manifest: Manifest, *options: str) -> str:
    return kubectl("apply", *options, "-f", "-", given=json.dumps(manifest))


def as_controller(api: Connection, status: Manifest) -> None:
    """Write a status as the controller does: all of it, under its own name."""
    found = api.request("GET", STATUS.removesuffix("/status"))
    with_status = {**found, "status": status}
    PatientConnection(CONTROLLER).request("PUT", STATUS, with_status)


def owners(api: Connection) -> set[tuple[str, str]]:
    """(field manager, subresource) of each writer of the job."""
    found = api.request("GET", STATUS.removesuffix("/status"))
    return {(item["manager"], item.get("subresource", "")) for item in found["metadata"]["managedFields"]}


def replicas(number: int) -> Manifest:
    return {"spec": {"replicaSpecs": {"Worker": {"replicas": number}}}}


@pytest.mark.parametrize(
    ("spec", "field", "said"),
    [
        ({"minReplicas": 3, "maxReplicas": 2}, "spec.minReplicas", "FIX: lower minReplicas, or raise maxReplicas"),
        ({"minReplicas": 3}, "spec.replicaSpecs.Worker.replicas", "FIX: raise replicas, or lower minReplicas"),
        ({"maxReplicas": 1}, "spec.replicaSpecs.Worker.replicas", "FIX: lower replicas, or raise maxReplicas"),
        ({"goal": {}}, "spec.goal", "FIX: give finishBy, budget or both"),
        (
            {"goal": {"budget": 5}, "rdzvEndpoint": "etcd:2379"},
            "spec.rdzvEndpoint",
            "FIX: leave out rdzvEndpoint or goal",
        ),
        ({"pools": {"order": [{}]}}, "spec.pools.order[0]", "FIX: give capacity, instanceType or zone"),
        (
            {"pools": {"order": [{"zone": "a"}] * 2}},
            "spec.pools.order",
            "names a pool twice. FIX: leave one of them out",
        ),
        ({"rdzvEndpoint": "etcd"}, "spec.rdzvEndpoint", "must be HOST:PORT, such as etcd:2379"),
    ],
)
def test_what_contradicts_itself_is_refused_with_what_to_type(spec: dict[str, Any], field: str, said: str) -> None:
    heard = refusal("create", "--dry-run=server", "-f", "-", given=json.dumps(job(**spec)))
    assert field in heard
    assert said in heard


def test_what_may_not_change_is_refused_with_what_to_type(api: Connection) -> None:
    apply(job())
    edited = job()
    edited["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["args"] = ["false"]
    heard = refusal("apply", "-f", "-", given=json.dumps(edited))
    assert "FIX: suspend the job (`elasticctl suspend JOB`), change it, and resume it" in heard
    apply(job(suspend=True))
    edited["spec"]["suspend"] = True
    apply(edited)
    apply(job(cancel=True))
    assert "FIX: `elasticctl rerun JOB`" in refusal("apply", "-f", "-", given=json.dumps(job(cancel=False)))


def test_kubectl_scales_within_the_bounds(api: Connection) -> None:
    apply(job())
    as_controller(api, {"replicas": 2, "selector": "job-name=defined"})
    kubectl("scale", "ej", NAME, "--replicas=3")
    scale = api.request("GET", STATUS.removesuffix("status") + "scale")
    assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (3, 2)
    assert scale["status"]["selector"] == "job-name=defined"
    assert "FIX: lower replicas, or raise maxReplicas" in refusal("scale", "ej", NAME, "--replicas=5")


def test_jobs_are_selected_and_shown_by_what_they_do(api: Connection) -> None:
    apply(job())
    status = {"phase": "Running", "desired": 2, "placed": 2, "training": 1, "progress": {"step": 1_000_000}}
    as_controller(api, status)
    for chosen in ("status.phase=Running", "spec.suspend=false", "status.phase!=Failed,spec.suspend!=true"):
        assert kubectl("get", "ej", "-o", "name", "--field-selector", chosen).endswith(f"/{NAME}\n")
    assert kubectl("get", "ej", "-o", "name", "--field-selector", "status.phase=Failed") == ""
    head, row, *_ = kubectl("get", "ej", NAME).splitlines()
    assert head.split() == ["NAME", "PHASE", "WANTED", "PLACED", "TRAINING", "STEP", "AGE"]
    assert row.split()[:6] == [NAME, "Running", "2", "2", "1", "1000000"]
    assert len(head) <= 80


@pytest.mark.parametrize("options", [(), ("--server-side",)])
def test_a_file_that_is_applied_again_keeps_what_the_controller_has_written(
    api: Connection, options: tuple[str, ...]
) -> None:
    manifest = job()
    apply(manifest, *options)
    as_controller(api, {"phase": "Running", "training": 2})
    admitted = {"metadata": {"annotations": {"elastic.pytorch.org/kueue-admitted": "uid"}}}
    PatientConnection(CONTROLLER).request("PATCH", STATUS.removesuffix("/status"), admitted, content_type=MERGE_PATCH)
    manifest["status"] = {"phase": "Failed"}  # a file may have been written by `kubectl get -o yaml`
    manifest["spec"]["maxReplicas"] = 3
    apply(manifest, *options)
    found = api.request("GET", STATUS.removesuffix("/status"))
    assert found["status"] == {"phase": "Running", "training": 2}
    assert found["spec"]["maxReplicas"] == 3
    assert found["metadata"]["annotations"].items() >= admitted["metadata"]["annotations"].items()
    assert {(CONTROLLER, "status"), (CONTROLLER, "")} <= owners(api)


@pytest.mark.parametrize("options", [(), ("--server-side",)])
def test_a_file_without_suspend_leaves_it_to_the_queue(api: Connection, options: tuple[str, ...]) -> None:
    path = STATUS.removesuffix("/status")
    apply(job(), *options)
    for suspend in (True, False):
        patch = {"spec": {"suspend": suspend}}
        PatientConnection(CONTROLLER).request("PATCH", path, patch, content_type=MERGE_PATCH)
        apply(job(maxReplicas=3), *options)
        assert api.request("GET", path)["spec"]["suspend"] is suspend


def test_a_scaling_and_a_file_do_not_overwrite_each_other(api: Connection) -> None:
    apply(job(), "--server-side")
    KubeCluster(api).patch_job("default", NAME, replicas(3))
    assert ("elasticctl", "") in owners(api)
    heard = refusal("apply", "--server-side", "-f", "-", given=json.dumps(job()))
    assert 'conflict with "elasticctl"' in heard
    assert ".spec.replicaSpecs.Worker.replicas" in heard
    # If the file has no number of workers, `scale` decides it.
    manifest = job()
    del manifest["spec"]["replicaSpecs"]["Worker"]["replicas"]
    apply(manifest, "--server-side")
    found = yaml.safe_load(kubectl("get", "ej", NAME, "-o", "yaml"))
    assert found["spec"]["replicaSpecs"]["Worker"]["replicas"] == 3
