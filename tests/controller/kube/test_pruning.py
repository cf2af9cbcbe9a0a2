"""What is kept of an object: everything that is read, and little else."""

from __future__ import annotations

import json
import pickle
import tracemalloc
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.observed.workers import Pod
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.kube.nodes import NodeHealth
from elasticctl_controller.kube.pruning import prune_holder, prune_job, prune_node, prune_pod, unfold_job
from tests.support.any_json import JSON
from tests.support.jobs import shell_job

CONDITIONS = [
    {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"},
    {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "x" * 300},
]
ENDED = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:01:00Z", "containerID": "c" * 80}


def a_pod() -> dict[str, Any]:
    """A pod as an API server gives it out, with the bulk of one."""
    env = [{"name": f"VARIABLE_{number}", "value": "x" * 50} for number in range(40)]
    status = [
        {"name": "sidecar", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "image": "i" * 80},
        {"name": "elasticjob-worker", "state": {"terminated": ENDED}, "lastState": {}, "imageID": "i" * 80},
    ]
    return {
        "metadata": {
            "name": "job-worker-1",
            "namespace": "default",
            "uid": "u1",
            "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "deletionTimestamp": "2026-01-01T00:02:00Z",
            "labels": {"job-name": "job", "replica-index": "1", "team": "vision"},
            "annotations": {
                "elastic.pytorch.org/preempted": "true",
                "elastic.pytorch.org/pool": "spot/zone-a",
                "bulk": "x" * 500,
            },
            "ownerReferences": [{"kind": "ElasticJob", "name": "job", "uid": "j1", "controller": True}],
            "managedFields": [{"fieldsV1": {f"f:{number}": {} for number in range(200)}}],
        },
        "spec": {
            "nodeName": "n1",
            "containers": [{"name": "sidecar", "env": env}, {"name": "elasticjob-worker", "env": env}],
            "volumes": env,
        },
        "status": {
            "phase": "Failed",
            "startTime": "2026-01-01T00:00:05Z",
            "conditions": CONDITIONS,
            "containerStatuses": status,
        },
    }


def test_a_pod_reads_the_same_and_is_a_fraction() -> None:
    pod = a_pod()
    assert Pod.from_manifest(pod).pool == "spot/zone-a"
    assert Pod.from_manifest(prune_pod(pod)) == Pod.from_manifest(pod)
    assert len(json.dumps(prune_pod(pod))) < 1500 < len(json.dumps(pod)) / 6


def test_what_init_containers_do_reads_the_same() -> None:
    states: list[dict[str, Any]] = [{"waiting": {"reason": "ErrImagePull"}}, {"running": {"startedAt": "now"}}]
    states += [{"terminated": {"exitCode": code, "message": "no data"}} for code in (0, 7)]
    for phase in ("Pending", "Failed"):
        for state in states:
            for container in ({"name": "data"}, {"name": "data", "restartPolicy": "Always"}):
                status = {"phase": phase, "initContainerStatuses": [{"name": "data", "state": state}]}
                pod = {"metadata": {"name": "a"}, "spec": {"initContainers": [container]}, "status": status}
                if container.get("restartPolicy") and "waiting" not in state:
                    assert "initContainerStatuses" not in prune_pod(pod)["status"]
                assert Pod.from_manifest(prune_pod(pod)) == Pod.from_manifest(pod)


def test_a_node_reads_the_same() -> None:
    conditions = [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "Unknown"}]
    taints = [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute", "value": "x"}]
    node = {
        "metadata": {"name": "n1", "resourceVersion": "3", "labels": {"a": "b"}},
        "spec": {"taints": taints, "podCIDR": "10.0.0.0/24"},
        "status": {"conditions": conditions, "images": [{"names": ["x" * 100]}] * 50},
    }
    health = NodeHealth()
    health.node_changed(None, prune_node(node))
    assert health.lost() == {"n1"}
    assert len(json.dumps(prune_node(node))) < 300


def test_a_job_keeps_its_template() -> None:
    job = shell_job("job", "true", 3)
    job["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    assert ElasticJob.from_manifest(prune_job(job)) == ElasticJob.from_manifest(job)
    assert "managedFields" not in prune_job(job)["metadata"]
    assert "managedFields" in job["metadata"]


RUNNING = {"phase": "Running"}


def needing(gpus: object, **fields: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"limits": {GPU_RESOURCE: gpus}}, **fields}


def test_only_the_gpus_of_a_pod_that_is_no_worker_are_kept() -> None:
    pod = a_pod()
    pod["spec"]["containers"] = [needing("2"), {"name": "sidecar"}, needing(1)]
    pod["status"] = RUNNING
    pruned = prune_holder(pod)
    assert (pruned["gpus"], pruned["spec"]) == (3, {"nodeName": "n1"})
    assert len(json.dumps(pruned)) < 200
    assert prune_holder(a_pod())["gpus"] == 0
    requested = {"name": "c", "resources": {"requests": {GPU_RESOURCE: "4"}}}
    assert prune_holder({"spec": {"containers": [requested]}, "status": RUNNING})["gpus"] == 4


def test_a_pod_holds_nothing_before_it_is_placed_or_accepted() -> None:
    spec = {"nodeName": "n1", "containers": [needing(8)]}
    placed, unplaced = ({"type": "PodScheduled", "status": status} for status in ("True", "False"))
    for status, gpus in (
        ({}, 0),
        ({"phase": "Pending"}, 0),
        ({"phase": "Pending", "conditions": [unplaced]}, 0),
        ({"phase": "Pending", "conditions": [placed]}, 8),
        ({"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"}, 8),
        ({"phase": "Failed", "startTime": "2026-01-01T00:00:00Z", "conditions": [placed]}, 0),
    ):
        assert prune_holder({"spec": spec, "status": status})["gpus"] == gpus


def test_init_containers_hold_gpus_one_after_the_other_and_sidecars_for_good() -> None:
    first, sidecar, last = needing(1), needing(2, restartPolicy="Always"), needing(4)
    spec = {"initContainers": [first, sidecar, last], "containers": [needing(1)]}
    assert prune_holder({"spec": spec, "status": RUNNING})["gpus"] == 6  # the last of them next to the sidecar
    spec = {"initContainers": [first, sidecar], "containers": [needing(3)]}
    assert prune_holder({"spec": spec, "status": RUNNING})["gpus"] == 5


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), JSON))
@settings(max_examples=100)
def test_objects_of_any_content_are_taken(item: dict[str, Any]) -> None:
    assert Pod.from_manifest(prune_pod(item)).uid == Pod.from_manifest(item).uid
    prune_node(item)
    prune_job(item)
    assert prune_holder(item)["gpus"] == 0


