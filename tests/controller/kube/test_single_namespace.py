"""The controller for one namespace, without any feature: it asks for what its Role allows, and says what it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.spec import ANNOTATION_NOTIFY, QUEUE_LABEL
from elasticctl.kubeapi.features import format_features
from elasticctl_controller.kube.flags import parse_flags
from tests.support.control import ControlApi
from tests.support.controller.replica import Replica
from tests.support.controller.rights import allowed, asked
from tests.support.fakeapi import Request
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

JOBS = "/apis/elastic.pytorch.org/v1alpha1/namespaces/{}/elasticjobs"
GANGS = "/apis/scheduling.k8s.io/v1beta1"
NEEDED = ("--rendezvous-url=http://x", "--token-key-file=key")


@pytest.fixture
def replica(control: ControlApi, tmp_path: Path) -> Iterator[Replica]:
    control.served = {GANGS, "/apis/kueue.x-k8s.io/v1beta1"}
    control.resources = {GANGS: [{"name": "podgroups"}]}
    with Replica(control, tmp_path, "one", "--features=", "--watch-namespace=default") as found:
        wait_until(found.ready)
        wait_until(found.leads)
        yield found


def is_own(request: Request) -> bool:
    """Is it about the namespace of the jobs, about that of the controller, or what everyone may ask?"""
    return asked(request) is None or any(f"/namespaces/{name}/" in request.path for name in ("default", "system"))


def put(control: ControlApi, name: str, namespace: str = "default", **metadata: Any) -> None:
    job = shell_job(name, "true", namespace=namespace)
    job["metadata"] |= metadata
    control.put(f"{JOBS.format(namespace)}/{name}", job)


def status(control: ControlApi, name: str) -> dict[str, Any]:
    found: dict[str, Any] = control.objects[f"{JOBS.format('default')}/{name}"].get("status", {})
    return found


def test_it_asks_for_no_more_than_its_role_allows(control: ControlApi, replica: Replica) -> None:
    put(control, "elsewhere", "other")
    put(control, "plain")
    put(control, "queued", labels={QUEUE_LABEL: "team"})
    put(control, "noticed", annotations={ANNOTATION_NOTIFY: "slack"})
    wait_until(lambda: {"plain-worker-0", "queued-worker-0", "noticed-worker-0"} <= set(control.names("/pods/")))
    finished = control.objects["/api/v1/namespaces/default/pods/plain-worker-0"]
    assert "schedulingGroup" not in finished["spec"]
    requests = [request for request in list(control.requests) if "/namespaces/system/" not in request.path]
    assert [request.path for request in requests if not is_own(request)] == []
    assert {right for request in requests if (right := asked(request)) is not None} <= allowed(())
    assert control.names("/namespaces/other/") == ["elsewhere"]
    assert replica.end() == 0


def test_a_feature_that_was_left_out_is_named(control: ControlApi, replica: Replica) -> None:
    job = shell_job("queued", "true", cancel=False)
    job["metadata"] |= {"labels": {QUEUE_LABEL: "team"}}
    job["spec"]["suspend"] = True
    control.put(f"{JOBS.format('default')}/queued", job)
    told = shell_job("told", "true", cancel=True)
    told["metadata"] |= {"annotations": {ANNOTATION_NOTIFY: "slack"}}
    control.put(f"{JOBS.format('default')}/told", told)
    wait_until(lambda: "have it installed with --feature kueue" in str(status(control, "queued")))
    [said] = wait_until(lambda: control.told("NotifyFailed"))
    assert "installed without notifications" in said
    assert replica.end() == 0


def test_a_pod_on_a_node_that_is_not_watched_is_not_lost(control: ControlApi, replica: Replica) -> None:
    put(control, "plain")
    path = "/api/v1/namespaces/default/pods/plain-worker-0"
    wait_until(lambda: path in control.objects)
    pod = control.objects[path]
    control.put(path, {**pod, "metadata": dict(pod["metadata"]), "spec": {**pod["spec"], "nodeName": "unknown"}})
    put(control, "later")
    wait_until(lambda: "later-worker-0" in control.names("/pods/"))
    assert "lost nodes" not in replica.log.read_text()
    assert control.objects[path]["spec"]["nodeName"] == "unknown"


def test_the_flags_of_features() -> None:
    assert format_features(parse_flags([*NEEDED]).features) == "nodes,limits,kueue,gangs,notifications"
    assert parse_flags([*NEEDED, "--features="]).features == frozenset()
    assert parse_flags([*NEEDED, "--sharing", "--capacity", "gpu=2"]).capacity == {"gpu": 2}
    assert format_features(parse_flags([*NEEDED, "--features=kueue,nodes"]).features) == "nodes,kueue"
    for wrong in (["--features=cue"], ["--sharing", "--watch-namespace=ml"]):
        with pytest.raises(SystemExit):
            parse_flags([*NEEDED, *wrong])
