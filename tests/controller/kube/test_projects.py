"""What projects spend on a cluster, and how they share its GPUs."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.gpu_types import INSTANCE_LABEL
from elasticctl.api.observed.cost import node_price
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import HELD, Quota
from elasticctl.api.spec import worker_labels
from elasticctl.api.status import Phase
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.owned_objects import ObjectBuilders, OwnedObjects
from elasticctl_controller.kube.projects import DAY_S, KubeCapacity, KubeQuotas, Spending, Spent, jobs_of, rates, spend
from elasticctl_controller.kube.workload import KubeWorkload, Settings
from tests.support.control import ControlApi
from tests.support.controller.bench import Bench
from tests.support.controller.replica import Replica
from tests.support.controller.shared_nodes import API, GPU, add_node, jobs, pods, run_pods, status
from tests.support.jobs import shell_job
from tests.support.waiting import wait_until

QUOTAS = "/apis/elastic.pytorch.org/v1alpha1/elasticquotas"
LABELS = {"node.kubernetes.io/instance-type": "g5.xlarge"}
MORNING = 20_000 * DAY_S + 3600


class Ledger:
    """Quotas and their spending, with a clock of its own, on the cluster of a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.now, self.announced = bench, MORNING, list[str]()
        self.api = LimitedApi(bench.control.connection(), TokenBucket(10_000, 10_000))
        self.quotas = KubeQuotas(self.api)
        self.changed: list[str] = []
        self.quotas.subscribe(self.changed.append)
        self.quotas.reflector.start()
        self.spending = self.restarted()

    def restarted(self) -> Spending:
        return Spending(self.api, self.quotas, self.bench.workload, self.announced.append, lambda: self.now)

    def limit(self, usd: float) -> None:
        self.bench.control.put(
            f"{QUOTAS}/default", {"metadata": {"name": "default"}, "spec": {"allowed": {"usdPerDay": usd}}}
        )
        wait_until(lambda: self.quotas.of("default") is not None)


@pytest.fixture
def ledger(control: ControlApi) -> Iterator[Ledger]:
    bench = Bench(control)
    bench.begin()
    found = Ledger(bench)
    yield found
    found.quotas.reflector.stop()
    bench.workload.stop()


def test_an_hour_of_a_worker_is_counted_kept_and_stops_the_project(ledger: Ledger) -> None:
    price = node_price(LABELS, 1)
    assert price is not None
    node = {"metadata": {"name": "n1", "labels": LABELS}, "status": {"allocatable": {"nvidia.com/gpu": "1"}}}
    ledger.bench.control.put("/api/v1/nodes/n1", node)
    job = ledger.bench.submit()
    ledger.bench.place(ledger.bench.create(job), "n1")
    wait_until(lambda: ledger.bench.pods(job)[0].node == "n1" and ledger.bench.workload.nodes.get("n1"))
    ledger.limit(1.5 * price)
    ledger.spending.count()
    assert ledger.spending.today("default") == 0.0
    ledger.now += 3600
    ledger.spending.count()
    assert ledger.spending.today("default") == pytest.approx(price)
    assert ledger.announced == []
    stored = ledger.bench.control.objects[f"{QUOTAS}/default"]["status"]["spent"]
    assert stored == {"day": "2024-10-04", "usd": round(price, 4), "at": "2024-10-04T02:00:00.000000Z"}
    wait_until(lambda: (ledger.quotas.of("default") or {}).get("status"))
    other = ledger.restarted()  # the next leader: it charges the time in which spending was not counted
    ledger.now += 3600
    other.count()
    assert other.today("default") == pytest.approx(2 * price, abs=1e-3)
    assert ledger.announced == ["default"]
    assert jobs_of(ledger.bench.workload, "default") == ["default/job"]
    ledger.now += DAY_S
    assert other.today("default") == 0.0


