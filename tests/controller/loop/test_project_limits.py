"""Limits of a project: what a job is within them, and that the loop starts none that breaks them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.quota import Quota, check_quota
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Manifest
from elasticctl_controller.local.store import LocalStore
from elasticctl_controller.local.workload import LocalWorkload
from elasticctl_controller.loop.controller import Controller, Scheduling
from elasticctl_controller.loop.project_limits import ProjectLimits
from tests.support.limits import job_of

INSTANCE = "node.kubernetes.io/instance-type"


class Bench:
    """A controller of a store, in which the project `default` has limits and has spent `usd` today."""

    def __init__(self, path: Path) -> None:
        self.store = LocalStore(path / "state.db")
        self.workload = LocalWorkload(self.store, "unix:///nowhere")
        self.usd = 0.0
        limits = ProjectLimits(self.workload.quota_of, lambda project: self.usd)
        self.controller = Controller(self.workload, None, scheduling=Scheduling(restrict=limits.restrict))

    def allow(self, **allowed: Any) -> None:
        manifest = {**Quota("default").to_manifest(), "spec": {"allowed": allowed}}
        self.store.put_object(check_quota(manifest).to_manifest())

    def submit(self, job: Manifest) -> ElasticJob:
        self.store.create_job(job)
        return self.settle(job["metadata"]["name"])

    def settle(self, name: str) -> ElasticJob:
        for _ in range(4):
            self.controller.sync(f"default/{name}")
        return ElasticJob.from_manifest(self.store.get_job("default", name))

    def pods(self, name: str) -> list[Manifest]:
        return self.store.list_pods("default", name)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def conditions(job: ElasticJob) -> dict[str, tuple[str, str]]:
    return {item.type: (item.status, item.message) for item in job.status.conditions}


def test_a_job_that_breaks_a_limit_gets_no_worker_and_says_why(bench: Bench) -> None:
    bench.allow(images=["registry.example/*"])
    job = bench.submit(job_of("greedy", image="evil.example/x"))
    assert bench.pods("greedy") == []
    said = 'project default does not allow this job: its image "evil.example/x" is not registry.example/*'
    assert (job.status.phase, job.status.reason, job.status.message) == ("Suspended", "OverLimit", said)
    assert conditions(job)["OverLimit"] == ("True", said)
    bench.allow(images=["registry.example/*", "evil.example/x"])
    job = bench.settle("greedy")
    assert len(bench.pods("greedy")) == 1
    assert conditions(job)["OverLimit"] == ("False", "")


def test_a_job_that_runs_keeps_its_workers_when_limits_change(bench: Bench) -> None:
    bench.submit(job_of("early", image="evil.example/x"))
    assert len(bench.pods("early")) == 1
    bench.allow(images=["registry.example/*"])
    job = bench.settle("early")
    assert [pod["metadata"].get("deletionTimestamp") for pod in bench.pods("early")] == [None]
    assert "OverLimit" not in conditions(job)


def test_a_project_that_has_spent_its_daily_budget_stops_until_the_next_day(bench: Bench) -> None:
    bench.allow(usdPerDay=20)
    bench.submit(job_of("dear"))
    bench.usd = 20.0
    job = bench.settle("dear")
    assert job.status.reason == "OverLimit"
    assert "has spent the 20.00 USD that it may spend in a day" in job.status.message
    assert all(pod["metadata"].get("deletionTimestamp") for pod in bench.pods("dear"))
    late = bench.submit(job_of("late"))
    assert (bench.pods("late"), late.status.reason) == ([], "OverLimit")
    bench.usd = 0.0
    bench.settle("late")
    assert len(bench.pods("late")) == 1


def test_workers_run_on_the_allowed_node_types_only_with_any_preference_of_the_job(bench: Bench) -> None:
    bench.allow(nodeTypes=["g5.xlarge"])
    term = {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}
    own = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term, {}]}}}
    bench.submit(job_of("placed", {"affinity": own}))
    affinity = bench.pods("placed")[0]["spec"]["affinity"]["nodeAffinity"]
    (found,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    asked = {item["key"]: item["values"] for item in found["matchExpressions"]}
    assert asked == {"zone": ["a"], INSTANCE: ["g5.xlarge"]}


def test_a_job_that_has_priority_above_the_limit_gets_no_more_than_that(bench: Bench) -> None:
    bench.allow(priority=10)
    limits = ProjectLimits(bench.workload.quota_of)
    job = ElasticJob.from_manifest(job_of("loud", sharing={"priority": 900}))
    assert limits.restrict(job).sharing.priority == 10
    assert limits.restrict(job).suspend


def test_a_job_that_its_owner_suspended_is_no_breach(bench: Bench) -> None:
    bench.allow(images=["registry.example/*"])
    job = job_of("asleep", image="evil.example/x")
    job["spec"]["suspend"] = True
    found = bench.submit(job)
    assert found.status.reason == "Suspended"


def test_a_project_without_limits_is_left_alone(bench: Bench) -> None:
    job = ElasticJob.from_manifest(job_of("free"))
    assert ProjectLimits(bench.workload.quota_of).restrict(job) is job
