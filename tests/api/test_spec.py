"""What the controller reads of an object, whatever the object is."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.spec import (
    MAX_SECONDS,
    MAX_WORKERS,
    CleanPodPolicy,
    ElasticJob,
    Pod,
    PodPhase,
    Policy,
    RestartPolicy,
    Sharing,
    WorkerRef,
    worker_labels,
    worker_name,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
SPEC_KEYS = [
    "minReplicas", "maxReplicas", "suspend", "cancel", "cleanPodPolicy", "ttlSecondsAfterFinished", "backoffLimit",
    "activeDeadlineSeconds", "removeWorkers", "policy", "replicaSpecs", "rdzvEndpoint", "sharing",
]  # fmt: skip


def manifest(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "a"}, "spec": spec}


def workers(count: Any) -> dict[str, Any]:
    return {"Worker": {"replicas": count}}


@given(
    st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), JSON),
    st.dictionaries(st.sampled_from(SPEC_KEYS), JSON),
)
@settings(deadline=None, max_examples=300)
def test_any_object_is_a_job_within_bounds(top: dict[str, Any], spec: dict[str, Any]) -> None:
    for data in (top, {**top, "spec": spec}):
        job = ElasticJob.from_manifest(data)
        assert 0 <= job.min <= job.desired <= job.max <= MAX_WORKERS


@pytest.mark.parametrize(
    ("spec", "bounds"),
    [
        ({}, (1, 1, 1)),
        ({"replicaSpecs": workers(3)}, (3, 3, 3)),
        ({"replicaSpecs": workers(3), "minReplicas": 1}, (1, 3, 3)),
        ({"replicaSpecs": workers(3), "minReplicas": 1, "maxReplicas": 5}, (1, 3, 5)),
        ({"replicaSpecs": workers(9), "minReplicas": 1, "maxReplicas": 5}, (1, 5, 5)),
        ({"replicaSpecs": workers(1), "minReplicas": 2, "maxReplicas": 5}, (2, 2, 5)),
        ({"replicaSpecs": workers(3), "minReplicas": 7, "maxReplicas": 5}, (5, 5, 5)),
        ({"replicaSpecs": workers("many")}, (1, 1, 1)),
        ({"replicaSpecs": workers(True)}, (1, 1, 1)),
    ],
)
def test_min_desired_max(spec: dict[str, Any], bounds: tuple[int, int, int]) -> None:
    job = ElasticJob.from_manifest(manifest(**spec))
    assert (job.min, job.desired, job.max) == bounds


def test_all_fields_are_read() -> None:
    job = ElasticJob.from_manifest(
        {
            "metadata": {
                "name": "a",
                "namespace": "team",
                "uid": "u",
                "resourceVersion": "7",
                "generation": 2,
                "creationTimestamp": "1970-01-01T00:00:05Z",
                "deletionTimestamp": "1970-01-01T00:00:06Z",
                "annotations": {"elastic.pytorch.org/scaled-by": "user"},
            },
            "spec": {
                "suspend": True,
                "cleanPodPolicy": "All",
                "ttlSecondsAfterFinished": 60,
                "activeDeadlineSeconds": 90,
                "backoffLimit": 0,
                "removeWorkers": [{"name": "a-worker-1", "uid": "w"}],
                "policy": {"backoffSeconds": 0.5},
                "replicaSpecs": {"Worker": {"restartPolicy": "ExitCode"}},
            },
        }
    )
    assert (job.key, job.uid, job.resource_version, job.generation, job.created_at) == ("team/a", "u", "7", 2, 5.0)
    assert (job.deleting, job.suspend, job.cancel, job.scaled_by) == (True, True, False, "user")
    assert (job.clean_pod_policy, job.restart_policy) == (CleanPodPolicy.ALL, RestartPolicy.EXIT_CODE)
    assert (job.ttl_s, job.deadline_s, job.backoff_limit, job.policy.backoff_seconds) == (60, 90, 0, 0.5)
    assert job.remove_workers == (WorkerRef("a-worker-1", "w"),)


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), JSON))
@settings(deadline=None, max_examples=200)
def test_any_object_is_a_pod(data: dict[str, Any]) -> None:
    assert isinstance(Pod.from_manifest(data).phase, PodPhase)


def test_a_pod_tells_how_its_worker_ended() -> None:
    pod = Pod.from_manifest(
        {
            "metadata": {
                "name": worker_name("a", 2),
                "uid": "p",
                "labels": worker_labels("a", 2),
                "ownerReferences": [{"uid": "x"}, {"uid": "u", "controller": True}],
            },
            "spec": {"nodeName": "n", "containers": [{"name": "side"}, {"name": "elasticjob-worker"}]},
            "status": {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "side", "state": {"terminated": {"exitCode": 0}}},
                    {"name": "elasticjob-worker", "state": {"terminated": {"exitCode": 7, "message": "oh"}}},
                ],
                "conditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
        }
    )
    assert (pod.name, pod.index, pod.owner_uid, pod.node) == ("a-worker-2", 2, "u", "n")
    assert (pod.ended, pod.exit_code, pod.message, pod.disruption_target) == (True, 7, "oh", True)


@pytest.mark.parametrize("seconds", [10**400, float("inf"), 1e300])
def test_times_without_end_are_cut_to_what_a_date_can_hold(seconds: Any) -> None:
    job = ElasticJob.from_manifest(manifest(activeDeadlineSeconds=seconds, policy={"backoffSeconds": seconds}))
    assert (job.deadline_s, job.policy.backoff_seconds) == (MAX_SECONDS, MAX_SECONDS)


@pytest.mark.parametrize("seconds", [-1, float("nan"), True, "5", None])
def test_times_that_are_none_take_the_default(seconds: Any) -> None:
    job = ElasticJob.from_manifest(manifest(activeDeadlineSeconds=seconds, policy={"backoffSeconds": seconds}))
    assert (job.deadline_s, job.policy) == (None, Policy())


@pytest.mark.parametrize(("containers", "exit_code"), [(["trainer", "aide"], 3), (["aide", "elasticjob-worker"], None)])
def test_the_exit_code_is_the_workers_own_whatever_the_order_of_statuses(
    containers: list[str], exit_code: int | None
) -> None:
    statuses = [
        {"name": "aide", "state": {"terminated": {"exitCode": 0}}},
        {"name": "trainer", "state": {"terminated": {"exitCode": 3}}},
    ]
    spec = {"containers": [{"name": name} for name in containers]}
    assert Pod.from_manifest({"spec": spec, "status": {"containerStatuses": statuses}}).exit_code == exit_code


@pytest.mark.parametrize(
    ("states", "has_stopped"),
    [
        ([{"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 1}}], True),
        ([{"terminated": {"exitCode": 0}}, {"running": {}}], False),
        ([{"terminated": {"exitCode": 0}}], False),
        ([], False),
    ],
)
def test_a_pod_has_stopped_once_each_of_its_containers_has_ended(states: list[Any], has_stopped: bool) -> None:
    spec = {"containers": [{"name": "side"}, {"name": "elasticjob-worker"}]}
    pod = Pod.from_manifest(
        {
            "spec": spec,
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {"name": item["name"], "state": state}
                    for item, state in zip(spec["containers"], states, strict=False)
                ],
            },
        }
    )
    assert (pod.has_stopped, pod.ended) == (has_stopped, False)


def test_a_job_of_automatic_size_would_have_all_that_it_may() -> None:
    spec = {"minReplicas": 2, "maxReplicas": 8, "replicaSpecs": workers(3)}
    assert ElasticJob.from_manifest(manifest(**spec)).desired == 3
    job = ElasticJob.from_manifest(manifest(**spec, sharing={"automatic": True, "priority": -5000, "podGroup": "?"}))
    assert (job.min, job.desired, job.max) == (2, 8, 8)
    assert job.sharing == Sharing(automatic=True, priority=-1000, pod_group=None)
    queued = ElasticJob.from_manifest({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}})
    assert queued.queue == "team"
