"""The controller's hands on a cluster, over real HTTP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.errors import ClusterError, ConflictError, ForbiddenError
from elasticctl.api.spec import GROUP, LABEL_GROUP, LABEL_JOB, ElasticJob
from elasticctl.api.status import JobStatus, Phase, TokenStatus
from elasticctl_controller.core.manifests import build_budget, build_group_service, build_pod
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.owned_objects import ObjectBuilders, OwnedObjects, build_companions
from elasticctl_controller.loop.apply_actions import NameTakenError
from tests.support.control import ControlApi
from tests.support.controller.bench import BUDGETS, CORE, JOBS, Bench
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until


@pytest.fixture
def bench(control: ControlApi) -> Iterator[Bench]:
    bench = Bench(control)
    bench.begin()
    yield bench
    bench.workload.stop()


def test_a_pod_is_seen_as_soon_as_it_is_made(bench: Bench) -> None:
    bench.control.silent = True  # no watch will say so
    job = bench.submit()
    pod = bench.create(job)
    assert (pod.name, pod.owner_uid) == ("job-worker-0", job.uid)
    with pytest.raises(ConflictError):
        bench.create(job)


def test_the_objects_that_a_pod_needs_are_created_before_it_and_once(bench: Bench) -> None:
    job = bench.submit()
    bench.create(job, 0)
    bench.create(job, 1)
    posted = [request.path.rpartition("/")[2] for request in bench.control.requests if request.method == "POST"]
    assert posted == ["services", "secrets", "pods", "pods"]
    secret = bench.control.objects[f"{CORE}/secrets/job-rendezvous-{job.uid[:8]}"]
    assert secret["stringData"] == {"token": "secret-token"}
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job.uid


def test_the_next_token_replaces_the_previous_one_without_reading_it(bench: Bench) -> None:
    job = replace(bench.submit(), status=JobStatus(token=TokenStatus(1)))
    path = f"{CORE}/secrets/job-rendezvous-{job.uid[:8]}"
    found = []
    for number in (1, 2):
        bench.workload.deliver_token(replace(job, status=JobStatus(token=TokenStatus(number))))
        found.append(bench.control.objects[path]["stringData"])
    assert found[0]["token"] != found[1]["token"]
    assert found[0]["peers"] == found[1]["peers"]
    asked = [request.method for request in bench.control.requests if "/secrets" in request.path]
    assert asked == ["POST", "POST", "PUT"]


def test_a_worker_of_an_older_controllers_job_starts_with_the_token_that_is_there(bench: Bench) -> None:
    job = bench.submit()
    theirs = {"metadata": {"name": f"job-rendezvous-{job.uid[:8]}", "namespace": "default"}, "stringData": {}}
    bench.control.put(f"{CORE}/secrets/job-rendezvous-{job.uid[:8]}", theirs)
    bench.create(job)
    assert bench.control.objects[f"{CORE}/secrets/job-rendezvous-{job.uid[:8]}"]["stringData"] == {}


@pytest.mark.parametrize("number", [1, 2])
def test_a_secret_that_may_not_be_changed_costs_no_worker_that_has_a_good_token(
    bench: Bench, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """The role is an older one's. The former token is good until the next can be delivered."""
    job = replace(bench.submit(), status=JobStatus(token=TokenStatus(number)))
    secret = f"{CORE}/secrets/job-rendezvous-{job.uid[:8]}"
    bench.control.put(secret, {"metadata": {"name": f"job-rendezvous-{job.uid[:8]}", "namespace": "default"}})
    bench.control.fail("PUT", "/secrets", 403)
    if number == 1:
        with pytest.raises(ForbiddenError):
            bench.create(job)
    else:
        bench.create(job)
        assert "its previous token stays valid" in caplog.text


def test_a_service_that_an_earlier_job_left_gives_way(bench: Bench) -> None:
    job = bench.submit()
    old = build_group_service(job)
    old["metadata"]["ownerReferences"][0]["uid"] = "the job before"
    bench.control.put(f"{CORE}/services/job-workers", old)
    with pytest.raises(ConflictError, match="left by an earlier job"):
        bench.create(job)
    bench.create(job)
    stored = bench.control.objects[f"{CORE}/services/job-workers"]
    assert stored["metadata"]["ownerReferences"][0]["uid"] == job.uid


def test_a_foreign_service_is_left_alone(bench: Bench) -> None:
    job = bench.submit()
    bench.control.put(f"{CORE}/services/job-workers", {"metadata": {"name": "job-workers", "namespace": "default"}})
    with pytest.raises(ClusterError, match="does not belong to this job"):
        bench.create(job)
    assert bench.pods(job) == []