def test_a_large_job_is_kept_small_and_comes_back_whole():
    env = [{"name": f"A{number}"} for number in range(10_000)]
    metadata = {"name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7", "annotations": {"x": "y"}}
    job = {
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {"replicaSpecs": {"Worker": {"template": {"spec": {"containers": [{"env": env}]}}}}},
        "status": {"phase": "Running"},
    }
    kept = prune_job({**job, "metadata": {**metadata, "managedFields": [{}]}})
    assert len(pickle.dumps(kept)) < len(json.dumps(job)) / 3
    assert (kept["status"], kept["metadata"]["uid"], kept["metadata"]["resourceVersion"]) == (job["status"], "u", "7")
    assert unfold_job(kept) == job
    later = prune_job({**job, "metadata": {**metadata, "resourceVersion": "8"}})
    assert unfold_job(later)["metadata"]["resourceVersion"] == "8"
    small = {**job, "spec": {}}
    assert unfold_job(prune_job(small)) == prune_job(small) == small


def test_what_is_kept_of_a_job_is_small_or_folded() -> None:
    """A user may create many jobs: the size of one counts as objects, not as JSON."""
    text = json.dumps({"metadata": {"name": "a", "resourceVersion": "7"}, "spec": {"x": [{}] * 3_500}})
    tracemalloc.start()
    kept = [prune_job(json.loads(text)) for _ in range(8)]
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(kept) < 64_000
    assert unfold_job(kept[0]) == json.loads(text)


def test_a_pod_with_megabytes_of_text_is_kept_small() -> None:
    pod, long = a_pod(), "x" * 200_000
    pod["metadata"]["annotations"] = dict.fromkeys(pod["metadata"]["annotations"], long)
    pod["metadata"]["ownerReferences"] += [{"kind": long, "name": long, "uid": long}] * 2
    pod["spec"]["schedulerName"] = long
    kept = prune_pod(pod)
    assert len(json.dumps(kept)) < 5_000
    assert (Pod.from_manifest(kept).owner_uid, Pod.from_manifest(kept).disruption_target) == ("j1", True)


def test_a_pod_with_thousands_of_everything_is_kept_small():
    many = [{"name": f"x{number}", "kind": "ConfigMap", "uid": f"u{number}"} for number in range(5_000)]
    owner = {"kind": "ElasticJob", "name": "digits", "uid": "job", "controller": True}
    pod = a_pod()
    pod["metadata"] |= {"ownerReferences": [*many, owner], "finalizers": [f"a.dev/{n}" for n in range(5_000)]}
    pod["spec"] |= {"schedulingGates": many, "containers": [*pod["spec"]["containers"], *many]}
    kept = prune_pod(pod)
    assert len(json.dumps(kept)) < 20_000
    assert (Pod.from_manifest(kept).owner_uid, Pod.from_manifest(kept).finalizer) == ("job", "a.dev/0")
