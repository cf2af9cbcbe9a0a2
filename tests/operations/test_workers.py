"""`preempt`: which worker it removes, and how a real job continues."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, ElasticctlError, NotFoundError, UsageError
from elasticctl.api.spec import ElasticJob
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.local.client import LocalCluster
from elasticctl.operations.workers import WhichWorker, choose_to_preempt
from tests.support.cli import Run
from tests.support.waiting import wait_until

LAUNCH = ["elasticctl-launch", "--nproc-per-node", "2", "--"]
JOB: dict[str, Any] = {
    "metadata": {"name": "digits"},
    "spec": {"replicaSpecs": {"Worker": {"replicas": 3, "template": {"spec": {"containers": [{"command": LAUNCH}]}}}}},
    "status": {"phase": "Running", "generations": [{"workers": ["digits-worker-2", "digits-worker-0"]}]},
}
EXAMPLE = Path(__file__).parents[2] / "examples" / "digits" / "train.py"


def pods(*indices: int, **status: str) -> list[Manifest]:
    return [
        {"metadata": {"name": f"digits-worker-{index}"}, "status": {"phase": "Running", **status}} for index in indices
    ]


@pytest.mark.parametrize(
    ("worker", "rank", "chosen"),
    [("", None, 3), ("0", None, 0), ("digits-worker-2", None, 2), ("", 0, 2), ("", 1, 2), ("", 2, 0), ("", 3, 0)],
)
def test_the_worker_that_is_meant(worker: str, rank: int | None, chosen: int) -> None:
    assert (
        choose_to_preempt(ElasticJob.from_manifest(JOB), pods(0, 2, 3), WhichWorker(worker, rank))
        == f"digits-worker-{chosen}"
    )


@pytest.mark.parametrize(
    ("changes", "running", "worker", "rank", "kind", "message"),
    [
        ({"phase": "Succeeded"}, [0], "", None, ConflictError, "has ended (Succeeded)"),
        ({}, [], "", None, ConflictError, "no worker of digits is running"),
        ({}, [0, 2], "7", None, NotFoundError, "digits-worker-7 is not running. These workers of digits are: "),
        ({}, [0], "", 0, NotFoundError, "digits-worker-2 is not running"),
        ({}, [0, 2], "", 4, NotFoundError, "no rank 4: its ranks are 0 to 3"),
        ({"generations": []}, [0, 2], "", 0, NotFoundError, "no rank 0: it is not training yet"),
        ({}, [0], "cat", None, UsageError, "is not the name of a worker"),
    ],
)
def test_an_error_is_one_line(
    changes: dict[str, Any], running: list[int], worker: str, rank: int | None, kind: type[Exception], message: str
) -> None:
    job = copy.deepcopy(JOB)
    job["status"] |= changes
    with pytest.raises(ElasticctlError) as caught:
        choose_to_preempt(ElasticJob.from_manifest(job), pods(*running), WhichWorker(worker, rank))
    assert isinstance(caught.value, kind)
    assert message in str(caught.value)


def test_workers_that_are_starting_are_not_preempted() -> None:
    leaving = pods(5)
    leaving[0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    everyone = [*pods(0), *pods(4, phase="Pending"), *leaving]
    assert choose_to_preempt(ElasticJob.from_manifest(JOB), everyone, WhichWorker()) == "digits-worker-0"


@pytest.mark.parametrize("command", [None, 7, [], ["--nproc-per-node"], ["--nproc-per-node", "x"], ["sh", 3]])
def test_by_default_a_worker_has_one_rank(command: object) -> None:
    job = copy.deepcopy(JOB)
    job["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]["command"] = command
    assert choose_to_preempt(ElasticJob.from_manifest(job), pods(0, 2), WhichWorker(rank=1)) == "digits-worker-0"


def test_wrong_use_is_an_error(run: Run, private_home: Path) -> None:
    assert "cannot be used together" in run("preempt", "job", "--worker", "1", "--rank", "0").err
    assert "is not a duration" in run("preempt", "job", "--notice", "soon").err
    assert run("preempt", "job", "--rank", "-1").code == 2


def status_of(cluster: LocalCluster, name: str) -> dict[str, Any]:
    status: dict[str, Any] = cluster.get_job("default", name).get("status", {})
    return status


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("light_spares", "forked_workers")
def test_with_notice_a_training_job_loses_no_step(run: Run, local_cluster: LocalCluster, tmp_path: Path) -> None:
    arguments = ["--epochs", "1000", "--step-delay-s", "0.02", "--save-every-s", "1000"]
    size = ["--workers", "2", "--min-workers", "1", "--name", "digits", "--storage", str(tmp_path)]
    assert run("submit", *size, "-d", str(EXAMPLE), "--", *arguments).code == 0
    wait_until(lambda: status_of(local_cluster, "digits").get("progress", {}).get("step", 0) > 20)
    assert len(status_of(local_cluster, "digits")["generations"][-1]["workers"]) == 2
    assert run("preempt", "digits", "--rank", "0").code == 0
    wait_until(lambda: status_of(local_cluster, "digits").get("interruptions", [{}])[0].get("recoveryS"))
    status = status_of(local_cluster, "digits")
    interruption = status["interruptions"][0]
    assert (interruption["worker"], interruption["cause"]) == ("digits-worker-0", "Preempted")
    assert (interruption["stepsRedone"], status["stepsRedone"]) == (0, 0)
    assert status["generations"][-1]["resumedStep"] >= 20
    assert run("delete", "digits", "-y").code == 0
