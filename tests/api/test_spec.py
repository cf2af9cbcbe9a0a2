"""What the controller reads of any object."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.api.spec import (
    MAX_SECONDS,
    MAX_WORKERS,
    CleanPodPolicy,
    ElasticJob,
    Policy,
    RestartPolicy,
    Sharing,
    WorkerRef,
)
from tests.support.any_json import JSON

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


@pytest.mark.parametrize("seconds", [10**400, float("inf"), 1e300])
def test_times_without_end_are_cut_to_what_a_date_can_hold(seconds: Any) -> None:
    job = ElasticJob.from_manifest(manifest(activeDeadlineSeconds=seconds, policy={"backoffSeconds": seconds}))
    assert (job.deadline_s, job.policy.backoff_seconds) == (MAX_SECONDS, MAX_SECONDS)


@pytest.mark.parametrize("seconds", [-1, float("nan"), True, "5", None])
def test_times_that_are_none_take_the_default(seconds: Any) -> None:
    job = ElasticJob.from_manifest(manifest(activeDeadlineSeconds=seconds, policy={"backoffSeconds": seconds}))
    assert (job.deadline_s, job.policy) == (None, Policy())


def test_a_job_of_automatic_size_would_have_all_that_it_may() -> None:
    spec = {"minReplicas": 2, "maxReplicas": 8, "replicaSpecs": workers(3)}
    assert ElasticJob.from_manifest(manifest(**spec)).desired == 3
    job = ElasticJob.from_manifest(manifest(**spec, sharing={"automatic": True, "priority": -5000}))
    assert (job.min, job.desired, job.max) == (2, 8, 8)
    assert job.sharing == Sharing(automatic=True, priority=-1000)
    queued = ElasticJob.from_manifest({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "team"}}})
    assert queued.queue == "team"
