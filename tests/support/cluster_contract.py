"""What every `Cluster` does. A test module per implementation subclasses `ClusterContract` and gives it a `cluster`."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, NotFoundError, SpecError
from elasticctl.api.quota import Quota
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Cluster, LogQuery, Manifest
from tests.support.jobs import FOREVER, shell_job
from tests.support.waiting import wait_until


def phase(cluster: Cluster, name: str) -> str:
    return str(cluster.get_job("default", name).get("status", {}).get("phase", ""))


def running(cluster: Cluster, name: str) -> list[Manifest]:
    pods = cluster.list_pods("default", name)
    return [pod for pod in pods if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]]


def scale(workers: int) -> dict[str, Any]:
    return {"spec": {"replicaSpecs": {"Worker": {"replicas": workers}}}}


class ClusterContract:
    """Inherit, and define a fixture `cluster` that gives an empty cluster.

    `AGE_RESOLUTION_S`: how far apart jobs are created whose order is checked; `KEEPS_LOGS`: what a worker printed
    stays when another has taken its place.
    """

    AGE_RESOLUTION_S = 0.0
    KEEPS_LOGS = True

    def test_a_stored_job_is_the_one_that_was_given_and_has_an_identity(self, cluster: Cluster) -> None:
        manifest = shell_job("first", "true", suspend=True)
        stored = cluster.create_job(manifest)
        assert stored["metadata"]["uid"]
        assert stored["metadata"]["generation"] == 1
        assert cluster.get_job("default", "first")["spec"] == stored["spec"]
        assert stored["spec"]["replicaSpecs"]["Worker"]["replicas"] == 1

    def test_a_name_is_given_once(self, cluster: Cluster) -> None:
        first = cluster.create_job(shell_job("twice", "true", suspend=True))
        with pytest.raises(ConflictError, match="twice"):
            cluster.create_job(shell_job("twice", "false", suspend=True))
        assert cluster.get_job("default", "twice")["metadata"]["uid"] == first["metadata"]["uid"]

    def test_a_dry_run_stores_nothing(self, cluster: Cluster) -> None:
        assert cluster.create_job(shell_job("dry", "true"), dry_run=True)["metadata"]["name"] == "dry"
        assert cluster.list_jobs(None) == []

    def test_a_job_that_is_not_there_is_not_found(self, cluster: Cluster) -> None:
        for call in (cluster.get_job, cluster.delete_job, cluster.list_pods, cluster.list_events):
            with pytest.raises(NotFoundError, match="absent"):
                call("default", "absent")
        with pytest.raises(NotFoundError, match="absent"):
            cluster.patch_job("default", "absent", scale(2))
        with pytest.raises(NotFoundError, match="absent"):
            list(cluster.logs("default", "absent", LogQuery()))

    def test_jobs_are_listed_oldest_first(self, cluster: Cluster) -> None:
        for name in ("b", "a", "c"):
            made_at = time.monotonic()
            cluster.create_job(shell_job(name, "true", suspend=True))
            wait_until(lambda since=made_at: time.monotonic() >= since + self.AGE_RESOLUTION_S)
        assert [job["metadata"]["name"] for job in cluster.list_jobs("default")] == ["b", "a", "c"]
        assert len(cluster.list_jobs(None)) == 3
        assert cluster.list_jobs("other") == []

    def test_a_patch_merges_and_counts_a_generation(self, cluster: Cluster) -> None:
        cluster.create_job(shell_job("patched", "true", suspend=True, minReplicas=1, maxReplicas=4))
        result = cluster.patch_job("default", "patched", {**scale(3), "metadata": {"labels": {"team": "vision"}}})
        worker = result["spec"]["replicaSpecs"]["Worker"]
        assert (worker["replicas"], worker["restartPolicy"]) == (3, "OnFailure")
        assert result["metadata"]["labels"] == {"team": "vision"}
        assert result["metadata"]["generation"] == 2

    def test_a_patch_of_an_older_version_is_refused(self, cluster: Cluster) -> None:
        old = cluster.create_job(shell_job("raced", "true", suspend=True, minReplicas=1, maxReplicas=4))
        cluster.patch_job("default", "raced", scale(2))
        condition = {"metadata": {"resourceVersion": old["metadata"]["resourceVersion"]}}
        with pytest.raises(ConflictError, match="raced"):
            cluster.patch_job("default", "raced", {**scale(4), **condition})
        assert cluster.get_job("default", "raced")["spec"]["replicaSpecs"]["Worker"]["replicas"] == 2

    def test_a_job_runs_to_its_end_and_its_output_is_in_the_logs(self, cluster: Cluster) -> None:
        cluster.create_job(shell_job("short", "echo one; echo two; printf three", workers=2))
        lines = list(cluster.logs("default", "short", LogQuery(follow=True)))
        assert phase(cluster, "short") == "Succeeded"
        for worker in ("short-worker-0", "short-worker-1"):
            assert [line.text for line in lines if line.worker == worker] == ["one", "two", "three"]
        # Followed lines come as they are found, read ones by time: the order is promised for each worker only.
        again = list(cluster.logs("default", "short", LogQuery()))
        assert sorted(again, key=lambda line: line.worker) == sorted(lines, key=lambda line: line.worker)
        wait_until(lambda: "ElasticJobSucceeded" in [e["reason"] for e in cluster.list_events("default", "short")])

    def test_the_log_has_both_outputs(self, cluster: Cluster) -> None:
        cluster.create_job(shell_job("both", "echo aside >&2; echo one; echo two"))
        texts = [line.text for line in cluster.logs("default", "both", LogQuery(follow=True))]
        texts.remove("aside")  # of two outputs, only each one's order is kept
        assert texts == ["one", "two"]

    def test_a_worker_that_completed_stays_where_only_those_that_run_are_removed(self, cluster: Cluster) -> None:
        cluster.create_job(shell_job("kept", "echo here", cleanPodPolicy="Running"))
        wait_until(lambda: phase(cluster, "kept") == "Succeeded")
        wait_until(lambda: [pod["status"]["phase"] for pod in cluster.list_pods("default", "kept")] == ["Succeeded"])
        assert "deletionTimestamp" not in cluster.list_pods("default", "kept")[0]["metadata"]
        assert [line.text for line in cluster.logs("default", "kept", LogQuery())] == ["here"]

    def test_a_crashing_job_fails_after_its_budget(self, cluster: Cluster) -> None:
        cluster.create_job(shell_job("broken", "exit 3", backoffLimit=2))
        wait_until(lambda: phase(cluster, "broken") == "Failed")
        status = cluster.get_job("default", "broken")["status"]
        assert status["restarts"] == {"ApplicationError": 3}
        assert status["firstFailure"]["exitCode"] == 3

    def test_scaling_adds_and_removes_workers_and_keeps_the_others(self, cluster: Cluster) -> None:
        cluster.create_job(shell_job("elastic", FOREVER, grace_s=1, minReplicas=1, maxReplicas=3))
        wait_until(lambda: len(running(cluster, "elastic")) == 1)
        first = running(cluster, "elastic")[0]["metadata"]["uid"]
        job = ElasticJob.from_manifest(cluster.get_job("default", "elastic"))
        gone = dataclasses.replace(job, name="gone", uid="another")
        found = cluster.pods_of([gone, job, dataclasses.replace(job, uid="of-the-one-before")])
        assert {uid: [pod["metadata"]["uid"] for pod in pods] for uid, pods in found.items()} == {
            "another": [],
            job.uid: [first],
            "of-the-one-before": [],
        }
        cluster.patch_job("default", "elastic", scale(3))
        wait_until(lambda: len(running(cluster, "elastic")) == 3)
        cluster.patch_job("default", "elastic", scale(1))
        wait_until(lambda: len(cluster.list_pods("default", "elastic")) == 1)
        assert running(cluster, "elastic")[0]["metadata"]["uid"] == first

    def test_a_worker_that_is_evicted_gets_sigterm_and_is_replaced(self, cluster: Cluster) -> None:
        script = f"trap 'echo told; exit 143' TERM; echo here; {FOREVER.replace('sleep 1', 'sleep 0.1')}"
        cluster.create_job(shell_job("evicted", script, workers=2, backoffLimit=0))
        wait_until(lambda: len(list(cluster.logs("default", "evicted", LogQuery()))) == 2)
        wait_until(lambda: len(running(cluster, "evicted")) == 2)
        before = {pod["metadata"]["uid"] for pod in running(cluster, "evicted")}
        cluster.evict_pod("default", "evicted-worker-1", grace_s=30.0)
        wait_until(lambda: len({pod["metadata"]["uid"] for pod in running(cluster, "evicted")} | before) == 3)
        # Its successor, which has another name where it came first, may run before it has ended.
        wait_until(lambda: cluster.get_job("default", "evicted")["status"].get("restarts"))
        status = cluster.get_job("default", "evicted")["status"]
        assert (status["restarts"], status["failures"]) == ({"Preempted": 1}, 0)
        if not self.KEEPS_LOGS:
            with pytest.raises(NotFoundError, match="earlier incarnations"):
                list(cluster.logs("default", "evicted", LogQuery(previous=True)))
        said = [line.text for line in cluster.logs("default", "evicted", LogQuery(everything=True))]
        assert said.count("told") in ((1,) if self.KEEPS_LOGS else (0, 1)), "its pod may be gone, or not yet"

    def test_a_worker_that_is_evicted_without_grace_is_killed(self, cluster: Cluster) -> None:
        script = f"trap 'echo told' TERM; echo here; {FOREVER}"
        cluster.create_job(shell_job("killed", script, backoffLimit=0))
        wait_until(lambda: list(cluster.logs("default", "killed", LogQuery())))
        before = wait_until(lambda: running(cluster, "killed"))[0]["metadata"]["uid"]
        cluster.evict_pod("default", "killed-worker-0", grace_s=0.0)
        wait_until(lambda: [p for p in running(cluster, "killed") if p["metadata"]["uid"] != before])
        status = cluster.get_job("default", "killed")["status"]
        assert (sum(status["restarts"].values()), status["failures"]) == (1, 0)
        assert set(status["restarts"]) <= {"Deleted", "Killed"}
        if self.KEEPS_LOGS:
            assert "told" not in [line.text for line in cluster.logs("default", "killed", LogQuery(previous=True))]

    def test_only_a_worker_that_runs_can_be_evicted(self, cluster: Cluster) -> None:
        cluster.create_job(shell_job("over", "true"))
        wait_until(lambda: phase(cluster, "over") == "Succeeded")
        with pytest.raises(ConflictError, match="over-worker-0"):
            cluster.evict_pod("default", "over-worker-0", grace_s=1.0)
        assert ["deletionTimestamp" in pod["metadata"] for pod in cluster.list_pods("default", "over")] == [False]
        with pytest.raises(NotFoundError, match="over-worker-7"):
            cluster.evict_pod("default", "over-worker-7", grace_s=1.0)

    def test_a_quota_is_kept_in_place_of_the_one_before(self, cluster: Cluster) -> None:
        first = Quota("vision", 2.0, {"t4": 4, "a100": 8}, {"t4": 8})
        second = Quota("vision", 1.0, {"t4": 2}, {})
        try:
            assert cluster.list_quotas() == []
            cluster.put_quota(Quota("speech", guaranteed={"t4": 1}).to_manifest())
            for wanted in (first, second):
                assert Quota.from_manifest(cluster.put_quota(wanted.to_manifest())) == wanted
            assert [Quota.from_manifest(item).project for item in cluster.list_quotas()] == ["speech", "vision"]
            assert Quota.from_manifest(cluster.list_quotas()[1]) == second
            assert {item["kind"] for item in cluster.list_quotas()} == {"ElasticQuota"}
        finally:
            for item in cluster.list_quotas():
                cluster.delete_quota(item["metadata"]["name"])
        with pytest.raises(NotFoundError, match="vision"):
            cluster.delete_quota("vision")

    def test_a_quota_that_cannot_be_one_is_refused(self, cluster: Cluster) -> None:
        with pytest.raises(SpecError, match="t5"):
            cluster.put_quota(Quota("vision", guaranteed={"t5": 4}).to_manifest())
        with pytest.raises(SpecError, match="the limit is 2"):
            cluster.put_quota(Quota("vision", guaranteed={"t4": 4}, limit={"t4": 2}).to_manifest())
        assert cluster.list_quotas() == []

    def test_a_deleted_job_is_gone_and_its_name_is_free(self, cluster: Cluster) -> None:
        old = cluster.create_job(shell_job("again", FOREVER, grace_s=1))
        wait_until(lambda: running(cluster, "again"))
        cluster.delete_job("default", "again")
        with pytest.raises(NotFoundError):
            wait_until(lambda: not cluster.get_job("default", "again"))
        new = cluster.create_job(shell_job("again", "echo new"))
        assert new["metadata"]["uid"] != old["metadata"]["uid"]
        wait_until(lambda: phase(cluster, "again") == "Succeeded")
        assert [line.text for line in cluster.logs("default", "again", LogQuery())] == ["new"]
