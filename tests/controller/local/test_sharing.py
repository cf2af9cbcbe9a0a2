"""A machine that is shared: real jobs that grow, give way and come back, with nothing typed and no step lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticctl.api.errors import SpecError
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import CPU, Quota
from elasticctl.api.status import Phase
from elasticctl.cluster.local.capacity import LocalSharing, check_sharing
from elasticctl.cluster.local.client import LocalCluster
from tests.support.jobs import FOREVER, shell_job
from tests.support.processes import kill_supervisor
from tests.support.sharing_scenario import PATIENCE_S, give_way_and_grow_back, status, training, trains
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_supervisor")


def shared(cluster: LocalCluster, slots: int, **guaranteed: int) -> None:
    """Share that many CPU slots between projects."""
    cluster.set_sharing(LocalSharing(on=True, cpu_slots=slots))
    for project, own in guaranteed.items():
        cluster.put_quota(Quota(project, guaranteed={CPU: own}).to_manifest())


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_workers")
def test_a_job_grows_gives_way_and_grows_back(local_cluster: LocalCluster, tmp_path: Path) -> None:
    shared(local_cluster, 4, a=2, b=2)
    give_way_and_grow_back(local_cluster, local_cluster.create_job, tmp_path.as_uri())


@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("forked_workers")
def test_a_job_that_is_outranked_is_suspended_at_a_commit_and_comes_back(
    local_cluster: LocalCluster, tmp_path: Path
) -> None:
    shared(local_cluster, 2)
    local_cluster.create_job(training("low", "a", tmp_path.as_uri(), workers=2, minReplicas=2))
    wait_until(lambda: trains(status(local_cluster, "a", "low"), 2), PATIENCE_S)
    urgent = {"workers": 1, "epochs": 1, "sharing": {"priority": 10}}
    local_cluster.create_job(training("urgent", "b", tmp_path.as_uri(), **urgent))
    wait_until(lambda: status(local_cluster, "a", "low").phase is Phase.SUSPENDED, PATIENCE_S)
    assert "b/urgent" in status(local_cluster, "a", "low").message
    wait_until(lambda: status(local_cluster, "b", "urgent").phase is Phase.SUCCEEDED, PATIENCE_S)
    wait_until(lambda: trains(status(local_cluster, "a", "low"), 2), PATIENCE_S)
    back = status(local_cluster, "a", "low")
    assert back.steps_redone == 0
    assert (back.failures, back.interruptions) == (0, ())


def test_a_gang_waits_for_its_whole_minimum_and_reports_for_what(local_cluster: LocalCluster) -> None:
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


def test_no_more_ranks_run_than_there_are_slots(local_cluster: LocalCluster, tmp_path: Path) -> None:
    shared(local_cluster, 2)
    stubborn = f"trap '' TERM; until [ -e '{tmp_path}/go' ]; do sleep 0.05; done"
    local_cluster.create_job(shell_job("old", stubborn, 2, namespace="a", grace_s=600, minReplicas=2))
    wait_until(lambda: status(local_cluster, "a", "old").phase is Phase.RUNNING)
    local_cluster.create_job(shell_job("new", FOREVER, 2, namespace="b", sharing={"priority": 1}))

    def running(namespace: str, name: str) -> int:
        return sum(pod["status"]["phase"] == "Running" for pod in local_cluster.list_pods(namespace, name))

    def all_new() -> bool:
        new = running("b", "new")  # first: the old ones can only become fewer
        assert new + running("a", "old") <= 2
        return new == 2

    wait_until(lambda: len(local_cluster.list_pods("b", "new")) == 2)
    assert running("b", "new") == 0, "the old ones take their time"
    (tmp_path / "go").touch()
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
    assert len(local_cluster.list_jobs(None)) == 2  # this call starts the next one
    local_cluster.create_job(shell_job("late", FOREVER, 1, namespace="c"))  # it makes the new one decide
    wait_until(lambda: status(local_cluster, "c", "late").share)
    for name, old in before.items():
        now = status(local_cluster, *name)
        assert (now.share, now.scalings) == (old.share, old.scalings)
        assert {worker.uid for worker in now.workers} == {worker.uid for worker in old.workers}


def test_without_sharing_an_automatic_job_begins_with_what_there_is(
    local_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")  # ids are all that the local cluster needs of GPUs
    gpu = {"resources": {"limits": {GPU_RESOURCE: 1}}}
    local_cluster.create_job(shell_job("first", FOREVER, 1, container=gpu))
    wait_until(lambda: status(local_cluster, "default", "first").phase is Phase.RUNNING)
    automatic = {"minReplicas": 2, "maxReplicas": 3, "sharing": {"automatic": True}}
    local_cluster.create_job(shell_job("elastic", FOREVER, 3, container=gpu, **automatic))
    wait_until(lambda: status(local_cluster, "default", "elastic").phase is Phase.RUNNING)

    def phases() -> list[str]:
        return sorted(pod["status"]["phase"] for pod in local_cluster.list_pods("default", "elastic"))

    assert phases() == ["Pending", "Running", "Running"], "the third waits, which an autoscaler would see"
    local_cluster.delete_job("default", "first")
    wait_until(lambda: phases() == ["Running"] * 3)


@pytest.mark.parametrize(
    ("sharing", "gpus", "slots"),
    [
        (LocalSharing(), 0, 0),
        (LocalSharing(on=True), 0, 16),
        (LocalSharing(on=True), 2, 0),
        (LocalSharing(on=True, cpu_slots=4), 2, 4),
        (LocalSharing(on=False, cpu_slots=4), 0, 0),
    ],
)
def test_processors_stand_in_for_gpus_where_there_are_none(sharing: LocalSharing, gpus: int, slots: int) -> None:
    assert sharing.slots(gpus, 16) == slots
    assert LocalSharing.from_manifest(sharing.to_manifest()) == sharing


@pytest.mark.parametrize("body", [{}, {"on": "yes"}, {"on": True, "cpuSlots": 0}, {"on": True, "cpuSlots": True}])
def test_a_wish_to_share_that_makes_no_sense_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        check_sharing(body)
