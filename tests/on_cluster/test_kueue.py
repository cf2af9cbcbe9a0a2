"""Jobs in queues of Kueue, which decides itself: they grow and shrink worker by worker."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.spec import PRIORITY_CLASS_LABEL
from elasticctl.api.status import JobStatus, Phase
from elasticctl.cluster.kube.client import KubeCluster
from elasticctl.kubeapi.connection import MERGE_PATCH, Connection, resource_path
from tests.on_cluster.arrangements import ARRANGEMENTS, manifest
from tests.on_cluster.conftest import stopping
from tests.on_cluster.kueue import (
    FLAVOR,
    FLAVOR_LABEL,
    GROUP,
    ROOT,
    VERSION,
    describe,
    held,
    queue_of_flavors,
    set_quota,
)
from tests.on_cluster.random_jobs import GUARANTEED, PROJECTS, Job
from tests.on_cluster.replicas import Replicas
from tests.on_cluster.scenario_player import ScenarioPlayer, open_player
from tests.on_cluster.waiting import wait_until
from tests.support.sharing_scenario import status, trains

SCENARIOS = int(os.environ.get("ELASTICCTL_TEST_KUEUE_SCENARIOS", "1"))
"""How many random scenarios run; each takes some seconds on an idle machine."""
KUEUE = ARRANGEMENTS["kueue"]
OURS, THEIRS = PROJECTS
STILL_S = 45.0


@pytest.fixture(scope="module")
def player(api: Connection, crd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScenarioPlayer]:
    """A cluster of six GPUs with Kueue, three of them in either of two queues of one cohort, and a controller."""
    with stopping(Replicas(tmp_path_factory.mktemp("controllers"))) as controllers:
        controllers.start()
        controllers.leader()
        with open_player(api, KUEUE, STILL_S) as found:
            yield found


@pytest.fixture
def two_gpus(api: Connection) -> Iterator[None]:
    """Only two GPUs in all, both of one queue."""
    set_quota(api, OURS, 2)
    set_quota(api, THEIRS, 0)
    yield
    for project in PROJECTS:
        set_quota(api, project, GUARANTEED)


@pytest.fixture
def classes(api: Connection) -> Iterator[tuple[str, str]]:
    """A class of Kueue's of priority 100, and one of pods of 50; yields their names."""
    made = {
        f"{ROOT}/workloadpriorityclasses": (f"{GROUP}/{VERSION}", "WorkloadPriorityClass", "scenario-urgent", 100),
        "/apis/scheduling.k8s.io/v1/priorityclasses": ("scheduling.k8s.io/v1", "PriorityClass", "scenario-pods", 50),
    }
    for path, (version, kind, name, value) in made.items():
        api.request("POST", path, {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "value": value})
    yield "scenario-urgent", "scenario-pods"
    for path, (_, _, name, _) in made.items():
        api.request("DELETE", f"{path}/{name}")


@pytest.fixture(autouse=True)
def what_is_there(player: ScenarioPlayer, api: Connection) -> Iterator[None]:
    """Begin with nothing; print what there is after the test: pytest shows it with one that fails."""
    player.clear()
    yield
    for project in PROJECTS:
        for job in KubeCluster(api).list_jobs(project):
            print(job["metadata"]["name"], status(KubeCluster(api), project, job["metadata"]["name"]))
        print(describe(api, project))


@pytest.mark.parametrize("seed", range(SCENARIOS))
def test_three_jobs_in_two_queues_leave_no_gpu_idle(player: ScenarioPlayer, api: Connection, seed: int) -> None:
    """Jobs come, grow, shrink, pause and end; each time they come to rest with all that they can use."""

    for settled in player.play(seed):
        print(settled)
        assert settled.rest.is_ideal, settled
        # A worker that has just ended gives its quota back in the next pass.
        wait_until(lambda: sum(held(api, project) for project in PROJECTS) == settled.held, STILL_S)  # noqa: B023


