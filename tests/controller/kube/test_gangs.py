"""Kubernetes' own gang scheduling, against the fake API server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import ElasticJob
from elasticctl_controller.core.manifests import build_budget, build_pod
from elasticctl_controller.kube.gangs import RECHECK_S, Gangs, build_gang, gang_name, group_of, is_gang, join_gang
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.owned_objects import ObjectBuilders, OwnedObjects, build_companions, build_named_group
from elasticctl_controller.kube.pods import KubePods
from elasticctl_controller.kube.pruning import prune_pod
from tests.support.control import ControlApi
from tests.support.controller.samples import JOB_UID, a_job

DISCOVERY = "/apis/scheduling.k8s.io/v1beta1"
GROUPS = f"{DISCOVERY}/namespaces/default/podgroups"
PODS = "/api/v1/namespaces/default/pods"


def test_whether_there_are_gangs_is_asked_once_and_again_after_a_while(control: ControlApi) -> None:
    now = [0.0]
    gangs = Gangs(LimitedApi(control.connection(), TokenBucket(10_000, 10_000)), lambda: now[0])
    job = a_job(min=2)
    for _ in range(3):
        assert not gangs.takes(job, [])
    assert control.asked("GET", DISCOVERY) == 1
    control.served.add(DISCOVERY)
    now[0] = RECHECK_S
    assert not gangs.takes(job, []), "the API group is there, and PodGroups are not"
    control.resources[DISCOVERY] = [{"name": "podgroups"}]
    now[0] = 2 * RECHECK_S
    for _ in range(2):
        assert gangs.takes(job, [])
    assert control.asked("GET", DISCOVERY) == 3


def test_the_group_is_there_before_its_pods_and_follows_the_minimum(control: ControlApi) -> None:
    control.served.add(DISCOVERY)
    control.resources[DISCOVERY] = [{"name": "podgroups"}]
    api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
    owned = OwnedObjects(api, ObjectBuilders(partial(build_companions, b"k" * 32), build_budget, build_named_group))
    gangs = Gangs(api)
    asked: list[int] = []

    def finisher(job: ElasticJob, pods: list[Manifest]) -> Callable[[Manifest], Manifest]:
        asked.append(len(pods))
        return partial(join_gang, job) if gangs.takes(job, pods) else lambda pod: pod

    pods = KubePods(api, owned, finisher, lambda seconds: None)
    job = a_job(min=3, namespace="default")
    create_pod = pods.pod_creator(job)
    for index in range(3):
        create_pod(build_pod(job, index, "http://x"))
    assert asked == [0], "whether pods join the gang is decided once for all that a pass creates"
    [group] = control.names(GROUPS)
    posts = [request.path for request in control.requests if request.method == "POST"]
    assert posts.index(GROUPS) < posts.index(PODS)
    assert control.objects[f"{PODS}/{job.name}-worker-0"]["spec"]["schedulingGroup"] == {"podGroupName": group}

    smaller = a_job(min=2, namespace="default")
    owned.ensure_group(smaller, pods.list_pods(smaller))
    assert control.objects[f"{GROUPS}/{group}"]["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
    control.fail("PATCH", "podgroups", 500)
    owned.ensure_group(job, pods.list_pods(job))  # is tried again with the next status
    owned.ensure_group(a_job(min=2, uid="another"), [])
    assert control.names(GROUPS) == [group]


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
