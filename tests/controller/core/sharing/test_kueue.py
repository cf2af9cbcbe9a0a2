"""Kueue: the Workload of a job, what its state means, where its pods run, and the status that is written to it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.spec import PRIORITY_CLASS_LABEL, QUEUE_LABEL, ElasticJob, Sharing
from elasticctl.api.status import JobStatus, Phase
from elasticctl_controller.core.sharing.kueue import (
    ASKED,
    SUSPENDED_BY_OWNER,
    KueueStep,
    KueueVerdict,
    PriorityClass,
    apply_placement,
    asks_for,
    asks_for_such_pods,
    build_finish,
    build_pods_ready,
    build_release,
    build_update,
    build_workload,
    judge_admission,
    priority_class,
    workload_name,
)
from tests.support.controller.kueue import API_VERSION, TEMPLATE, UID, admission, queued, stored
from tests.support.controller.samples import JOB_UID
from tests.support.jobs import shell_job

NOW = 1_767_229_200.9
IN_PLACE = ("QuotaReserved", "Admitted")
PREEMPTED = (*IN_PLACE, "Evicted")


def running(**fields: Any) -> ElasticJob:
    return queued(**{"suspend": False, "admitted": UID, "status": JobStatus(phase=Phase.RUNNING), **fields})


def left_aside(job: ElasticJob, *holds: str, by_owner: bool = False) -> Manifest:
    workload = stored(job, *holds)
    workload["spec"]["active"] = False
    if by_owner:
        workload["metadata"]["annotations"][SUSPENDED_BY_OWNER] = "true"
    return workload


def test_a_job_is_put_into_the_queue_once_it_is_suspended_and_has_no_workers() -> None:
    words = "is about to join Kueue's queue team"
    assert judge_admission(running(), None, 3) == KueueVerdict(held=words, step=KueueStep.STOP)
    assert judge_admission(queued(), None, 1) == KueueVerdict(held=words)
    assert judge_admission(queued(), None, 0) == KueueVerdict(held=words, step=KueueStep.CREATE)


def test_it_waits_and_reports_for_what() -> None:
    workload = stored(queued())
    assert judge_admission(queued(), workload, 0) == KueueVerdict(held="waits to be admitted to Kueue's queue team")
    assert judge_admission(queued(suspend=False), workload, 0).step is KueueStep.STOP
    workload["status"]["conditions"] = [{"type": "QuotaReserved", "status": "False", "message": "insufficient\n quota"}]
    assert (
        judge_admission(queued(), workload, 0).held == "waits to be admitted to Kueue's queue team: insufficient quota"
    )
    checks = [{"name": "budget", "state": "Pending"}, {"name": "nodes", "state": "Ready"}]
    checked = stored(queued(), "QuotaReserved", admissionChecks=checks)
    assert (
        judge_admission(queued(), checked, 0).held
        == "has quota in Kueue's queue team, and waits for its checks: budget"
    )
    ready = judge_admission(queued(), stored(queued(), "QuotaReserved"), 0)
    assert ready.held == "has quota in Kueue's queue team, and is about to be admitted"


def test_what_a_waiting_job_asks_for_follows_it() -> None:
    more = queued(desired=4)
    assert judge_admission(more, stored(queued()), 0).step is KueueStep.UPDATE
    assert (
        judge_admission(more, stored(queued(), "QuotaReserved"), 0).step is KueueStep.DELETE
    )  # what has quota cannot be changed
    assert judge_admission(more, stored(queued()), 1).step is None


def test_an_admitted_job_starts_and_runs_no_larger_than_it_was_admitted() -> None:
    workload = stored(queued(), *IN_PLACE, admission=admission(2, gpu="spot"))
    verdict = judge_admission(queued(), workload, 0)
    assert (verdict.workers, verdict.step) == (None, KueueStep.START)
    assert verdict.held == "is admitted to Kueue's queue team, and starts"
    assert judge_admission(running(), workload, 2) == KueueVerdict(workers=2, step=KueueStep.READY)
    assert judge_admission(running(status=JobStatus()), workload, 0) == KueueVerdict(workers=2)
    assert judge_admission(running(), stored(queued(), *IN_PLACE, "PodsReady"), 3) == KueueVerdict(workers=3)
    assert judge_admission(running(admitted="another"), workload, 2) == KueueVerdict(workers=2, step=KueueStep.START)


def test_growing_beyond_it_waits_until_it_is_queued_again_and_other_pods_do_not() -> None:
    workload = stored(queued(), *IN_PLACE, "PodsReady")
    assert judge_admission(running(desired=4), workload, 3) == KueueVerdict(workers=3)
    other = running(template={"spec": {"containers": [{"name": "c", "resources": {"limits": {"cpu": "9"}}}]}})
    assert judge_admission(other, workload, 3).step is KueueStep.STOP
    stopped = replace(other, suspend=True, admitted="")
    assert judge_admission(stopped, workload, 1).step is None
    assert judge_admission(stopped, workload, 0).step is KueueStep.DELETE


def test_an_evicted_job_gives_its_quota_back_when_its_workers_are_gone() -> None:
    workload = stored(queued(), *PREEMPTED)
    words = "gives back its quota in Kueue's queue team: Evicted it is"
    assert judge_admission(running(), workload, 3) == KueueVerdict(held=words, step=KueueStep.STOP)
    assert judge_admission(queued(), workload, 3) == KueueVerdict(held=words)
    assert judge_admission(queued(), workload, 0) == KueueVerdict(held=words, step=KueueStep.RELEASE)
    assert judge_admission(queued(), stored(queued(), "Evicted"), 0).step is None


def test_a_job_that_its_owner_suspends_leaves_the_queue_until_it_is_resumed() -> None:
    asleep = running(suspend=True)
    for pods in (3, 0):  # also where an administrator has it admitted again
        assert judge_admission(asleep, stored(queued(), *IN_PLACE), pods) == KueueVerdict(step=KueueStep.DEACTIVATE)
    aside = left_aside(queued(), *PREEMPTED, by_owner=True)
    assert judge_admission(asleep, aside, 3) == KueueVerdict()
    assert judge_admission(asleep, aside, 0) == KueueVerdict(step=KueueStep.RELEASE)
    assert judge_admission(asleep, left_aside(queued(), "Evicted", by_owner=True), 0) == KueueVerdict()
    assert judge_admission(asleep, None, 0) == KueueVerdict()
    resumed = judge_admission(running(), left_aside(queued(), "Evicted", by_owner=True), 0)
    assert (resumed.step, resumed.workers) == (KueueStep.ACTIVATE, None)


@pytest.mark.parametrize("mark", ["moving_to", "moved_to"])
def test_a_job_that_is_moved_away_is_not_started_here(mark: str) -> None:
    moved = queued(**{mark: "elsewhere s3://b/x"})
    assert judge_admission(moved, stored(queued(), *IN_PLACE), 0) == KueueVerdict(step=KueueStep.DEACTIVATE)
    assert judge_admission(moved, stored(queued()), 0) == KueueVerdict(step=KueueStep.DEACTIVATE)
    assert judge_admission(moved, None, 0) == KueueVerdict()
    stayed = judge_admission(queued(), left_aside(queued(), by_owner=True), 0)  # the move came to nothing
    assert stayed.step is KueueStep.ACTIVATE


def test_a_workload_that_others_have_deactivated_is_not_activated() -> None:
    aside = left_aside(queued(), *PREEMPTED)
    held = judge_admission(running(), aside, 3)
    assert held.step is KueueStep.STOP
    assert "was deactivated: Evicted it is" in held.held
    assert judge_admission(queued(), aside, 0).step is KueueStep.RELEASE
    assert judge_admission(queued(suspend=False), left_aside(queued(), "Evicted"), 0).step is KueueStep.STOP


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase.terminal])
def test_the_end_is_reported_once(phase: Phase) -> None:
    over = running(status=JobStatus(phase=phase))
    assert judge_admission(over, stored(queued(), *IN_PLACE), 1) == KueueVerdict(step=KueueStep.FINISH)
    assert judge_admission(over, stored(queued(), "Finished"), 1) == KueueVerdict()
    assert judge_admission(over, None, 0) == KueueVerdict()


def test_a_workload_that_is_closed_or_being_deleted_admits_no_worker() -> None:
    held = judge_admission(queued(), stored(queued(), "Finished"), 0)
    assert held == KueueVerdict(held="will not be admitted: Kueue has closed its Workload: Finished it is")
    going = stored(queued(), *IN_PLACE)
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert judge_admission(running(), going, 3).step is KueueStep.STOP
    assert judge_admission(queued(), going, 0).step is None


AUTOMATIC = Sharing(automatic=True)


def test_a_workload_asks_for_the_workers_and_is_the_jobs_own() -> None:
    workload = build_workload(queued(), API_VERSION, None)
    assert workload["metadata"]["name"] == workload_name(queued()) == f"elasticjob-digits-{JOB_UID[:8]}"
    assert [ref["uid"] for ref in workload["metadata"]["ownerReferences"]] == [JOB_UID]
    assert workload["metadata"]["labels"]["kueue.x-k8s.io/job-uid"] == JOB_UID
    assert workload["spec"]["queueName"] == "team"
    [pods] = workload["spec"]["podSets"]
    assert (pods["name"], pods["count"], "minCount" in pods) == ("workers", 3, False)


def test_the_workload_has_only_the_fields_that_decide_where_a_pod_fits() -> None:
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
def test_a_priority_is_written_in_the_fields_of_the_api_version(
    version: str, of_pods: bool, spec: dict[str, object]
) -> None:
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


SPOT = {"key": "spot", "operator": "Exists"}


def flavor(**spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": "f"}, "spec": spec}


def test_flavors_add_to_the_template_and_take_nothing_from_it() -> None:
    template = {"spec": {**TEMPLATE["spec"], "tolerations": [SPOT]}}
    flavors = [
        flavor(nodeLabels={"gpu": "t4", "zone": "b"}, tolerations=[SPOT, {"key": "gpu"}]),
        flavor(nodeLabels={"memory": "high"}),
        flavor(),
    ]
    spec = apply_placement(template, stored(queued()), flavors)["spec"]
    assert spec["nodeSelector"] == {"zone": "a", "gpu": "t4", "memory": "high"}
    assert spec["tolerations"] == [SPOT, {"key": "gpu"}]
    assert spec["containers"] == TEMPLATE["spec"]["containers"]
    assert template["spec"]["tolerations"] == [SPOT]


def test_admission_checks_have_a_say_too() -> None:
    update = {
        "name": "workers",
        "annotations": {"provisioned-by": "x"},
        "labels": {"team": "other", "l": "1"},
        "nodeSelector": {"pool": "new"},
    }
    checks = [{"name": "provisioning", "podSetUpdates": [{**update, "name": "others", "labels": {"no": "1"}}, update]}]
    found = apply_placement(TEMPLATE, stored(queued(), admissionChecks=checks), [])
    assert found["metadata"] == {"labels": {"l": "1", "team": "vision"}, "annotations": {"provisioned-by": "x"}}
    assert found["spec"]["nodeSelector"] == {"pool": "new", "zone": "a"}


def test_without_any_the_template_is_as_it_was() -> None:
    assert apply_placement(TEMPLATE, stored(queued()), []) == TEMPLATE
    assert apply_placement({}, {}, [flavor(nodeLabels={"a": "b"})]) == {"spec": {"nodeSelector": {"a": "b"}}}


STAMP = "2026-01-01T01:00:00.000000Z"


def conditions(patch: Manifest) -> dict[str, dict[str, Any]]:
    return {item["type"]: item for item in patch["status"]["conditions"]}


def evicted(reason: str, **fields: Any) -> Manifest:
    workload = stored(queued(), "QuotaReserved", "Admitted", "Evicted", "PodsReady", **fields)
    workload["status"]["conditions"][2]["reason"] = reason
    return workload


def test_quota_is_given_back_for_the_version_that_was_read() -> None:
    patch = build_release(evicted("Preempted", admission=admission(3)), NOW)
    assert patch["metadata"] == {"resourceVersion": "7"}
    assert patch["status"]["admission"] is None
    found = conditions(patch)
    assert {name: item["status"] for name, item in found.items()} == {
        "QuotaReserved": "False",
        "Admitted": "False",
        "Evicted": "True",
        "PodsReady": "False",
        "Requeued": "True",
    }
    assert found["QuotaReserved"]["reason"] == "Pending"
    assert found["QuotaReserved"]["message"] == found["Requeued"]["message"] == "Evicted it is"
    assert found["Requeued"]["reason"] == "Preempted"
    assert found["Admitted"]["lastTransitionTime"] == STAMP
    assert found["Evicted"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"  # it is Kueue's, and as it was
    assert all(item["reason"] for item in found.values())  # the server wants one


@pytest.mark.parametrize(
    ("reason", "status", "active", "again"),
    [
        ("Preempted", {}, True, "True"),
        ("SomethingNew", {}, True, "True"),
        ("AdmissionCheck", {}, True, "True"),
        ("AdmissionCheck", {"requeueState": {"requeueAt": "2026-01-01T02:00:00Z"}}, True, "False"),
        ("PodsReadyTimeout", {}, True, "False"),
        ("ClusterQueueStopped", {}, True, "False"),
        ("Deactivated", {}, False, "False"),
        ("Deactivated", {}, True, "True"),  # it has been activated in the meantime
    ],
)
def test_it_waits_again_immediately_unless_kueue_says_when(
    reason: str, status: dict[str, Any], active: bool, again: str
) -> None:
    workload = evicted(reason, **status)
    workload["spec"]["active"] = active
    assert conditions(build_release(workload, NOW))["Requeued"]["status"] == again


def test_a_workload_that_was_never_admitted_gets_no_condition_about_that() -> None:
    found = conditions(build_release(stored(queued(), "QuotaReserved"), NOW))
    assert {name: item["status"] for name, item in found.items()} == {"QuotaReserved": "False"}


@pytest.mark.parametrize(
    ("phase", "reason"), [(Phase.SUCCEEDED, "Succeeded"), (Phase.FAILED, "Failed"), (Phase.CANCELLED, "Failed")]
)
def test_the_end_is_reported_with_its_outcome(phase: Phase, reason: str) -> None:
    job = replace(queued(), status=JobStatus(phase=phase, message="so it was"))
    patch = build_finish(stored(job, "Admitted"), job, NOW)
    found = conditions(patch)["Finished"]
    assert (found["status"], found["reason"], found["message"]) == ("True", reason, "so it was")
    assert found["observedGeneration"] == 2
    assert conditions(patch)["Admitted"]["status"] == "True"
    assert "admission" not in patch["status"]


def test_a_workload_whose_workers_run_is_marked_ready() -> None:
    assert conditions(build_pods_ready(stored(queued()), NOW))["PodsReady"]["status"] == "True"
