"""What a job costs: known for every instance type of the catalog, and for nothing else."""

from __future__ import annotations

import math

import pytest

from elasticctl.api.gpu_types import GPU_TYPES
from elasticctl.api.observed.cost import cost, price_list, rate, rate_of, worker_seconds
from elasticctl.api.podtemplate import capacity, node_labels
from elasticctl.api.spec import ElasticJob
from tests.support.job_samples import AT, at
from tests.support.jobs import made

SHAPES = [
    (provider, gpu.name, gpus, instances)
    for provider in ("aws", "gcp")
    for gpu in GPU_TYPES.values()
    for gpus, instances in gpu.nodes(provider).items()
]


@pytest.mark.parametrize(("provider", "gpu", "gpus", "instances"), SHAPES)
def test_every_instance_of_the_catalog_has_a_price(
    provider: str, gpu: str, gpus: int, instances: tuple[str, ...]
) -> None:
    prices = price_list(provider)
    assert prices is not None
    for instance in instances:
        price = prices.node_per_hour(instance, gpu, gpus)
        assert price is not None
        assert 0.1 * gpus < price < 20 * gpus  # a misplaced point would show


def test_the_list_says_where_and_when_it_is_from() -> None:
    for provider in ("aws", "gcp"):
        prices = price_list(provider)
        assert prices is not None
        assert prices.source.startswith("https://")
        assert prices.date.startswith("20")
        assert 0 < prices.spot_share < 1
    assert price_list("local") is None
    assert price_list("spot") is None


def test_attached_gpus_have_a_price_with_their_machine() -> None:
    one = rate("gcp", ("n1-standard",), "t4", 2)
    assert one is not None
    assert one.low == pytest.approx(2 * (0.35 + 0.19))
    assert rate("gcp", ("n1-standard",), "a100", 1) is None
    assert rate("aws", ("m5.large",), "t4", 1) is None


@pytest.mark.parametrize(("provider", "gpu"), [("aws", "t4"), ("gcp", "t4"), ("gcp", "l4"), ("aws", "")])
@pytest.mark.parametrize(("spot", "kind"), [(True, "spot"), (False, "onDemand")])
def test_the_capacity_that_a_job_asks_for_is_read_from_its_manifest(
    provider: str, gpu: str, spot: bool, kind: str
) -> None:
    assert capacity(made(provider, gpu, spot, 1 if gpu else 0).template) == kind


def test_a_job_without_one_capacity() -> None:
    assert capacity({}) == ""
    assert capacity({"spec": {"nodeSelector": {"karpenter.sh/capacity-type": "spot"}}}) == "spot"
    assert capacity({"spec": {"nodeSelector": {"eks.amazonaws.com/capacityType": "CAPACITY_BLOCK"}}}) == "onDemand"
    either = {"key": "karpenter.sh/capacity-type", "operator": "In", "values": ["spot", "on-demand"]}
    required = {"nodeSelectorTerms": [{"matchExpressions": [either]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    assert capacity({"spec": {"affinity": affinity}}) == ""
    for odd in ([], {"spec": 3}, {"spec": {"nodeSelector": [1], "affinity": {"nodeAffinity": "x"}}}):
        assert node_labels(odd) == {}  # type: ignore[arg-type]


def test_spot_hours_and_their_on_demand_price() -> None:
    """An hour of an ended worker, and half an hour of one that runs, at $0.526; spot is at 30 %."""
    running = {"name": "digits-worker-0", "phase": "Running", "startedAt": at(0)}
    ended = {"name": "digits-worker-1", "startedAt": at(0), "cause": "Preempted"}
    job = made(workerSeconds={"spot": 3600.0}, workers=[running, ended])
    assert worker_seconds(job, AT + 1800) == {"spot": 5400.0}
    found = cost(job, AT + 1800)
    assert found is not None
    assert found.on_demand == pytest.approx(1.5 * 0.526)
    assert found.spent == pytest.approx(0.3 * 1.5 * 0.526)
    assert found.rate.instances[0] == "g4dn.xlarge"


def test_on_demand_saves_nothing() -> None:
    found = cost(made("gcp", "a100", spot=False, gpus=8, workerSeconds={"onDemand": 3600.0}), AT)
    assert found is not None
    assert (found.spent, found.saved) == (pytest.approx(29.387), 0.0)


def test_without_a_price_there_is_no_cost() -> None:
    local = ElasticJob.from_manifest({"status": {"workerSeconds": {"unknown": 3600.0}}})
    assert rate_of(local) is None
    assert cost(local, AT) is None
    assert cost(made("aws", "", gpus=0, workerSeconds={"spot": 3600.0}), AT) is None
    assert cost(made(), AT) is None


def test_prices_of_any_size_give_a_cost_that_json_can_hold() -> None:
    prices = {"onDemand": 5e-324, "spot": 1e9}
    manifest = {"spec": {"goal": {"budget": 5, "prices": prices}}, "status": {"workerSeconds": {"spot": 1e6}}}
    job = ElasticJob.from_manifest(manifest)
    found = cost(job, 1e9)
    assert found is None or math.isfinite(found.spent)