def test_a_worker_that_outlives_its_job_pays_for_its_own_gpus_and_not_for_the_whole_node(ledger: Ledger) -> None:
    labels = {"node.kubernetes.io/instance-type": "g4dn.12xlarge"}
    price = node_price(labels, 4)
    assert price is not None
    node = {"metadata": {"name": "n1", "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}}
    ledger.bench.control.put("/api/v1/nodes/n1", node)
    job = ledger.bench.submit(container={"resources": {"limits": {"nvidia.com/gpu": 1}}})
    ledger.bench.place(ledger.bench.create(job), "n1")
    wait_until(lambda: ledger.bench.pods(job)[0].node == "n1" and ledger.bench.workload.nodes.get("n1"))
    ledger.bench.control.remove("/apis/elastic.pytorch.org/v1alpha1/namespaces/default/elasticjobs/job")
    wait_until(lambda: ledger.bench.workload.get_job("default/job") is None)
    ledger.limit(100 * price)
    ledger.spending.count()
    ledger.now += 3600
    ledger.spending.count()
    assert ledger.spending.today("default") == pytest.approx(price / 4)


def test_a_change_of_the_limits_is_announced_and_a_change_of_the_status_is_not(ledger: Ledger) -> None:
    ledger.limit(3.0)
    wait_until(lambda: ledger.changed == ["default"])
    ledger.spending.count()
    wait_until(lambda: (ledger.quotas.of("default") or {}).get("status"))
    assert ledger.changed == ["default"]
    ledger.limit(4.0)
    wait_until(lambda: ledger.changed == ["default", "default"])


def test_a_project_whose_quota_is_gone_is_no_error(ledger: Ledger) -> None:
    ledger.limit(3.0)
    ledger.bench.control.remove(f"{QUOTAS}/default")
    ledger.spending.count()
    assert ledger.spending.today("default") == 0.0


MIDNIGHT = 20_000 * DAY_S
INSTANCE = "node.kubernetes.io/instance-type"


def node(name: str, gpus: int, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": {"nvidia.com/gpu": str(gpus)}}}


def test_a_day_begins_with_nothing_and_adds_up() -> None:
    noon = MIDNIGHT + DAY_S / 2
    first = spend(None, 7.0, noon)
    assert first == Spent(0.0, noon)
    assert spend(first, 7.0, noon + 1800) == Spent(3.5, noon + 1800)
    assert spend(Spent(90.0, MIDNIGHT - 60), 6.0, MIDNIGHT + 600) == Spent(1.0, MIDNIGHT + 600)


def test_a_clock_that_goes_back_gives_nothing_back() -> None:
    before = Spent(5.0, MIDNIGHT + 100)
    assert spend(before, 10.0, MIDNIGHT + 40) == before


def test_what_is_stored_is_read_back_and_anything_else_is_nothing() -> None:
    spent = Spent(12.3456, MIDNIGHT + 60)
    assert spent.to_status()["day"] == "2024-10-04"
    assert Spent.from_status({"status": {"spent": spent.to_status()}}) == spent
    for damaged in ({}, {"usd": True, "at": "2024-10-04T00:00:00Z"}, {"usd": -1, "at": "x"}, {"usd": float("nan")}):
        assert Spent.from_status({"status": {"spent": damaged}}) is None


def test_a_worker_pays_for_its_share_of_a_node() -> None:
    nodes = [node("big", 4, **{INSTANCE: "g4dn.12xlarge"}), node("unknown", 1), node("other", 1)]
    pods = [("a", "big", 1), ("a", "big", 1), ("b", "big", 2), ("a", "unknown", 1), ("c", "big", 4), ("a", "gone", 1)]
    price = node_price({INSTANCE: "g4dn.12xlarge"}, 4)
    assert price is not None
    assert rates(pods, nodes, ["a", "b", "d"]) == pytest.approx({"a": price / 2, "b": price / 2, "d": 0.0})


def test_no_project_pays_more_for_a_node_than_it_costs() -> None:
    nodes = [node("one", 1, **{INSTANCE: "g5.xlarge"})]
    pods = [("a", "one", 0)] * 5
    assert rates(pods, nodes, ["a"]) == {"a": node_price({INSTANCE: "g5.xlarge"}, 1)}


def test_spot_is_cheaper_and_gcps_attached_gpus_count() -> None:
    listed = node_price({INSTANCE: "g5.xlarge"}, 1)
    spot = node_price({INSTANCE: "g5.xlarge", "karpenter.sh/capacity-type": "spot"}, 1)
    assert listed is not None
    assert spot is not None
    assert spot < listed
    t4 = {INSTANCE: "n1-standard-8", "cloud.google.com/gke-accelerator": "nvidia-tesla-t4"}
    two, four = node_price(t4, 2), node_price(t4, 4)
    assert two is not None
    assert four == 2 * two
    assert node_price({INSTANCE: "m5.large"}, 0) is None


def add_quota(control: ControlApi, project: str, **guaranteed: int) -> None:
    control.put(f"{API}/elasticquotas/{project}", Quota(project, guaranteed=guaranteed).to_manifest())


@pytest.fixture
def controller(control: ControlApi, tmp_path: Path) -> Iterator[Replica]:
    add_node(control, "n1", 4, **{INSTANCE_LABEL: "g4dn.12xlarge"})
    add_quota(control, "a", t4=2)
    add_quota(control, "b", t4=2)
    with Replica(control, tmp_path, "only", "--sharing") as replica:
        wait_until(replica.leads)
        yield replica
        assert replica.end(signal.SIGTERM) == 0
        assert "error" not in replica.log.read_text()


def trained(control: ControlApi, namespace: str, name: str, workers: int) -> bool:
    run_pods(control, namespace, "n1")
    found = status(control, namespace, name)
    return found.phase is Phase.RUNNING and found.active == workers == len(control.names(pods(namespace)))


def test_a_job_grows_gives_way_and_grows_back(control: ControlApi, controller: Replica) -> None:
    automatic = {"minReplicas": 2, "maxReplicas": 4, "sharing": {"automatic": True}}
    control.put(f"{jobs('a')}/elastic", shell_job("elastic", "true", 2, namespace="a", container=GPU, **automatic))
    wait_until(lambda: trained(control, "a", "elastic", 4))
    share = status(control, "a", "elastic").share
    assert share is not None
    assert (share.workers, share.borrowed, share.pool) == (4, 2, "t4")
    control.put(f"{jobs('b')}/guest", shell_job("guest", "true", 2, namespace="b", container=GPU, minReplicas=2))
    wait_until(lambda: trained(control, "a", "elastic", 2))
    wait_until(lambda: trained(control, "b", "guest", 2))
    assert "b/guest" in status(control, "a", "elastic").scalings[-1].message
    assert controller.get(controller.health_port, "/healthz")[0] == 200


def floor_of(control: ControlApi) -> tuple[KubeWorkload, KubeQuotas, KubeCapacity]:
    api = LimitedApi(control.connection(), TokenBucket(10_000, 10_000))
    nothing = ObjectBuilders(lambda job, pod: [], lambda job: {})
    workload = KubeWorkload(
        api, Settings("", "me", node_grace_s=0.1), OwnedObjects(api, nothing), lambda job, pods: lambda pod: pod
    )
    quotas = KubeQuotas(api)
    return workload, quotas, KubeCapacity(api, workload, quotas)


def test_the_allocator_is_woken_by_relevant_changes_and_not_by_progress(control: ControlApi) -> None:
    announced: list[int] = []
    workload, quotas, floor = floor_of(control)
    workload.start()
    quotas.reflector.start()
    floor.subscribe(lambda: announced.append(1))
    floor.reflector.start()
    try:
        job = control.put(f"{jobs('a')}/job", shell_job("job", "true", namespace="a"))
        wait_until(lambda: announced)
        wait_until(lambda: list(floor.all_jobs()))

        def write(**fields: Any) -> bool:
            """Write a status; True once it was news."""
            announced.clear()
            written = control.put(f"{jobs('a')}/job", {**job, "metadata": dict(job["metadata"]), "status": fields})
            version = written["metadata"]["resourceVersion"]
            wait_until(lambda: next(iter(floor.all_jobs()))["metadata"]["resourceVersion"] == version)
            return bool(announced)

        assert write(phase="Running")
        assert not write(phase="Running", progress={"step": 1}, checkpoint={"step": 1}, generations=[{"lastStep": 1}])
        assert write(phase="Running", active=1)
        announced.clear()
        add_quota(control, "a", t4=1)
        wait_until(lambda: announced)
        announced.clear()
        add_node(control, "n1", 2)
        wait_until(lambda: announced)
        assert [node["status"]["allocatable"] for node in floor.healthy_nodes()] == [{GPU_RESOURCE: "2"}]
        control.remove("/api/v1/nodes/n1")
        wait_until(lambda: floor.healthy_nodes() == [])
    finally:
        floor.reflector.stop()
        quotas.reflector.stop()
        workload.stop()


def put_foreign_pod(
    control: ControlApi, name: str, gpus: int, node: str, phase: str = "Running", **metadata: object
) -> None:
    """A pod that is no worker."""
    container = {"name": "c", "resources": {"limits": {GPU_RESOURCE: str(gpus)}}} if gpus else {"name": "c"}
    spec = {"containers": [container], **({"nodeName": node} if node else {})}
    placing = {"type": "PodScheduled", "status": "True"}
    status = {"phase": phase, "conditions": [] if phase == "New" else [placing]}
    pod = {"metadata": {"name": name, "namespace": "x", **metadata}, "spec": spec, "status": status}
    control.put(f"{pods('x')}/{name}", pod)


def test_what_other_pods_hold_is_seen_until_they_end(control: ControlApi) -> None:
    announced: list[int] = []
    add_node(control, "n1", 4)
    add_node(control, "n2", 4)
    put_foreign_pod(control, "notebook", 2, "n1")
    put_foreign_pod(control, "finished", 4, "n2", "Succeeded")
    workload, quotas, floor = floor_of(control)
    workload.start()
    quotas.reflector.start()
    floor.subscribe(lambda: announced.append(1))
    floor.reflector.start()

    def held() -> list[object]:
        return [node["status"].get(HELD) for node in floor.healthy_nodes()]

    try:
        wait_until(lambda: held() == [{GPU_RESOURCE: 2}, None])
        announced.clear()
        put_foreign_pod(control, "server", 1, "n1")
        wait_until(lambda: announced and held() == [{GPU_RESOURCE: 3}, None])
        put_foreign_pod(control, "waits", 8, "")
        put_foreign_pod(control, "web", 0, "n2")
        put_foreign_pod(control, "notebook", 2, "n1", "Failed")
        wait_until(lambda: held() == [{GPU_RESOURCE: 1}, None])
        put_foreign_pod(control, "sent", 10**15, "n1", "New")  # a pod that names a node holds nothing there yet
        put_foreign_pod(control, "sent-worker", 10**15, "n1", "New", labels=worker_labels("job", 0))
        put_foreign_pod(control, "waits", 3, "n2", "Pending")
        wait_until(lambda: held() == [{GPU_RESOURCE: 1}, {GPU_RESOURCE: 3}])
        control.remove(f"{pods('x')}/server")
        wait_until(lambda: held() == [None, {GPU_RESOURCE: 3}])
        announced.clear()
        labels, owner = worker_labels("job", 0), {"kind": "ElasticJob", "name": "job", "uid": "u", "controller": True}
        put_foreign_pod(control, "pretender", 2, "n1", labels=labels)
        wait_until(lambda: announced and held() == [{GPU_RESOURCE: 2}, {GPU_RESOURCE: 3}])
        put_foreign_pod(control, "job-pretender", 1, "n1", labels=labels, ownerReferences=[owner])
        wait_until(lambda: held() == [{GPU_RESOURCE: 3}, {GPU_RESOURCE: 3}])
        put_foreign_pod(control, "job-worker-0", 1, "n1", labels=labels, ownerReferences=[owner])
        wait_until(lambda: held() == [{GPU_RESOURCE: 4}, {GPU_RESOURCE: 3}])  # there is no such job
        job = shell_job("job", "true", namespace="x")
        control.put(f"{jobs('x')}/job", {**job, "metadata": {**job["metadata"], "uid": "u"}})
        put_foreign_pod(control, "pretender", 2, "n1", "Failed", labels=labels)
        wait_until(lambda: held() == [{GPU_RESOURCE: 1}, {GPU_RESOURCE: 3}])
        other = {**owner, "kind": "ConfigMap", "uid": "v"}
        refs = [other, {**owner, "controller": False}]
        put_foreign_pod(control, "job-worker-1", 1, "n1", labels=labels, ownerReferences=refs)
        wait_until(lambda: held() == [{GPU_RESOURCE: 2}, {GPU_RESOURCE: 3}])
        selectors = {request.params.get("fieldSelector") for request in control.requests if "/pods" in request.path}
        assert "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed" in selectors
    finally:
        floor.reflector.stop()
        quotas.reflector.stop()
        workload.stop()


def test_a_job_waits_for_gpus_that_others_hold(control: ControlApi, controller: Replica) -> None:
    put_foreign_pod(control, "notebook", 1, "n1")
    big = shell_job("big", "true", 4, namespace="a", container=GPU, minReplicas=4)
    control.put(f"{jobs('a')}/big", big)
    wait_until(lambda: status(control, "a", "big").reason == "Queued")
    assert control.names(pods("a")) == []
    control.remove(f"{pods('x')}/notebook")
    wait_until(lambda: len(control.names(pods("a"))) == 4)
