"""Kubernetes' own gang scheduling, against the fake API server."""

from __future__ import annotations

from functools import partial

from elasticctl_controller.core.manifests import build_budget, build_pod
from elasticctl_controller.kube.gangs import RECHECK_S, Gangs
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.manager import build_companions, build_named_group
from elasticctl_controller.kube.pods import KubePods, ObjectBuilders, OwnedObjects
from tests.support.control import ControlApi
from tests.support.controller.samples import a_job

DISCOVERY = "/apis/scheduling.k8s.io/v1beta1"
GROUPS = f"{DISCOVERY}/namespaces/default/podgroups"
PODS = "/api/v1/namespaces/default/pods"


def test_whether_there_are_gangs_is_asked_once_and_again_after_a_while(control: ControlApi) -> None:
    now = [0.0]
    gangs = Gangs(LimitedApi(control.connection(), TokenBucket(10_000, 10_000)), lambda: now[0])
    job = a_job(min=2)
    pod = build_pod(job, 0, "http://x")
    for _ in range(3):
        assert gangs.finish_pod(job, pod, []) == pod
    assert control.asked("GET", DISCOVERY) == 1
    control.served.add(DISCOVERY)
    now[0] = RECHECK_S
    assert gangs.finish_pod(job, pod, []) == pod, "the API group is there, and PodGroups are not"
    control.resources[DISCOVERY] = [{"name": "podgroups"}]
    now[0] = 2 * RECHECK_S
    for _ in range(2):
        assert "schedulingGroup" in gangs.finish_pod(job, pod, [])["spec"]
    assert control.asked("GET", DISCOVERY) == 3


def test_the_group_is_there_before_its_pods_and_follows_the_minimum(control: ControlApi) -> None:
    control.served.add(DISCOVERY)
    control.resources[DISCOVERY] = [{"name": "podgroups"}]
    api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
    owned = OwnedObjects(api, ObjectBuilders(partial(build_companions, b"k" * 32), build_budget, build_named_group))
    gangs = Gangs(api)
    pods = KubePods(api, owned, gangs.finish_pod, lambda seconds: None)
    job = a_job(min=3, namespace="default")
    pods.create_pod(job, build_pod(job, 0, "http://x"))
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