def test_objects_of_an_orphaned_earlier_job_are_deleted(bench: Bench) -> None:
    """`kubectl delete --cascade=orphan` takes the owner references off."""
    job = bench.submit()
    left = {f"{CORE}/services/job-workers": build_group_service(job), f"{BUDGETS}/job-workers": build_budget(job)}
    for path, old in left.items():
        del old["metadata"]["ownerReferences"]
        bench.control.put(path, old)
    with pytest.raises(ConflictError, match="left by an earlier job"):
        bench.create(job)
    bench.create(job)
    for _ in range(2):
        bench.workload.write_status(bench.job(), JobStatus(phase=Phase.PENDING, desired=3))
    for path in left:
        assert bench.control.objects[path]["metadata"]["ownerReferences"][0]["uid"] == job.uid


def test_the_events_about_a_pod_are_read_where_they_may_be(bench: Bench) -> None:
    job = bench.submit()
    for number in (1, 2):
        event = {"metadata": {"name": f"e{number}", "namespace": "default"}, "involvedObject": {"uid": f"u{number}"}}
        bench.control.put(f"{CORE}/events/e{number}", event)
    assert [item["metadata"]["name"] for item in bench.workload.list_pod_events(job, "u2")] == ["e2"]
    assert int(bench.control.requests[-1].params["limit"]) > 10
    bench.control.fail("GET", "/events", 403)
    assert bench.workload.list_pod_events(job, "u2") == []


@pytest.mark.parametrize("labels", [{}, {LABEL_GROUP: GROUP}, {LABEL_GROUP: GROUP, LABEL_JOB: "another"}])
def test_a_name_of_a_pod_that_no_watch_shows_is_reported_as_taken(bench: Bench, labels: dict[str, str]) -> None:
    job = bench.submit()
    metadata = {"name": "job-worker-0", "namespace": "default", "labels": labels}
    bench.control.put(f"{CORE}/pods/job-worker-0", {"metadata": metadata})
    with pytest.raises(NameTakenError, match="job-worker-0"):
        bench.create(job)


def test_a_worker_starts_behind_its_network_policy(control: ControlApi, caplog: pytest.LogCaptureFixture) -> None:
    """None before it is there; a controller that may not create one logs that, and continues."""
    api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
    owned = OwnedObjects(api, ObjectBuilders(partial(build_companions, b"k" * 32), build_budget))
    job = ElasticJob.from_manifest(control.put(f"{JOBS}/job", shell_job("job", "true", 3)))
    control.fail("POST", "networkpolicies", 500)
    with pytest.raises(ClusterError):
        owned.ensure(job, {})
    control.fail("POST", "networkpolicies", 403)
    owned.ensure(job, {})
    assert "no NetworkPolicy, so any pod may reach" in caplog.text
    assert control.names("/services/") == ["job-workers"]
    owned.ensure(job, {})
    assert control.names("/networkpolicies/") == ["job-workers"]


def test_the_status_is_written_against_the_version_that_was_read(bench: Bench) -> None:
    bench.control.silent = True
    job = bench.submit()
    bench.workload.write_status(job, JobStatus(phase=Phase.RUNNING, message=""))
    assert bench.job().status.phase is Phase.RUNNING  # seen immediately, so that the next pass continues from it
    assert "message" not in bench.control.objects[f"{JOBS}/job"]["status"]
    with pytest.raises(ConflictError):
        bench.workload.write_status(job, JobStatus(phase=Phase.FAILED))
    bench.control.remove(f"{JOBS}/job")
    with pytest.raises(ConflictError, match="gone"):
        bench.workload.write_status(bench.job(), JobStatus())


def change(bench: Bench, metadata: dict[str, Any], **fields: Any) -> None:
    stored = bench.control.objects[f"{JOBS}/job"]
    bench.control.put(f"{JOBS}/job", {**stored, "metadata": {**stored["metadata"], **metadata}, **fields})


def test_frequent_changes_of_labels_do_not_keep_the_status_from_being_written(bench: Bench) -> None:
    bench.control.silent = True
    bench.submit()
    bench.workload.write_status(bench.job(), JobStatus(phase=Phase.PENDING, last_reconcile_time=Timestamp(1.0)))
    decided_from = bench.job()
    change(bench, {"labels": {"a": "b"}})
    bench.workload.write_status(decided_from, JobStatus(phase=Phase.RUNNING, last_reconcile_time=Timestamp(2.0)))
    stored = bench.control.objects[f"{JOBS}/job"]
    assert (stored["status"]["phase"], stored["metadata"]["labels"]) == ("Running", {"a": "b"})
    assert bench.job().status.phase is Phase.RUNNING
    for other in ({"metadata": {"generation": 99}}, {"status": {"lastReconcileTime": "1970-01-01T00:00:09Z"}}):
        decided_from = bench.job()
        change(bench, **{"metadata": {}, **other})
        with pytest.raises(ConflictError):
            bench.workload.write_status(decided_from, JobStatus(phase=Phase.FAILED))
    bench.control.fail("PATCH", "/status", 403)
    with pytest.raises(ConflictError):
        bench.workload.write_status(decided_from, JobStatus(phase=Phase.FAILED))


