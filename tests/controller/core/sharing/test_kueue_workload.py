"""The Workload that asks for a job's workers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import PRIORITY_CLASS_LABEL, QUEUE_LABEL, ElasticJob, Sharing
from elasticctl_controller.core.sharing.kueue import (
    ASKED,
    PriorityClass,
    asks_for,
    asks_for_such_pods,
    build_update,
    build_workload,
    priority_class,
    workload_name,
)
from tests.support.controller.kueue import API_VERSION, TEMPLATE, queued, stored
from tests.support.controller.samples import JOB_UID
from tests.support.jobs import shell_job

AUTOMATIC = Sharing(automatic=True)


def test_a_workload_asks_for_the_workers_and_is_the_jobs_own() -> None:
    workload = build_workload(queued(), API_VERSION, None)
    assert workload["metadata"]["name"] == workload_name(queued()) == f"elasticjob-digits-{JOB_UID[:8]}"
    assert [ref["uid"] for ref in workload["metadata"]["ownerReferences"]] == [JOB_UID]
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == JOB_UID
    assert workload["spec"]["queueName"] == "team"
    [pods] = workload["spec"]["podSets"]
    assert (pods["name"], pods["count"], "minCount" in pods) == ("workers", 3, False)


def test_of_a_pod_it_says_where_it_fits_and_no_more() -> None:
    [pods] = build_workload(queued(), API_VERSION, None)["spec"]["podSets"]
    container = {"name": "elasticjob-worker", "image": "trainer", "resources": {"limits": {GPU_RESOURCE: 2}}}
    assert pods["template"] == {
        "spec": {"nodeSelector": {"zone": "a"}, "containers": [container], "restartPolicy": "Never"}
    }
    assert "hunter2" not in json.dumps(build_workload(queued(), API_VERSION, None))


def test_a_job_of_automatic_size_asks_for_its_minimum_and_another_for_all() -> None:
    def count(**fields: Any) -> object:
        return build_workload(queued(**fields), API_VERSION, None)["spec"]["podSets"][0]["count"]

    assert count(sharing=AUTOMATIC, desired=4, min=2) == 2
    assert count(sharing=AUTOMATIC, desired=4, min=0) == 1  # Kueue takes no less
    assert count(sharing=AUTOMATIC, desired=2, min=2) == 2
    assert count(desired=4, min=2) == 4


@pytest.mark.parametrize(
    ("version", "of_pods", "spec"),
    [
        (
            "kueue.x-k8s.io/v1beta1",
            False,
            {"priorityClassName": "high", "priorityClassSource": "kueue.x-k8s.io/workloadpriorityclass"},
        ),
        (
            "kueue.x-k8s.io/v1beta1",
            True,
            {"priorityClassName": "high", "priorityClassSource": "scheduling.k8s.io/priorityclass"},
        ),
        (
            "kueue.x-k8s.io/v1beta2",
            False,
            {"priorityClassRef": {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass", "name": "high"}},
        ),
        (
            "kueue.x-k8s.io/v1beta2",
            True,
            {"priorityClassRef": {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "high"}},
        ),
    ],
)
def test_a_priority_is_said_in_the_words_of_the_version(version: str, of_pods: bool, spec: dict[str, object]) -> None:
    template = {"spec": {**TEMPLATE["spec"], "priorityClassName": "high" if of_pods else "pods'"}}
    job = queued(template=template, priority_class="" if of_pods else "high")
    assert priority_class(job) == PriorityClass("high", of_pods)
    asked = build_workload(job, version, 100)["spec"]
    assert {name: value for name, value in asked.items() if name.startswith("prio")} == {**spec, "priority": 100}
    assert priority_class(queued()) is None


def test_it_asks_until_the_job_wants_something_else() -> None:
    job = queued()
    workload = stored(job)
    workload["spec"]["podSets"][0]["template"]["spec"]["schedulerName"] = "default-scheduler"  # the server's defaults
    assert asks_for(job, workload)
    assert asks_for(replace(job, suspend=False, admitted="x", scaled_by="jo"), workload)
    for other in (
        replace(job, desired=2),
        replace(job, queue="other"),
        replace(job, priority_class="high"),
    ):
        assert not asks_for(other, workload)
        assert asks_for_such_pods(other, workload)
    more = json.loads(json.dumps(TEMPLATE))
    more["spec"]["containers"][0]["resources"]["limits"][GPU_RESOURCE] = 4
    assert not asks_for_such_pods(replace(job, template=more), workload)
    more["spec"]["containers"][0]["resources"]["limits"][GPU_RESOURCE] = 2
    more["spec"]["containers"][0]["env"] = []  # a move changes that, and needs no other place
    assert asks_for(replace(job, template=more), workload)
    assert not asks_for(replace(job, sharing=AUTOMATIC), workload)
    assert not asks_for(job, {"metadata": {}})
    assert not asks_for_such_pods(job, {"metadata": {}})


def test_a_revision_takes_back_what_is_no_longer_asked_for() -> None:
    patch = build_update(build_workload(queued(desired=2), API_VERSION, None))
    assert patch["spec"]["podSets"][0]["count"] == 2
    assert patch["spec"]["priorityClassName"] is None
    assert patch["spec"]["priority"] is None
    assert set(patch["metadata"]["annotations"]) == {ASKED}
    ranked = build_workload(queued(priority_class="high"), API_VERSION, 5)
    assert build_update(ranked)["spec"]["priority"] == 5


def test_a_job_of_any_content_is_asked_for() -> None:
    manifest = shell_job("job", "true")
    manifest["metadata"]["labels"] = {QUEUE_LABEL: "team", PRIORITY_CLASS_LABEL: "high"}
    for spec in (None, [], {"containers": None}, {"containers": ["x", {"name": 1}], "nodeSelector": object}):
        manifest["spec"]["replicaSpecs"]["Worker"]["template"] = {"spec": spec}
        job = ElasticJob.from_manifest(manifest)
        assert (job.queue, job.priority_class) == ("team", "high")
        assert asks_for(job, build_workload(job, API_VERSION, None))
