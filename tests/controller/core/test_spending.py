"""What projects spend by the day."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.observed.cost import node_price
from elasticctl_controller.core.spending import DAY_S, Spent, rates, spend

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