def test_a_budget_follows_the_jobs_size(bench: Bench) -> None:
    job = bench.submit(maxReplicas=4)
    bench.workload.write_status(job, JobStatus(phase=Phase.RUNNING, desired=3))
    assert bench.control.objects[f"{BUDGETS}/job-workers"]["spec"]["minAvailable"] == 1
    stored = bench.control.objects[f"{JOBS}/job"]
    spec = {**stored["spec"], "minReplicas": 0}
    bench.control.put(f"{JOBS}/job", {**stored, "metadata": dict(stored["metadata"]), "spec": spec})
    wait_until(lambda: bench.job().min == 0)
    bench.workload.write_status(bench.job(), JobStatus(phase=Phase.PENDING, desired=3))
    assert bench.control.objects[f"{BUDGETS}/job-workers"]["spec"]["minAvailable"] == 0


def test_our_budget_is_withdrawn_if_another_budget_covers_the_pods(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticctl_controller.kube.owned_objects.BUDGETS_S", 0.0)
    job = bench.submit()
    bench.workload.write_status(job, JobStatus(phase=Phase.RUNNING, desired=3))
    theirs = {"metadata": {"name": "team", "namespace": "default"}, "spec": {"selector": {}}}
    bench.control.put(f"{BUDGETS}/team", theirs)
    bench.workload.write_status(bench.job(), JobStatus(phase=Phase.PENDING, desired=3))
    assert bench.control.names(BUDGETS) == ["team"]
    bench.control.remove(f"{BUDGETS}/team")
    bench.workload.write_status(bench.job(), JobStatus(phase=Phase.RUNNING, desired=3))
    assert bench.control.names(BUDGETS) == ["job-workers"]


def test_megabytes_of_foreign_events_or_budgets_are_not_read(bench: Bench) -> None:
    """A user who may create events or budgets could fill the controller's memory with them."""
    job, long = bench.submit(), {"x": "x" * 500_000}
    for number in range(10):
        metadata = {"name": f"b{number}", "namespace": "default", "annotations": long}
        event = {"metadata": metadata, "involvedObject": {"uid": "u1"}}
        bench.control.put(f"{CORE}/events/b{number}", event)
        bench.control.put(f"{BUDGETS}/b{number}", {"metadata": dict(metadata), "spec": {"selector": {}}})
    assert bench.workload.list_pod_events(job, "u1") == []
    for _ in range(2):
        bench.workload.write_status(bench.job(), JobStatus(phase=Phase.RUNNING, desired=3))
    assert "job-workers" in bench.control.names(BUDGETS)
    assert sum(request.method == "GET" and request.path == BUDGETS for request in bench.control.requests) == 1


def test_a_deletion_hits_that_very_pod(bench: Bench) -> None:
    job = bench.submit()
    pod = bench.create(job)
    bench.workload.delete_pod(job, pod.name, "the one before", force=True)
    assert bench.pods(job)
    bench.add_node("n1")
    bench.place(pod, "n1")
    bench.workload.delete_pod(job, pod.name, pod.uid, force=False)
    assert [found.deleting for found in bench.pods(job)] == [True]
    bench.workload.delete_pod(job, pod.name, pod.uid, force=True)
    assert bench.pods(job) == []
    bench.workload.delete_pod(job, pod.name, pod.uid, force=True)  # it is gone: fine


def test_a_pod_that_a_finalizer_keeps_still_has_its_name(bench: Bench) -> None:
    job = bench.submit()
    pod = bench.create(job)
    path = f"{CORE}/pods/{pod.name}"
    stored = bench.control.objects[path]
    bench.control.put(path, {**stored, "metadata": {**stored["metadata"], "finalizers": ["another/controller"]}})
    bench.workload.delete_pod(job, pod.name, pod.uid, force=True)
    assert [(found.name, found.deleting) for found in bench.pods(job)] == [(pod.name, True)]
    bench.control.remove(path)
    wait_until(lambda: not bench.pods(job))


def test_a_pod_of_which_only_the_name_is_left_is_no_longer_there(bench: Bench) -> None:
    job = bench.submit()
    pod = bench.create(job)
    path = f"{CORE}/pods/{pod.name}"
    dying = {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 30}
    for change, there in (
        (dying, 1),
        ({"finalizers": ["x"], "deletionGracePeriodSeconds": 0}, 1),
        ({"finalizers": []}, 0),
    ):
        stored = bench.control.objects[path]
        bench.control.put(path, {**stored, "metadata": {**stored["metadata"], **change}})
        wait_until(lambda there=there: len(bench.pods(job)) == there)  # type: ignore[misc]
    assert bench.workload.pods.cache.items()


def test_jobs_are_called_for_when_a_pod_or_a_node_changes(bench: Bench) -> None:
    bench.add_node("n1")
    bench.add_node("n2")
    job = bench.submit()
    pod = bench.create(job)
    bench.keys.clear()
    bench.place(pod, "n1")
    wait_until(lambda: set(bench.keys) == {"default/job"})
    bench.keys.clear()
    bench.add_node("n1", "Unknown")
    wait_until(lambda: set(bench.keys) == {"default/job"})
    assert bench.workload.lost_nodes() == {"n1"}
    bench.add_node("n1")
    wait_until(lambda: not bench.workload.lost_nodes())


def test_a_node_is_believed_lost_once_the_api_server_has_been_back_for_a_while(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elasticctl_controller.kube.nodes.SETTLE_S", 0.5)
    monkeypatch.setattr("elasticctl_controller.kube.nodes.BLIND_S", 600.0)
    bench.add_node("n1")
    bench.add_node("n2")
    job = bench.submit()
    bench.place(bench.create(job), "n1")
    wait_until(lambda: all(pod.node for pod in bench.pods(job)))
    wait_until(lambda: "default/job" in bench.keys)
    bench.keys.clear()
    began = time.monotonic()
    bench.workload.note_api_answer()
    bench.add_node("n1", "Unknown")
    wait_until(lambda: set(bench.keys) == {"default/job"})
    assert time.monotonic() - began >= 0.5
    assert bench.workload.lost_nodes() == {"n1"}


def test_the_jobs_on_a_deleted_node_are_reported_immediately(bench: Bench) -> None:
    bench.add_node("n1")
    bench.add_node("n2")
    job = bench.submit()
    bench.place(bench.create(job), "n1")
    other = bench.submit("other")
    bench.workload.pod_creator(other)(build_pod(other, 0, ""))
    bench.place(bench.pods(other)[0], "n2")
    wait_until(lambda: all(pod.node for pod in [*bench.pods(job), *bench.pods(other)]))
    bench.keys.clear()
    bench.control.remove("/api/v1/nodes/n1")
    wait_until(lambda: set(bench.keys) == {"default/job"})
    assert bench.workload.lost_nodes() == {"n1"}


def test_the_time_to_a_replacement_is_measured(bench: Bench) -> None:
    job = bench.submit()
    bench.create(job)
    bench.control.remove(f"{CORE}/pods/job-worker-0")
    wait_until(lambda: not bench.pods(job))
    assert bench.replaced == []
    bench.create(job)
    assert len(bench.replaced) == 1
    assert bench.replaced[0] >= 0


def test_pods_that_were_removed_on_purpose_or_replaced_by_another_replica_are_not_measured(bench: Bench) -> None:
    job = bench.submit()
    pod = bench.create(job)
    bench.workload.delete_pod(job, pod.name, pod.uid, force=False)
    wait_until(lambda: not bench.pods(job))
    bench.create(job)
    manifest = build_pod(job, 0, "")
    bench.control.remove(f"{CORE}/pods/job-worker-0")
    bench.control.put(f"{CORE}/pods/job-worker-0", manifest)
    bench.control.remove(f"{CORE}/pods/job-worker-0")
    bench.control.put(f"{CORE}/pods/job-worker-0", manifest)
    wait_until(lambda: [found.uid for found in bench.pods(job)] == [manifest["metadata"]["uid"]])
    assert bench.replaced == []


def test_the_first_pods_of_a_recreated_job_replace_nothing(bench: Bench) -> None:
    job = bench.submit()
    bench.create(job)
    for path in (f"{JOBS}/job", f"{CORE}/services/job-workers", f"{CORE}/pods/job-worker-0"):
        bench.control.remove(path)
    wait_until(lambda: not bench.pods(job) and bench.workload.get_job("default/job") is None)
    bench.create(bench.submit())
    assert bench.replaced == []


def test_a_job_is_deleted_if_it_is_that_very_one(bench: Bench) -> None:
    job = bench.submit()
    stored = bench.control.objects[f"{JOBS}/job"]
    bench.control.put(f"{JOBS}/job", {**stored, "metadata": {**stored["metadata"], "uid": "its successor"}})
    bench.workload.delete_job(job)
    assert bench.control.names(JOBS) == ["job"]
    wait_until(lambda: bench.job().uid == "its successor")
    bench.workload.delete_job(bench.job())
    bench.workload.delete_job(bench.job())
    assert bench.control.names(JOBS) == []
