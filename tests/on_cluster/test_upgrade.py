"""The controller is upgraded and rolled back while jobs run: no worker is restarted, and no event is reported twice."""

from __future__ import annotations

import io
import subprocess
import tarfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import API_VERSION, GROUP, KIND, LABEL_GROUP, PLURAL, ElasticJob
from elasticctl.api.status import Phase
from elasticctl.kubeapi.connection import Connection, list_objects, resource_path
from tests.on_cluster.conftest import stopping
from tests.on_cluster.images import ClusterOfImages
from tests.on_cluster.replicas import ADDRESS, Replica, Replicas
from tests.on_cluster.waiting import wait_until
from tests.support.jobs import FOREVER, shell_job

NAMESPACE = "upgrades"
JOBS = 20
COMMITS_BACK = 100
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The code of a hundred commits ago; where the history does not reach back so far, this code once more."""
    folder = tmp_path_factory.mktemp("older")
    argv = ["git", "-C", str(CHECKOUT), "archive", f"HEAD~{COMMITS_BACK}", "elasticctl", "controller", "training_lib"]
    done = subprocess.run(argv, capture_output=True, check=False, timeout=60)
    if done.returncode:
        print(f"no older code: {done.stderr.decode().strip()}")
        return CHECKOUT
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def jobs(api: Connection, crd: None) -> Iterator[ClusterOfImages]:
    """A namespace for jobs, which is deleted with everything in it in the end."""
    path = resource_path("v1", None, "namespaces")
    api.request("POST", path, {"metadata": {"name": NAMESPACE}})
    yield ClusterOfImages(api)
    api.request("DELETE", f"{path}/{NAMESPACE}")


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    with stopping(Replicas(tmp_path)) as found:
        yield found


def test_nobody_notices_an_upgrade_or_a_rollback(
    api: Connection, jobs: ClusterOfImages, replicas: Replicas, older: Path
) -> None:
    for _ in range(2):
        start(replicas, older)
    replicas.leader()
    for number in range(JOBS):
        jobs.create_job(shell_job(f"job-{number}", FOREVER, namespace=NAMESPACE, grace_s=1))
    wait_until(lambda: all(job.status.phase is Phase.RUNNING for job in all_jobs(api)))
    # An event may come after the status that it is about.
    wait_until(lambda: len({job for job, reason, _ in events(api) if reason == "ElasticJobRunning"}) == JOBS)
    before, reported = pods(api), events(api)
    assert len(before) == JOBS

    # One is lost while no replica leads, between the old leader and the new one.
    lost = "job-0-worker-0"
    leader = replicas.leader()
    replicas.running.sort(key=lambda one: one is leader)  # the leader is the last to go
    roll(replicas, CHECKOUT, lambda: delete(api, lost))
    wait_until(lambda: pods(api).get(lost, before[lost]) != before[lost])
    wait_until(lambda: all(job.status.phase is Phase.RUNNING for job in all_jobs(api)))
    upgraded = pods(api)
    assert upgraded | {lost: before[lost]} == before

    roll(replicas, older)
    replicas.leader()
    delete(api, other := "job-1-worker-0")  # once it has been reported, the controller has seen all other jobs too
    wait_until(lambda: pods(api).get(other, before[other]) != before[other])
    assert pods(api) | {other: before[other]} == upgraded

    def news() -> dict[tuple[str, str, str], int]:
        return {
            event: times - reported.get(event, 0)
            for event, times in events(api).items()
            if times > reported.get(event, 0)
        }

    wait_until(lambda: {"job-0", "job-1"} <= {job for job, _, _ in news()})
    wait_until(lambda: all(job.status.interruptions for job in all_jobs(api) if job.name in ("job-0", "job-1")))
    ends = {job.name: len(job.status.interruptions) for job in all_jobs(api)}
    assert ends == {f"job-{number}": int(number < 2) for number in range(JOBS)}
    assert {job for job, _, _ in news()} == {"job-0", "job-1"}, news()
    assert set(news().values()) == {1}, news()


def start(replicas: Replicas, code: Path) -> Replica:
    """Start a controller of that code, and wait until it is ready."""
    replica = replicas.start(code=code)
    wait_until(lambda: is_ready(replica))
    return replica


def is_ready(replica: Replica) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"http://{ADDRESS}:{replica.port + 1}/readyz", timeout=2) as page:
        return bool(page.status == 200)
    return False


def roll(replicas: Replicas, code: Path, meanwhile: Callable[[], None] = lambda: None) -> None:
    """Replace all, one after the other, as a Deployment does: a new one gets ready before an old one is asked to end.

    `meanwhile` is called when the last of them has been asked.
    """
    *_, last = replicas.running
    for former in list(replicas.running):
        start(replicas, code)
        former.process.terminate()
        if former is last:
            meanwhile()
        assert former.process.wait(120) == 0
        replicas.running.remove(former)


def delete(api: Connection, pod: str) -> None:
    api.request("DELETE", resource_path("v1", NAMESPACE, "pods", pod), {"gracePeriodSeconds": 0})


def all_jobs(api: Connection) -> list[ElasticJob]:
    found = list_objects(api, resource_path(API_VERSION, NAMESPACE, PLURAL))
    return [ElasticJob.from_manifest(item) for item in found]


def pods(api: Connection) -> dict[str, tuple[str, int]]:
    """By name: the uid, and how often its container was started again."""
    params = {"labelSelector": f"{LABEL_GROUP}={GROUP}"}
    found = list_objects(api, resource_path("v1", NAMESPACE, "pods"), params)
    return {pod["metadata"]["name"]: (pod["metadata"]["uid"], _restarts(pod)) for pod in found}


def _restarts(pod: Manifest) -> int:
    return sum(one["restartCount"] for one in pod.get("status", {}).get("containerStatuses", ()))


def events(api: Connection) -> dict[tuple[str, str, str], int]:
    """How often each event has been reported, of any job: by job, reason and message."""
    found: Counter[tuple[str, str, str]] = Counter()
    for event in list_objects(api, resource_path("v1", NAMESPACE, "events")):
        about = event["involvedObject"]
        if about.get("kind") == KIND:
            found[about["name"], event["reason"], event["message"]] += event.get("count") or 1
    return dict(found)
