"""Jobs in queues of Kueue, which decides itself: they grow and shrink worker by worker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest

from benchmarks.clusterload import Missing
from benchmarks.replicas import Replicas
from benchmarks.stories.arrangements import ARRANGEMENTS, manifest
from benchmarks.stories.kueue import describe, held
from benchmarks.stories.story import PROJECTS, Job
from benchmarks.stories.telling import Came, Teller, telling
from elasticctl.api.status import JobStatus, Phase
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection
from tests.on_cluster.commands import need_lab
from tests.on_cluster.conftest import stopping
from tests.on_cluster.waiting import wait_until
from tests.support.sharing_story import status, trains

STORIES = int(os.environ.get("ELASTICCTL_TEST_KUEUE_STORIES", "1"))
"""How many stories are told; each takes some seconds on a machine that does nothing else."""
KUEUE = ARRANGEMENTS["kueue"]
OURS, THEIRS = PROJECTS
PATIENCE_S, STILL_S = 240.0, 45.0


@pytest.fixture(scope="module")
def teller(api: Connection, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teller]:
    """A cluster of six GPUs with Kueue, three of them in either of two queues of one cohort, and a controller."""
    with stopping(Replicas(tmp_path_factory.mktemp("controllers"))) as controllers:
        controllers.start()
        controllers.leader()
        try:
            with telling(api, KUEUE, still_s=STILL_S) as found:
                yield found
        except Missing:
            need_lab()
            raise


@pytest.fixture(autouse=True)
def what_is_there(teller: Teller, api: Connection) -> Iterator[None]:
    """Begin with nothing; print what there is after the test: pytest shows it with one that fails."""
    teller.clear()
    yield
    for project in PROJECTS:
        for job in KubeCluster(api).list_jobs(project):
            print(job["metadata"]["name"], status(KubeCluster(api), project, job["metadata"]["name"]))
        print(describe(api, project))


@pytest.mark.parametrize("seed", range(STORIES))
def test_three_jobs_in_two_queues_leave_no_gpu_idle(teller: Teller, api: Connection, seed: int) -> None:
    """Jobs come, grow, shrink, pause and end; each time they come to rest with all that they can use."""

    def at_rest(came: Came) -> None:
        print(came)
        assert came.rest.is_ideal, came
        # A worker that has just ended gives its quota back in the next pass.
        wait_until(lambda: sum(held(api, project) for project in PROJECTS) == came.held, STILL_S)

    teller.tell(seed, at_rest=at_rest)


def test_workers_that_train_give_way_and_lose_no_step(teller: Teller, api: Connection) -> None:
    """A job grows into another queue's quota, gives it back, is suspended, and resumes: each time at the same step."""
    cluster = KubeCluster(api)
    elastic, guest = Job("elastic", OURS, 1, 4, elastic=True), Job("guest", THEIRS, 3, 3, elastic=False)

    def now() -> JobStatus:
        return status(cluster, OURS, elastic.name)

    cluster.create_job(manifest(elastic, KUEUE, train=True))
    wait_until(lambda: trains(now(), 4), PATIENCE_S)
    wait_until(lambda: held(api, OURS) == 4, PATIENCE_S)  # Kueue's own account follows

    cluster.create_job(manifest(guest, KUEUE, train=False))
    wait_until(lambda: trains(now(), 3), PATIENCE_S)
    wait_until(lambda: status(cluster, THEIRS, guest.name).phase is Phase.RUNNING, PATIENCE_S)
    wait_until(lambda: (held(api, OURS), held(api, THEIRS)) == (3, 3), PATIENCE_S)

    cluster.patch_job(OURS, elastic.name, {"spec": {"suspend": True}})
    wait_until(lambda: now().phase is Phase.SUSPENDED and not cluster.list_pods(OURS, elastic.name), PATIENCE_S)
    wait_until(lambda: held(api, OURS) == 0, PATIENCE_S)
    paused = now()
    cluster.patch_job(OURS, elastic.name, {"spec": {"suspend": False}})
    wait_until(lambda: trains(now(), 3) and now().generation > paused.generation, PATIENCE_S)
    assert paused.checkpoint.step == paused.generations[-1].last_step

    end = now()
    assert (end.steps_redone, end.interruptions, end.failures) == (0, (), 0)
    steps = [(group.resumed_step, group.last_step) for group in end.generations]
    assert all(after[0] == before[1] for before, after in itertools.pairwise(steps)), steps
    assert {item.by for item in end.scalings if item.from_workers} >= {"kueue"}
