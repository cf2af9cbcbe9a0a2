"""What `KubeCluster` requests, and how it reads the answers; what every cluster does is in the contract's tests."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.observed.workers import Pod
from elasticctl.api.quota import Quota
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.kube import client
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi import connection
from tests.support.cluster_contract import ClusterContract, scale
from tests.support.fakeapi import FakeApi, Request
from tests.support.jobs import shell_job
from tests.support.kube import NAMESPACE, add_pod
from tests.support.waiting import wait_until


def test_jobs_are_made_changed_listed_and_deleted(api: FakeApi, cluster: KubeCluster) -> None:
    assert cluster.create_job(shell_job("a", "true"), dry_run=True)["metadata"]["name"] == "a"
    assert cluster.list_jobs("default") == []
    cluster.create_job(shell_job("a", "true"))
    with pytest.raises(ConflictError, match='"a" already exists'):
        cluster.create_job(shell_job("a", "true"))
    cluster.create_job(shell_job("b", "true", namespace="other"))
    changed = cluster.patch_job("default", "a", scale(3))
    assert changed["spec"]["replicaSpecs"]["Worker"]["replicas"] == 3
    old = {"metadata": {"resourceVersion": "0"}}
    with pytest.raises(ConflictError, match="modified"):
        cluster.patch_job("default", "a", old)
    assert [(job["metadata"]["name"], job["kind"]) for job in cluster.list_jobs(None)] == [
        ("a", "ElasticJob"),
        ("b", "ElasticJob"),
    ]
    cluster.delete_job("default", "a")
    assert api.requests[-1].body == {"propagationPolicy": "Background"}
    with pytest.raises(NotFoundError, match='"a" not found'):
        cluster.delete_job("default", "a")


def test_lists_are_read_page_by_page(api: FakeApi, cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PAGE_OBJECTS", 2)
    names = [f"job-{number}" for number in range(5)]
    for name in names:
        cluster.create_job(shell_job(name, "true"))
    assert [job["metadata"]["name"] for job in cluster.list_jobs("default")] == names
    assert len([r for r in api.requests if r.method == "GET"]) == 3


def test_without_our_api_the_error_says_how_to_install_it(api: FakeApi, cluster: KubeCluster) -> None:
    api.refuse = lambda request: (404, b"404 page not found\n", {})
    for call in (lambda: cluster.list_jobs(None), lambda: cluster.get_job("default", "a")):
        with pytest.raises(NotFoundError, match=r"has no ElasticJob resource\. FIX: elasticctl install"):
            call()


def test_pods_are_those_of_this_very_job_in_order_of_index(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true", 11))
    for index in (10, 2, 0):
        add_pod(api, job, index)
    add_pod(api, job, 3, owner="the-uid-of-a-job-before")
    add_pod(api, cluster.create_job(shell_job("b", "true")), 1)
    names = [pod["metadata"]["name"] for pod in cluster.list_pods("default", "a")]
    assert names == ["a-worker-0", "a-worker-2", "a-worker-10"]


def test_pods_of_many_jobs_are_asked_for_in_one_short_request(
    api: FakeApi, cluster: KubeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MOST_NAMED", 2)
    jobs = [cluster.create_job(shell_job(f"a-{number}", "true")) for number in range(4)]
    for job in jobs:
        add_pod(api, job, 0)
    before = len(api.requests)
    found = cluster.pods_of([ElasticJob.from_manifest(job) for job in jobs[:3]])
    assert [[pod["metadata"]["name"] for pod in pods] for pods in found.values()] == [
        [f"a-{number}-worker-0"] for number in range(3)
    ]
    assert len(api.requests) == before + 1
    assert "a-1" not in str(api.requests[-1])


def test_a_pod_that_claims_a_job_of_another_namespace_is_not_its_worker(api: FakeApi, cluster: KubeCluster) -> None:
    mine = cluster.create_job(shell_job("a", "true"))
    theirs = cluster.create_job(shell_job("b", "true", namespace="other"))
    add_pod(api, mine, 0, owner=theirs["metadata"]["uid"])
    found = cluster.pods_of([ElasticJob.from_manifest(job) for job in (mine, theirs)])
    assert list(found.values()) == [[], []]


def test_eviction_is_a_deletion_of_this_very_pod_with_its_grace(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true"))
    for grace_s, seconds in ((0.0, 0), (0.2, 1), (30.0, 30)):
        pod = add_pod(api, job, 0)
        cluster.evict_pod("default", "a-worker-0", grace_s=grace_s)
        assert api.requests[-1].body == {
            "gracePeriodSeconds": seconds,
            "preconditions": {"uid": pod["metadata"]["uid"]},
        }
    with pytest.raises(NotFoundError, match="a-worker-0"):
        cluster.evict_pod("default", "a-worker-0", grace_s=1.0)
    add_pod(api, job, 0, "Failed")
    with pytest.raises(ConflictError, match="a-worker-0 has ended"):
        cluster.evict_pod("default", "a-worker-0", grace_s=1.0)


def test_a_worker_that_has_ended_is_not_evicted_though_its_pod_is_still_called_running(
    api: FakeApi, cluster: KubeCluster
) -> None:
    pod = add_pod(api, cluster.create_job(shell_job("a", "true")), 0)
    ended = {"name": "elasticjob-worker", "state": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
    status = {"phase": "Running", "containerStatuses": [ended]}
    api.put(f"{NAMESPACE}/pods/a-worker-0", {**pod, "status": status})
    with pytest.raises(ConflictError, match="a-worker-0 has ended"):
        cluster.evict_pod("default", "a-worker-0", grace_s=0.0)
    assert cluster.list_pods("default", "a")


@pytest.mark.parametrize(
    ("grace_s", "may_patch", "cause"), [(30.0, True, True), (0.0, True, False), (30.0, False, False)]
)
def test_an_eviction_with_notice_marks_the_pod_if_that_is_allowed(
    api: FakeApi, cluster: KubeCluster, grace_s: float, may_patch: bool, cause: bool
) -> None:
    pod = add_pod(api, cluster.create_job(shell_job("a", "true")), 0)
    seen: list[bool] = []

    def refuse(request: Request) -> tuple[int, Any, dict[str, str]] | None:
        if request.method == "DELETE":
            seen.append(Pod.from_manifest(api.objects[request.path]).disruption_target)
        if request.method != "PATCH" or may_patch:
            return None
        return 403, {"kind": "Status", "message": "pods is forbidden", "reason": "Forbidden"}, {}

    api.refuse = refuse
    cluster.evict_pod("default", pod["metadata"]["name"], grace_s=grace_s)
    assert seen == [cause]


def test_events_are_those_of_the_job_and_its_workers_oldest_first(api: FakeApi, cluster: KubeCluster) -> None:
    job = cluster.create_job(shell_job("a", "true", 2))
    made_at = 4_000_000_000.0
    about_job = {"kind": "ElasticJob", "name": "a", "uid": job["metadata"]["uid"]}
    given = [
        ("late", {"kind": "Pod", "name": "a-worker-1"}, {"lastTimestamp": to_rfc3339(made_at + 9)}),
        ("early", about_job, {"eventTime": to_rfc3339(made_at + 1)}),
        ("of a job before", {**about_job, "uid": "another"}, {"lastTimestamp": to_rfc3339(made_at + 2)}),
        ("of its worker", {"kind": "Pod", "name": "a-worker-0"}, {"lastTimestamp": to_rfc3339(1.0)}),
        ("of another job", {"kind": "Pod", "name": "a-worker-7"}, {"lastTimestamp": to_rfc3339(made_at + 2)}),
    ]
    for number, (reason, about, more) in enumerate(given):
        event = {"metadata": {"name": f"e{number}"}, "involvedObject": about, "reason": reason, **more}
        api.put(f"{NAMESPACE}/events/e{number}", event)
    assert [event["reason"] for event in cluster.list_events("default", "a")] == ["early", "late"]


def event_of(number: int, worker: str) -> dict[str, Any]:
    about = {"kind": "Pod", "name": worker}
    return {
        "metadata": {"name": f"e{number}", "namespace": "default"},
        "involvedObject": about,
        "reason": f"r{number}",
        "lastTimestamp": to_rfc3339(4_000_000_000.0 + number),
    }


@pytest.mark.parametrize("may_watch", [True, False])
def test_events_that_are_watched_are_listed_once(api: FakeApi, cluster: KubeCluster, *, may_watch: bool) -> None:
    path = f"{NAMESPACE}/events"
    job = ElasticJob.from_manifest(cluster.create_job(shell_job("a", "true", 2)))
    api.put(f"{path}/e0", event_of(0, "a-worker-0"))
    api.put(f"{path}/e1", event_of(1, "b-worker-0"))
    if not may_watch:
        forbidden = {"kind": "Status", "message": "events is forbidden", "reason": "Forbidden"}
        api.refuse = lambda request: (403, forbidden, {}) if request.params.get("watch") else None
    with cluster.watch_events("default") as events_of:

        def reasons() -> list[str]:
            return [event["reason"] for event in events_of(job)]

        assert reasons() == ["r0"]
        api.put(f"{path}/e2", event_of(2, "a-worker-1"))
        wait_until(lambda: reasons() == ["r0", "r2"])
    lists = [r for r in api.requests if r.path == path and not r.params.get("watch")]
    assert (len(lists) == 1) is may_watch


def test_logs_of_earlier_incarnations_are_gone(cluster: KubeCluster) -> None:
    cluster.create_job(shell_job("a", "true"))
    with pytest.raises(NotFoundError, match="gone with their pods"):
        cluster.logs("default", "a", LogQuery(previous=True))


def test_the_server_says_who_changes_things_and_gets_an_event(api: FakeApi, cluster: KubeCluster) -> None:
    assert cluster.user() == "maria@example.org"
    api.refuse = lambda request: (404, "none", {}) if request.path.endswith("/selfsubjectreviews") else None
    assert cluster.user() == ""  # a server of before Kubernetes 1.28
    job = cluster.create_job(shell_job("a", "true"))
    cluster.publish(job, "Changed", "cancel by maria")
    event = api.requests[-1].body
    assert (event["involvedObject"]["uid"], event["message"]) == (job["metadata"]["uid"], "cancel by maria")


PATH = "/apis/elastic.pytorch.org/v1alpha1/elasticquotas"


class TestQuotas:
    """The part of the contract that is about quotas."""

    test_kept = ClusterContract.test_a_quota_is_kept_in_place_of_the_one_before
    test_refused = ClusterContract.test_a_quota_that_cannot_be_one_is_refused


def test_a_cluster_that_knows_no_quotas_has_none(cluster: KubeCluster, api: FakeApi) -> None:
    api.refuse = lambda request: (404, b"404 page not found", {}) if request.path.startswith(PATH) else None
    assert cluster.list_quotas() == []
    with pytest.raises(NotFoundError, match="elasticctl install"):
        cluster.put_quota(Quota("a", guaranteed={"t4": 1}).to_manifest())
