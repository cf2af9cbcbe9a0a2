"""The controller shares GPUs between projects, its process against a small API server."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.gpu_types import INSTANCE_LABEL
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import HELD, Quota
from elasticctl.api.spec import worker_labels
from elasticctl.api.status import Phase
from elasticctl_controller.kube.capacity import KubeCapacity
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.owned_objects import ObjectBuilders, OwnedObjects
from elasticctl_controller.kube.spending import KubeQuotas
from elasticctl_controller.kube.workload import KubeWorkload, Settings
from tests.support.control import ControlApi
from tests.support.controller.replica import Replica
from tests.support.controller.shared_nodes import API, GPU, add_node, jobs, pods, run_pods, status
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until


def add_quota(control: ControlApi, project: str, **guaranteed: int) -> None:
    control.put(f"{API}/elasticquotas/{project}", Quota(project, guaranteed=guaranteed).to_manifest())


@pytest.fixture
def controller(control: ControlApi, tmp_path: Path) -> Iterator[Replica]:
    add_node(control, "n1", 4, **{INSTANCE_LABEL: "g4dn.12xlarge"})
    add_quota(control, "a", t4=2)
    add_quota(control, "b", t4=2)
    with Replica(control, tmp_path, "only", "--sharing") as replica:
        wait_until(replica.leads)
        yield replica
        assert replica.end(signal.SIGTERM) == 0
        assert "error" not in replica.log.read_text()


def trained(control: ControlApi, namespace: str, name: str, workers: int) -> bool:
    run_pods(control, namespace, "n1")
    found = status(control, namespace, name)
    return found.phase is Phase.RUNNING and found.active == workers == len(control.names(pods(namespace)))


def test_a_job_grows_gives_way_and_grows_back(control: ControlApi, controller: Replica) -> None:
    automatic = {"minReplicas": 2, "maxReplicas": 4, "sharing": {"automatic": True}}
    control.put(f"{jobs('a')}/elastic", shell_job("elastic", "true", 2, namespace="a", container=GPU, **automatic))
    wait_until(lambda: trained(control, "a", "elastic", 4))
    share = status(control, "a", "elastic").share
    assert share is not None
    assert (share.workers, share.borrowed, share.pool) == (4, 2, "t4")
    control.put(f"{jobs('b')}/guest", shell_job("guest", "true", 2, namespace="b", container=GPU, minReplicas=2))
    wait_until(lambda: trained(control, "a", "elastic", 2))
    wait_until(lambda: trained(control, "b", "guest", 2))
    assert "b/guest" in status(control, "a", "elastic").scalings[-1].message
    assert controller.get(controller.health_port, "/healthz")[0] == 200


def floor_of(control: ControlApi) -> tuple[KubeWorkload, KubeQuotas, KubeCapacity]:
    api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
    nothing = ObjectBuilders(lambda job, pod: [], lambda job: {})
    workload = KubeWorkload(
        api, Settings("", "me", node_grace_s=0.1), OwnedObjects(api, nothing), lambda job, pods: lambda pod: pod
    )
    quotas = KubeQuotas(api)
    return workload, quotas, KubeCapacity(api, workload, quotas)


def test_news_are_what_counts_and_not_that_training_goes_on(control: ControlApi) -> None:
    told: list[int] = []
    workload, quotas, floor = floor_of(control)
    workload.start()
    quotas.reflector.start()
    floor.subscribe(lambda: told.append(1))
    floor.reflector.start()
    try:
        job = control.put(f"{jobs('a')}/job", shell_job("job", "true", namespace="a"))
        wait_until(lambda: told)
        wait_until(lambda: list(floor.all_jobs()))

        def write(**fields: Any) -> bool:
            """Write a status; True once it was news."""
            told.clear()
            written = control.put(f"{jobs('a')}/job", {**job, "metadata": dict(job["metadata"]), "status": fields})
            version = written["metadata"]["resourceVersion"]
            wait_until(lambda: next(iter(floor.all_jobs()))["metadata"]["resourceVersion"] == version)
            return bool(told)

        assert write(phase="Running")
        assert not write(phase="Running", progress={"step": 1}, checkpoint={"step": 1}, generations=[{"lastStep": 1}])
        assert write(phase="Running", active=1)
        told.clear()
        add_quota(control, "a", t4=1)
        wait_until(lambda: told)
        told.clear()
        add_node(control, "n1", 2)
        wait_until(lambda: told)
        assert [node["status"]["allocatable"] for node in floor.healthy_nodes()] == [{GPU_RESOURCE: "2"}]
        control.remove("/api/v1/nodes/n1")
        wait_until(lambda: floor.healthy_nodes() == [])
    finally:
        floor.reflector.stop()
        quotas.reflector.stop()
        workload.stop()


def put_stranger(
    control: ControlApi, name: str, gpus: int, node: str, phase: str = "Running", **metadata: object
) -> None:
    """A pod that is no worker."""
    container = {"name": "c", "resources": {"limits": {GPU_RESOURCE: str(gpus)}}} if gpus else {"name": "c"}
    spec = {"containers": [container], **({"nodeName": node} if node else {})}
    placing = {"type": "PodScheduled", "status": "True"}
    status = {"phase": phase, "conditions": [] if phase == "New" else [placing]}
    pod = {"metadata": {"name": name, "namespace": "x", **metadata}, "spec": spec, "status": status}
    control.put(f"{pods('x')}/{name}", pod)


def test_what_other_pods_hold_is_seen_until_they_end(control: ControlApi) -> None:
    told: list[int] = []
    add_node(control, "n1", 4)
    add_node(control, "n2", 4)
    put_stranger(control, "notebook", 2, "n1")
    put_stranger(control, "finished", 4, "n2", "Succeeded")
    workload, quotas, floor = floor_of(control)
    workload.start()
    quotas.reflector.start()
    floor.subscribe(lambda: told.append(1))
    floor.reflector.start()

    def held() -> list[object]:
        return [node["status"].get(HELD) for node in floor.healthy_nodes()]

    try:
        wait_until(lambda: held() == [{GPU_RESOURCE: 2}, None])
        told.clear()
        put_stranger(control, "server", 1, "n1")
        wait_until(lambda: told and held() == [{GPU_RESOURCE: 3}, None])
        put_stranger(control, "waits", 8, "")
        put_stranger(control, "web", 0, "n2")
        put_stranger(control, "notebook", 2, "n1", "Failed")
        wait_until(lambda: held() == [{GPU_RESOURCE: 1}, None])
        put_stranger(control, "sent", 10**15, "n1", "New")  # whoever names a node is not there yet
        put_stranger(control, "sent-worker", 10**15, "n1", "New", labels=worker_labels("job", 0))
        put_stranger(control, "waits", 3, "n2", "Pending")
        wait_until(lambda: held() == [{GPU_RESOURCE: 1}, {GPU_RESOURCE: 3}])
        control.remove(f"{pods('x')}/server")
        wait_until(lambda: held() == [None, {GPU_RESOURCE: 3}])
        told.clear()
        labels, owner = worker_labels("job", 0), {"kind": "ElasticJob", "name": "job", "uid": "u", "controller": True}
        put_stranger(control, "pretender", 2, "n1", labels=labels)
        wait_until(lambda: told and held() == [{GPU_RESOURCE: 2}, {GPU_RESOURCE: 3}])
        put_stranger(control, "job-pretender", 1, "n1", labels=labels, ownerReferences=[owner])
        wait_until(lambda: held() == [{GPU_RESOURCE: 3}, {GPU_RESOURCE: 3}])
        put_stranger(control, "job-worker-0", 1, "n1", labels=labels, ownerReferences=[owner])
        wait_until(lambda: held() == [{GPU_RESOURCE: 4}, {GPU_RESOURCE: 3}])  # there is no such job
        job = shell_job("job", "true", namespace="x")
        control.put(f"{jobs('x')}/job", {**job, "metadata": {**job["metadata"], "uid": "u"}})
        put_stranger(control, "pretender", 2, "n1", "Failed", labels=labels)
        wait_until(lambda: held() == [{GPU_RESOURCE: 1}, {GPU_RESOURCE: 3}])
        other = {**owner, "kind": "ConfigMap", "uid": "v"}
        refs = [other, {**owner, "controller": False}]
        put_stranger(control, "job-worker-1", 1, "n1", labels=labels, ownerReferences=refs)
        wait_until(lambda: held() == [{GPU_RESOURCE: 2}, {GPU_RESOURCE: 3}])
        selectors = {request.params.get("fieldSelector") for request in control.requests if "/pods" in request.path}
        assert "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed" in selectors
    finally:
        floor.reflector.stop()
        quotas.reflector.stop()
        workload.stop()


def test_a_job_waits_for_gpus_that_others_hold(control: ControlApi, controller: Replica) -> None:
    put_stranger(control, "notebook", 1, "n1")
    big = shell_job("big", "true", 4, namespace="a", container=GPU, minReplicas=4)
    control.put(f"{jobs('a')}/big", big)
    wait_until(lambda: status(control, "a", "big").reason == "Queued")
    assert control.names(pods("a")) == []
    control.remove(f"{pods('x')}/notebook")
    wait_until(lambda: len(control.names(pods("a"))) == 4)
