"""A machine that is shared: real jobs that grow, give way and come back, with nothing typed and no step lost."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticctl.cluster.local.client import LocalCluster
from elasticctl.cluster.local.sharing import LocalSharing
from elasticctl.codec import Manifest
from elasticctl.quota import CPU, Quota
from elasticctl.spec import ElasticJob
from elasticctl.status import JobStatus, Phase
from tests.jobs import FOREVER, shell_job
from tests.local.test_recovery import kill_supervisor
from tests.waiting import wait_until

TRAIN = Path(__file__).parents[2] / "examples" / "digits" / "train.py"
LAUNCH = str(Path(sys.executable).with_name("elasticctl-launch"))
ENDLESS = 100_000
PATIENCE_S = 90.0


def shared(cluster: LocalCluster, slots: int, **guaranteed: int) -> None:
    """Share that many CPU slots between projects."""
    cluster.share(LocalSharing(on=True, cpu_slots=slots))
    for project, own in guaranteed.items():
        cluster.put_quota(Quota(project, guaranteed={CPU: own}).to_manifest())


def training(name: str, namespace: str, folder: Path, *, epochs: int = ENDLESS, **spec: Any) -> Manifest:
    """A job that trains on the digits, a twentieth of a second a step."""
    container = {
        "command": [LAUNCH, "--nproc-per-node", "1", "--"],
        "args": [sys.executable, str(TRAIN), "--epochs", str(epochs), "--step-delay-s", "0.05", "--save-every-s", "1"],
        "env": [
            {"name": "ELASTICCTL_STORAGE", "value": (folder / name).as_uri()},
            {"name": "OMP_NUM_THREADS", "value": "1"},
        ],
    }
    workers = spec.pop("workers", spec.get("maxReplicas", 1))
    return shell_job(name, "", workers, namespace=namespace, container=container, grace_s=20, **spec)


def status(cluster: LocalCluster, namespace: str, name: str) -> JobStatus:
    return ElasticJob.from_manifest(cluster.get_job(namespace, name)).status


def trains(found: JobStatus, workers: int) -> bool:
    """True once a group of that many has taken a step, and no other workers are there."""
    newest = found.generations[-1:]
    return bool(newest and newest[0].first_step_at and len(newest[0].workers) == workers == found.active)


@pytest.mark.timeout(400)
def test_a_job_grows_gives_way_and_grows_back(local_cluster: LocalCluster, tmp_path: Path) -> None:
    shared(local_cluster, 4, a=2, b=2)
    automatic = {"sharing": {"automatic": True}, "minReplicas": 2, "maxReplicas": 4}
    local_cluster.create_job(training("elastic", "a", tmp_path, **automatic))

    def elastic() -> JobStatus:
        return status(local_cluster, "a", "elastic")

    wait_until(lambda: trains(elastic(), 4), PATIENCE_S)
    assert elastic().share.borrowed == 2
    committed = wait_until(lambda: elastic().checkpoint.step, PATIENCE_S)

    local_cluster.create_job(training("guest", "b", tmp_path, workers=2, epochs=1, minReplicas=2))
    wait_until(lambda: trains(elastic(), 2) and elastic().share.borrowed == 0, PATIENCE_S)
    shrunk = elastic().generations[-1]
    assert shrunk.resumed_step >= committed
    wait_until(lambda: trains(status(local_cluster, "b", "guest"), 2), PATIENCE_S)
    wait_until(lambda: status(local_cluster, "b", "guest").phase is Phase.SUCCEEDED, PATIENCE_S)
    wait_until(lambda: trains(elastic(), 4), PATIENCE_S)

    end = elastic()
    assert end.steps_redone == 0, "every change of size was made at a committed step"
    assert end.interruptions == ()
    steps = [(group.resumed_step, group.last_step) for group in end.generations]
    assert all(after[0] == before[1] for before, after in itertools.pairwise(steps)), steps
    sizes = [(item.from_workers, item.to_workers, item.by) for item in end.scalings]
    assert sizes[:2] == [(0, 4, "sharing"), (4, 2, "sharing")]
    assert sizes[2:] in ([(2, 4, "sharing")], [(2, 3, "sharing"), (3, 4, "sharing")]), "as the guest's workers end"
    assert "b/guest" in end.scalings[1].message
    assert status(local_cluster, "b", "guest").failures == 0


@pytest.mark.timeout(400)
def test_a_job_that_is_outranked_is_suspended_at_a_commit_and_comes_back(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    shared(local_cluster, 2)
    local_cluster.create_job(training("low", "a", tmp_path, workers=2, minReplicas=2))
    wait_until(lambda: trains(status(local_cluster, "a", "low"), 2), PATIENCE_S)
    urgent = {"workers": 1, "epochs": 1, "sharing": {"priority": 10}}
    local_cluster.create_job(training("urgent", "b", tmp_path, **urgent))
    wait_until(lambda: status(local_cluster, "a", "low").phase is Phase.SUSPENDED, PATIENCE_S)
    assert "b/urgent" in status(local_cluster, "a", "low").message
    wait_until(lambda: status(local_cluster, "b", "urgent").phase is Phase.SUCCEEDED, PATIENCE_S)
    wait_until(lambda: trains(status(local_cluster, "a", "low"), 2), PATIENCE_S)
    back = status(local_cluster, "a", "low")
    assert back.steps_redone == 0
    assert (back.failures, back.interruptions) == (0, ())


def test_a_gang_waits_for_all_of_its_least_and_says_for_what(local_cluster: LocalCluster) -> None:
    shared(local_cluster, 3)
    local_cluster.create_job(shell_job("first", FOREVER, 2, namespace="a", minReplicas=2))
    wait_until(lambda: status(local_cluster, "a", "first").phase is Phase.RUNNING)
    local_cluster.create_job(shell_job("second", FOREVER, 2, namespace="b", minReplicas=2))
    waiting = wait_until(lambda: (found := status(local_cluster, "b", "second")).share and found)
    assert (waiting.phase, waiting.reason, waiting.active) == (Phase.PENDING, "Queued", 0)
    assert waiting.message == waiting.share.message
    assert local_cluster.list_pods("b", "second") == []
    local_cluster.delete_job("a", "first")
    wait_until(lambda: status(local_cluster, "b", "second").phase is Phase.RUNNING)


def test_no_more_ranks_run_than_there_are_slots(local_cluster: LocalCluster) -> None:
    shared(local_cluster, 2)
    stubborn = "trap '' TERM; " + FOREVER
    local_cluster.create_job(shell_job("old", stubborn, 2, namespace="a", grace_s=2, minReplicas=2))
    wait_until(lambda: status(local_cluster, "a", "old").phase is Phase.RUNNING)
    local_cluster.create_job(shell_job("new", FOREVER, 2, namespace="b", sharing={"priority": 1}))

    def running(namespace: str, name: str) -> int:
        return sum(pod["status"]["phase"] == "Running" for pod in local_cluster.list_pods(namespace, name))

    def all_new() -> bool:
        new = running("b", "new")  # first: the old ones can only become fewer
        assert new + running("a", "old") <= 2
        return new == 2

    wait_until(lambda: len(local_cluster.list_pods("b", "new")) == 2)
    assert running("b", "new") == 0, "the old ones take their two seconds of grace"
    wait_until(all_new)


def test_what_was_given_survives_the_supervisor(local_cluster: LocalCluster) -> None:
    shared(local_cluster, 4, a=2, b=2)
    elastic = shell_job("elastic", FOREVER, 4, namespace="a", minReplicas=2, sharing={"automatic": True})
    local_cluster.create_job(elastic)
    wait_until(lambda: status(local_cluster, "a", "elastic").phase is Phase.RUNNING)
    local_cluster.create_job(shell_job("guest", FOREVER, 2, namespace="b", minReplicas=2))
    wait_until(lambda: status(local_cluster, "b", "guest").phase is Phase.RUNNING)
    before = {name: status(local_cluster, *name) for name in (("a", "elastic"), ("b", "guest"))}
    kill_supervisor(local_cluster)
    local_cluster.create_job(shell_job("late", FOREVER, 1, namespace="c"))  # it makes the new one decide
    wait_until(lambda: status(local_cluster, "c", "late").share)
    for name, old in before.items():
        now = status(local_cluster, *name)
        assert (now.share, now.scalings) == (old.share, old.scalings)
        assert {worker.uid for worker in now.workers} == {worker.uid for worker in old.workers}


def test_switched_on_and_off_it_disturbs_nobody(local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("steady", FOREVER, 2, namespace="a", minReplicas=1))
    wait_until(lambda: status(local_cluster, "a", "steady").phase is Phase.RUNNING)
    before = {worker.uid for worker in status(local_cluster, "a", "steady").workers}
    shared(local_cluster, 4)
    wait_until(lambda: status(local_cluster, "a", "steady").share)
    assert status(local_cluster, "a", "steady").share.workers == 2
    local_cluster.share(LocalSharing(on=False))
    wait_until(lambda: status(local_cluster, "a", "steady").share is None)
    after = status(local_cluster, "a", "steady")
    assert {worker.uid for worker in after.workers} == before
    assert after.scalings == ()


def test_a_job_of_another_scheduler_is_left_alone(local_cluster: LocalCluster) -> None:
    shared(local_cluster, 1)
    queued = shell_job("queued", FOREVER, 2, namespace="a", minReplicas=1)
    queued["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    local_cluster.create_job(queued)
    wait_until(lambda: status(local_cluster, "a", "queued").desired == 2)
    assert status(local_cluster, "a", "queued").share is None
