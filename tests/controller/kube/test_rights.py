"""What the controller asks of an API server is what its role allows, and nothing more is allowed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.errors import ConflictError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, Phase, TokenStatus
from elasticctl_controller.core.manifests import (
    build_budget,
    build_group_service,
    build_network_policy,
)
from elasticctl_controller.kube.event_recorder import kube_webhook_urls
from elasticctl_controller.kube.gangs import build_gang, gang_name
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.owned_objects import ObjectBuilders, OwnedObjects
from elasticctl_controller.kube.projects import KubeCapacity, KubeQuotas, Spending
from elasticctl_controller.loop.notifier import Destination
from elasticctl_controller.loop.webhooks import WebhookError
from tests.support.control import ControlApi
from tests.support.controller.bench import BUDGETS, CORE, JOBS, Bench
from tests.support.controller.rights import allowed, asked
from tests.support.waiting import wait_until

SEEN = (
    "elasticjobs",
    "elasticjobs/status",
    "elasticquotas",
    "elasticquotas/status",
    "events",
    "networkpolicies",
    "nodes",
    "podgroups",
    "pods",
    "secrets",
    "services",
)
"""Resources of which everything that is allowed is asked for here."""


def left_by_an_earlier_job(control: ControlApi, path: str, manifest: dict[str, Any]) -> None:
    owner = {**manifest["metadata"]["ownerReferences"][0], "uid": "the job before"}
    control.put(path, {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}})


def a_life(bench: Bench, api: LimitedApi) -> None:
    """A job with all that a job may have, in the way of things that an earlier one has left."""
    control, job = bench.control, bench.submit()
    left_by_an_earlier_job(control, f"{CORE}/services/job-workers", build_group_service(job))
    with pytest.raises(ConflictError):
        bench.create(job)
    pod = bench.create(job)
    bench.workload.list_pod_events(job, pod.uid)
    for seconds in (1.0, 2.0):
        written = JobStatus(phase=Phase.PENDING, last_reconcile_time=Timestamp(seconds))
        current = bench.job()
        if seconds > 1:
            stored = control.objects[f"{JOBS}/job"]
            control.put(f"{JOBS}/job", {**stored, "metadata": {**stored["metadata"], "labels": {"a": "b"}}})
        bench.workload.write_status(current, written)
    job = bench.job()
    bench.workload.record_event(job, "Normal", "Scaled", "to 3")
    bench.workload.record_event(job, "Normal", "Scaled", "to 3")
    wait_until(lambda: control.asked("PATCH", "/events/"))
    bench.workload.delete_pod(job, pod.name, pod.uid, force=True)
    left_by_an_earlier_job(control, f"{BUDGETS}/job-workers", build_budget(job))
    bench.workload.write_status(job, JobStatus(phase=Phase.PENDING, desired=3))
    gangs = "/apis/scheduling.k8s.io/v1beta1/namespaces/default/podgroups"
    ganging = OwnedObjects(api, ObjectBuilders(lambda of, pod: [build_gang(of)], build_budget))
    control.put(f"{gangs}/{gang_name(job)}", build_gang(job))  # by the leader before
    ganging.ensure(job, {})
    policies = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
    guarding = OwnedObjects(api, ObjectBuilders(lambda of, pod: [build_network_policy(of)], build_budget))
    left_by_an_earlier_job(control, f"{policies}/job-workers", build_network_policy(job))
    for _ in range(2):
        with suppress(ConflictError):
            guarding.ensure(job, {})
    larger = ElasticJob.from_manifest(control.objects[f"{JOBS}/job"] | {"spec": {"minReplicas": 2, "maxReplicas": 4}})
    ganging.ensure(larger, {})
    for number in (1, 2):
        bench.workload.deliver_token(replace(job, status=JobStatus(token=TokenStatus(number))))
    bench.workload.patch_job(bench.job(), {"spec": {"suspend": True}})
    bench.workload.delete_job(bench.job())


def test_the_role_is_what_is_asked_for(control: ControlApi) -> None:
    bench = Bench(control)
    api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
    quotas = KubeQuotas(api)
    floor = KubeCapacity(api, bench.workload, quotas)
    spending = Spending(api, quotas, bench.workload, lambda project: None)
    bench.begin()
    quotas.reflector.start()
    floor.subscribe(lambda: None)
    floor.reflector.start()
    wait_until(lambda: all(reflector.wait_synced(0) for reflector in (quotas.reflector, floor.reflector)))
    try:
        a_life(bench, api)
        quota = {"metadata": {"name": "default"}, "spec": {"allowed": {"usdPerDay": 5}}}
        control.put("/apis/elastic.pytorch.org/v1alpha1/elasticquotas/default", quota)
        wait_until(lambda: quotas.of("default") is not None)
        spending.count()
        with suppress(WebhookError):  # there is none, as the answer says
            kube_webhook_urls(api)(Destination("default", "secret:slack"))
    finally:
        floor.reflector.stop()
        quotas.reflector.stop()
        bench.workload.stop()
    taken = {right for request in list(control.requests) if (right := asked(request)) is not None}
    assert taken <= allowed(), sorted(taken - allowed())
    unused = {right for right in allowed() - taken if right[1] in SEEN and right[0] != "scheduling.x-k8s.io"}
    assert unused == set()