def test_workers_that_train_give_way_and_lose_no_step(player: ScenarioPlayer, api: Connection) -> None:
    """A job grows into another queue's quota, gives it back, is suspended, and resumes: each time at the same step."""
    cluster = KubeCluster(api)
    elastic, guest = Job("elastic", OURS, 1, 4, elastic=True), Job("guest", THEIRS, 3, 3, elastic=False)

    def now() -> JobStatus:
        return status(cluster, OURS, elastic.name)

    cluster.create_job(manifest(elastic, KUEUE, train=True))
    wait_until(lambda: trains(now(), 4))
    wait_until(lambda: held(api, OURS) == 4)  # Kueue's own account follows

    cluster.create_job(manifest(guest, KUEUE, train=False))
    wait_until(lambda: trains(now(), 3))
    wait_until(lambda: status(cluster, THEIRS, guest.name).phase is Phase.RUNNING)
    wait_until(lambda: (held(api, OURS), held(api, THEIRS)) == (3, 3))

    cluster.patch_job(OURS, elastic.name, {"spec": {"suspend": True}})
    wait_until(lambda: now().phase is Phase.SUSPENDED and not cluster.list_pods(OURS, elastic.name))
    wait_until(lambda: held(api, OURS) == 0)
    paused = now()
    cluster.patch_job(OURS, elastic.name, {"spec": {"suspend": False}})
    end = wait_until(lambda: trains_again(now(), 3, paused.generation))
    assert paused.checkpoint.step == paused.generations[-1].last_step

    assert (end.steps_redone, end.interruptions, end.failures) == (0, (), 0)
    steps = [(group.resumed_step, group.last_step) for group in end.generations]
    assert all(after[0] == before[1] for before, after in itertools.pairwise(steps)), steps
    assert {item.by for item in end.scalings if item.from_workers} >= {"kueue"}


@pytest.mark.usefixtures("two_gpus")
def test_the_higher_priority_goes_first(player: ScenarioPlayer, api: Connection, classes: tuple[str, str]) -> None:
    """One stops a job that runs; of those that wait, the higher one is next, whether Kueue or the pods rank it."""
    cluster, (urgent, of_pods) = KubeCluster(api), classes

    def runs(name: str) -> bool:
        return status(cluster, OURS, name).phase is Phase.RUNNING

    cluster.create_job(manifest(fixed("usual"), KUEUE, train=False))
    wait_until(lambda: runs("usual"))

    first = manifest(fixed("first"), KUEUE, train=False)
    first["metadata"]["labels"][PRIORITY_CLASS_LABEL] = urgent
    cluster.create_job(first)
    wait_until(lambda: runs("first"))
    wait_until(lambda: not cluster.list_pods(OURS, "usual"))  # they may have ended, but not gone yet
    assert status(cluster, OURS, "usual").phase is Phase.SUSPENDED

    second = manifest(fixed("second"), KUEUE, train=False)
    second["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["priorityClassName"] = of_pods
    cluster.create_job(second)
    wait_until(lambda: is_pending(api, "second"))  # it does not stop a job of a higher priority
    cluster.delete_job(OURS, "first")
    wait_until(lambda: runs("second"))
    assert {pod["spec"]["priorityClassName"] for pod in cluster.list_pods(OURS, "second")} == {of_pods}
    assert status(cluster, OURS, "usual").phase is Phase.SUSPENDED

    cluster.delete_job(OURS, "second")
    wait_until(lambda: runs("usual"))
    end = status(cluster, OURS, "usual")
    assert (end.interruptions, end.failures) == ((), 0)


def test_a_job_comes_back_to_its_queue_by_itself(player: ScenarioPlayer, api: Connection) -> None:
    """Its queue is stopped and started, and its Workload deactivated and activated by somebody else."""
    cluster, job = KubeCluster(api), Job("elastic", OURS, 1, 4, elastic=True)

    def has(workers: int) -> bool:
        pods = cluster.list_pods(OURS, job.name)
        return len(pods) == held(api, OURS) == workers and all(pod["status"]["phase"] == "Running" for pod in pods)

    def stop_queue(policy: str) -> None:
        path = f"{ROOT}/namespaces/{OURS}/localqueues/{OURS}"
        api.request("PATCH", path, {"spec": {"stopPolicy": policy}}, content_type=MERGE_PATCH)

    cluster.create_job(manifest(job, KUEUE, train=False))
    wait_until(lambda: has(4))
    try:
        stop_queue("HoldAndDrain")
        wait_until(lambda: has(0))
        assert status(cluster, OURS, job.name).phase is Phase.SUSPENDED
    finally:
        stop_queue("None")
    wait_until(lambda: has(4))

    own = next(one for one in workloads(api) if one["spec"]["podSets"][0]["count"] == job.least and is_own(one))
    path = f"{ROOT}/namespaces/{OURS}/workloads/{own['metadata']['name']}"
    for active, workers in ((False, 0), (True, 4)):
        api.request("PATCH", path, {"spec": {"active": active}}, content_type=MERGE_PATCH)
        wait_until(lambda workers=workers: has(workers))  # type: ignore[misc]
    assert status(cluster, OURS, job.name).failures == 0


@pytest.fixture
def two_flavors(player: ScenarioPlayer, api: Connection) -> Iterator[str]:
    """Two GPUs of either flavor, each on a node of its own, the second one's tainted; yields the second's name."""
    other = "on-demand"
    node = sorted(item["metadata"]["name"] for item in nodes(api))[-1]
    taint = {"key": FLAVOR_LABEL, "value": other, "effect": "NoSchedule"}
    tolerated = {"key": FLAVOR_LABEL, "operator": "Equal", "value": other, "effect": "NoSchedule"}
    flavor = {"nodeLabels": {FLAVOR_LABEL: other}, "nodeTaints": [taint], "tolerations": [tolerated]}
    kind = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "ResourceFlavor", "metadata": {"name": other}}
    api.request("POST", f"{ROOT}/resourceflavors", {**kind, "spec": flavor})
    patch_node(api, node, {"metadata": {"labels": {FLAVOR_LABEL: other}}, "spec": {"taints": [taint]}})
    queue = queue_of_flavors({FLAVOR: 2, other: 2})
    api.request("PATCH", f"{ROOT}/clusterqueues/{OURS}", {"spec": queue}, content_type=MERGE_PATCH)
    set_quota(api, THEIRS, 0)
    yield other
    player.clear()
    for project in PROJECTS:
        set_quota(api, project, GUARANTEED)
    patch_node(api, node, {"metadata": {"labels": {FLAVOR_LABEL: FLAVOR}}, "spec": {"taints": None}})
    api.request("DELETE", f"{ROOT}/resourceflavors/{other}")


