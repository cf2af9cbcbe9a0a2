"""Jobs in queues of Kueue, which decides itself: they grow and shrink worker by worker."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import suppress

import pytest

from benchmarks.replicas import Replicas
from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.spec import QUEUE_LABEL
from elasticctl.api.status import Phase
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import Connection
from tests.on_cluster.conftest import tell
from tests.on_cluster.kueue import (
    WORKER_CPU_M,
    describe,
    held,
    kueue,
    set_quota,
)
from tests.on_cluster.trainer import HOST_FOLDER, IMAGE
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import shell_job
from tests.support.sharing_story import status

NAMESPACE = "queued"
QUEUES = ("team-a", "team-b")
FOLDER = HOST_FOLDER / "kueue"
STORIES = int(os.environ.get("ELASTICCTL_TEST_KUEUE_STORIES", "1"))
"""How many stories are told; each takes some seconds on a machine that does nothing else."""
EVENTS = 5
QUIET = "trap 'exit 0' TERM; while :; do sleep 0.2; done"


@pytest.fixture(scope="module")
def cluster(api: Connection, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeCluster]:
    """A cluster with Kueue, two queues in one cohort, and a controller."""
    found = KubeCluster(api)
    with suppress(ConflictError):
        api.request("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    FOLDER.chmod(0o777)  # workers are nobody in particular
    controllers = Replicas(tmp_path_factory.mktemp("controllers"))
    with kueue(api, NAMESPACE, QUEUES):
        try:
            controllers.start()
            controllers.leader()
            yield found
        finally:
            delete_all(found)
            try:
                controllers.stop()
            finally:
                tell(controllers)


@pytest.fixture(autouse=True)
def what_is_there(cluster: KubeCluster, api: Connection) -> Iterator[None]:
    """Print it after the test: pytest shows it with one that fails."""
    yield
    for job in cluster.list_jobs(NAMESPACE):
        print(job["metadata"]["name"], status(cluster, NAMESPACE, job["metadata"]["name"]))
    print(describe(api, NAMESPACE))


def delete_all(cluster: KubeCluster) -> None:
    for job in cluster.list_jobs(NAMESPACE):
        cluster.delete_job(NAMESPACE, job["metadata"]["name"])
    wait_until(lambda: not cluster.list_jobs(NAMESPACE), 60)


def in_queue(manifest: Manifest, queue: str = QUEUES[0]) -> Manifest:
    """The job as `submit --queue` makes it, and with what its pods need in the lab."""
    manifest["metadata"]["labels"] = {QUEUE_LABEL: queue}
    manifest["spec"]["suspend"] = True
    spec = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]
    spec["volumes"] = [{"name": "state", "hostPath": {"path": str(FOLDER), "type": "Directory"}}]
    for container in spec["containers"]:
        container |= {
            "image": IMAGE,
            "volumeMounts": [{"name": "state", "mountPath": "/state"}],
            "resources": {"requests": {"cpu": f"{WORKER_CPU_M}m"}},
        }
    return manifest


def quiet(name: str, least: int, most: int, queue: str) -> Manifest:
    """A job whose workers do nothing, and end when they are told to; of automatic size unless its bounds are equal."""
    size = {"sharing": {"automatic": True}, "minReplicas": least, "maxReplicas": most} if most > least else {}
    return in_queue(shell_job(name, QUIET, most, namespace=NAMESPACE, **size), queue)


@pytest.mark.parametrize("seed", range(STORIES))
def test_three_jobs_in_two_queues_leave_no_worker_idle(cluster: KubeCluster, api: Connection, seed: int) -> None:
    """Jobs and quotas come and go; each time the jobs come to rest with all that they can use."""
    delete_all(cluster)
    chance = random.Random(seed)
    jobs: dict[str, tuple[int, int, str]] = {}
    quota = {queue: chance.randint(1, 4) for queue in QUEUES}
    for queue, workers in quota.items():
        set_quota(api, queue, workers)
    for event in range(EVENTS):
        what = "come" if len(jobs) < 2 else chance.choice(["come", "go", "quota"])
        if what == "go" or (what == "come" and len(jobs) == 3):
            cluster.delete_job(NAMESPACE, (name := chance.choice(sorted(jobs))))
            del jobs[name]
        elif what == "come":
            name, least, queue = f"s{seed}-{event}", chance.randint(1, 2), chance.choice(QUEUES)
            jobs[name] = (least, least + chance.randint(0, 3), queue)
            cluster.create_job(quiet(name, *jobs[name]))
        else:
            queue = chance.choice(QUEUES)
            quota[queue] = chance.randint(1, 4)
            set_quota(api, queue, quota[queue])
        what_is = f"story {seed}, event {event}: {what}, {jobs}, {quota}"
        print(what_is)
        wait_until(lambda: is_at_rest(cluster, api, jobs, quota), 60)


def is_at_rest(
    cluster: KubeCluster, api: Connection, jobs: dict[str, tuple[int, int, str]], quota: dict[str, int]
) -> bool:
    """No quota is idle that a job could use, no minimum waits for workers above one, and all that is held runs."""
    has: dict[str, int] = {}
    for name in jobs:
        with suppress(NotFoundError):
            found = status(cluster, NAMESPACE, name)
            has[name] = found.placed if found.phase is Phase.RUNNING else 0
    pods = sum(len(cluster.list_pods(NAMESPACE, name)) for name in jobs)
    reserved = sum(held(api, queue) for queue in quota)
    if pods != sum(has.values()) or reserved != pods:
        return False
    free = sum(quota.values()) - reserved
    for name, (least, most, queue) in jobs.items():
        need = (most if most == least else least) if not has.get(name) else 1
        above = [
            has[other] - jobs[other][0] for other in has if jobs[other][2] == queue and has[other] > jobs[other][0]
        ]
        spare = sum(above) if not has.get(name) else 0
        if has.get(name, 0) < most and need <= free + spare:
            return False
    return free >= 0
