"""What projects spend on a cluster: counted, kept in the quota's status, and taken over after a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elasticctl.api.observed.cost import node_price
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from elasticctl_controller.kube.spending import DAY_S, KubeQuotas, Spending, Spent, jobs_of, rates, spend
from tests.support.control import ControlApi
from tests.support.controller.bench import Bench
from tests.support.waiting import wait_until

QUOTAS = "/apis/elastic.pytorch.org/v1alpha1/elasticquotas"
LABELS = {"node.kubernetes.io/instance-type": "g5.xlarge"}
MORNING = 20_000 * DAY_S + 3600


class Ledger:
    """Quotas and their spending, with a clock of its own, on the cluster of a bench."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.now, self.told = bench, MORNING, list[str]()
        self.api = LimitedApi(bench.control.connection(), TokenBucket(10_000, 10_000))
        self.quotas = KubeQuotas(self.api)
        self.changed: list[str] = []
        self.quotas.subscribe(self.changed.append)
        self.quotas.reflector.start()
        self.spending = self.restarted()

    def restarted(self) -> Spending:
        return Spending(self.api, self.quotas, self.bench.workload, self.told.append, lambda: self.now)

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
    assert ledger.told == []
    stored = ledger.bench.control.objects[f"{QUOTAS}/default"]["status"]["spent"]
    assert stored == {"day": "2024-10-04", "usd": round(price, 4), "at": "2024-10-04T02:00:00.000000Z"}
    wait_until(lambda: (ledger.quotas.of("default") or {}).get("status"))
    other = ledger.restarted()  # the next leader: it charges the time in which nobody counted
    ledger.now += 3600
    other.count()
    assert other.today("default") == pytest.approx(2 * price, abs=1e-3)
    assert ledger.told == ["default"]
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


def test_a_change_of_what_is_allowed_is_news_and_a_status_is_none(ledger: Ledger) -> None:
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