def test_workers_are_on_the_flavor_of_their_job(player: ScenarioPlayer, api: Connection, two_flavors: str) -> None:
    """The first that fits is taken, workers above a minimum stay on it, and a job that is admitted again moves."""
    cluster = KubeCluster(api)

    def flavors(name: str) -> list[str]:
        labels = {item["metadata"]["name"]: item["metadata"]["labels"].get(FLAVOR_LABEL, "") for item in nodes(api)}
        return [labels.get(pod["spec"].get("nodeName", ""), "") for pod in cluster.list_pods(OURS, name)]

    cluster.create_job(manifest(Job("elastic", OURS, 1, 4, elastic=True), KUEUE, train=False))
    wait_until(lambda: flavors("elastic") == [FLAVOR, FLAVOR])
    cluster.create_job(manifest(fixed("other"), KUEUE, train=False))
    wait_until(lambda: flavors("other") == [two_flavors, two_flavors])
    assert flavors("elastic") == [FLAVOR, FLAVOR]

    # While it is suspended, the first flavor goes to another job; the second one comes free.
    cluster.patch_job(OURS, "elastic", {"spec": {"suspend": True}})
    wait_until(lambda: not flavors("elastic") and held(api, OURS) == 2)
    cluster.create_job(manifest(fixed("next"), KUEUE, train=False))
    wait_until(lambda: flavors("next") == [FLAVOR, FLAVOR])
    cluster.delete_job(OURS, "other")
    cluster.patch_job(OURS, "elastic", {"spec": {"suspend": False}})
    wait_until(lambda: flavors("elastic") == [two_flavors, two_flavors])
    wait_until(lambda: status(cluster, OURS, "elastic").phase is Phase.RUNNING)


def fixed(name: str) -> Job:
    """A job of two workers, or none."""
    return Job(name, OURS, 2, 2, elastic=False)


def trains_again(found: JobStatus, workers: int, after: int) -> JobStatus | None:
    """The status of a job once a group of that many, later than `after`, has made a step."""
    return found if trains(found, workers) and found.generations[-1].generation > after else None


def is_pending(api: Connection, job: str) -> bool:
    """Whether Kueue has reported that there is no quota for the job's Workload."""
    found = [one for one in workloads(api) if one["metadata"]["name"].startswith(f"elasticjob-{job}-")]
    said = [item for one in found for item in one.get("status", {}).get("conditions", [])]
    return any((item["type"], item["status"]) == ("QuotaReserved", "False") for item in said)


def is_own(workload: Manifest) -> bool:
    """Whether it is the Workload of the job, and not of a worker above the minimum."""
    return bool(workload["spec"].get("priority", 0) >= 0)


def workloads(api: Connection) -> list[Manifest]:
    found: list[Manifest] = api.request("GET", f"{ROOT}/namespaces/{OURS}/workloads")["items"]
    return found


def nodes(api: Connection) -> list[Manifest]:
    found: list[Manifest] = api.request("GET", "/api/v1/nodes", None, {"labelSelector": "kubelab/real"})["items"]
    return found


def patch_node(api: Connection, name: str, patch: dict[str, Any]) -> None:
    api.request("PATCH", resource_path("v1", None, "nodes", name), patch, content_type=MERGE_PATCH)
