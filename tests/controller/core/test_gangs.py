"""The gang of a job, for Kubernetes' own scheduler."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl_controller.core.gangs import build_gang, gang_name, group_of, is_gang, join_gang
from elasticctl_controller.core.manifests import build_pod
from elasticctl_controller.kube.pruning import prune_pod
from tests.support.controller.samples import JOB_UID, a_job


def pod_of(uid: str = JOB_UID, group: str = "", phase: str = "Running") -> Manifest:
    spec = {"schedulingGroup": {"podGroupName": group}} if group else {}
    return {"metadata": {"ownerReferences": [{"uid": uid}]}, "spec": spec, "status": {"phase": phase}}


def test_the_minimum_is_placed_together() -> None:
    job = a_job(min=3)
    gang, pod = build_gang(job), join_gang(job, build_pod(job, 0, "http://x"))
    assert (gang["apiVersion"], gang["kind"]) == ("scheduling.k8s.io/v1beta1", "PodGroup")
    assert gang["metadata"]["name"] == gang_name(job) == f"{job.name}-{JOB_UID[:8]}"
    assert gang["metadata"]["ownerReferences"][0]["uid"] == JOB_UID
    assert gang["spec"] == {"schedulingPolicy": {"gang": {"minCount": 3}}}
    assert group_of(pod) == group_of(prune_pod(pod)) == gang_name(job)
    assert group_of(build_pod(job, 0, "http://x")) == ""
    assert build_gang(a_job(min=0))["spec"]["schedulingPolicy"]["gang"]["minCount"] == 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"min": 1}, False),  # one is enough
        ({"template": {"spec": {"schedulerName": "theirs"}}}, False),
        ({"template": {"spec": {"schedulerName": "default-scheduler"}}}, True),
        ({"template": {"spec": {"schedulingGroup": {"podGroupName": "mine"}}}}, False),
    ],
)
def test_a_job_of_kubernetes_own_scheduler_is_a_gang(fields: dict[str, Any], expected: bool) -> None:
    assert is_gang(a_job(**{"min": 2, **fields}), []) is expected


def test_a_pod_does_not_join_a_gang_that_the_others_are_not_of() -> None:
    """It would be the only one, and wait for a minimum that never comes: its job is older than the gangs."""
    job = a_job(min=2)
    assert not is_gang(job, [pod_of(), pod_of(group="g")])
    assert is_gang(job, [pod_of(group="g"), pod_of(phase="Failed"), pod_of(uid="another")])
