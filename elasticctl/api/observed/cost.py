"""The cost of a job, planned and so far, compared with on-demand capacity.

On-demand prices are list prices; spot is estimated as a share of them unless live prices are known. A job has no cost
if its pods do not ask for instances with a known price (the local cluster, on-premises clusters, jobs without GPUs).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from elasticctl.api.goal import ON_DEMAND, SPOT, Prices, capacity_of, type_of
from elasticctl.api.gpu_types import AWS_CAPACITY_LABELS, GKE_GPU_LABEL, GKE_SPOT_LABEL, GPU_TYPES, INSTANCE_LABEL
from elasticctl.api.podtemplate import Hardware, capacity, hardware, node_labels
from elasticctl.api.spec import ElasticJob

_ATTACHED_TO = "n1-standard"


@dataclass(frozen=True, slots=True)
class PriceList:
    """On-demand prices of one provider, in US dollars per hour; `attached` are those of GPUs attached to a node.

    `spot_share` is the estimated price of spot as a share of on-demand. `date` is when the prices were recorded.
    """

    region: str
    date: str
    source: str
    spot_share: float
    per_hour: Mapping[str, float]
    attached: Mapping[str, float] = field(default_factory=dict)

    def node_per_hour(self, instance: str, gpu: str, gpus: int) -> float | None:
        """The price of an on-demand node of this type with `gpus` GPUs; None if it is not in the list."""
        if instance != _ATTACHED_TO:
            return self.per_hour.get(instance)
        if gpu not in self.attached:
            return None
        return gpus * (self.attached[gpu] + self.attached["n1_standard_per_gpu"])


@dataclass(frozen=True, slots=True)
class SpotPrices:
    """Live spot prices in US dollars per hour by instance type, of the cheapest zone of a region.

    `at` is when they were queried, in seconds since the epoch.
    """

    region: str
    at: float
    per_hour: Mapping[str, float]


@functools.cache
def price_list(provider: str) -> PriceList | None:
    """The prices of a provider; None for one without prices (local, plain Kubernetes)."""
    import tomllib

    data = tomllib.loads(resources.files("elasticctl.api").joinpath("prices.toml").read_text("utf-8"))
    found: Mapping[str, Any] | None = data.get(provider)
    if provider == "spot" or found is None:
        return None
    return PriceList(
        region=found["region"],
        date=str(found["date"]),
        source=found["source"],
        spot_share=data["spot"]["share_of_on_demand"],
        per_hour=found["per_hour"],
        attached=found.get("attached", {}),
    )


@dataclass(frozen=True, slots=True)
class Rate:
    """One node's on-demand price in US dollars per hour: the cheapest and the most expensive suitable instance type.

    `live` holds the current spot prices if they are known; otherwise spot is estimated.
    """

    instances: tuple[str, ...]
    low: float
    high: float
    prices: PriceList
    live: SpotPrices | None = None

    @property
    def spot_is_live(self) -> bool:
        """True if the spot price of any of the instance types is known."""
        return bool(self._live_prices())

    @property
    def spot_range(self) -> tuple[float, float]:
        """The price of one spot node: the cheapest and the most expensive type."""
        known = self._live_prices()
        return (min(known), max(known)) if known else (self.spot(self.low), self.spot(self.high))

    def spot(self, on_demand: float) -> float:
        """The spot price, known or estimated, of what costs `on_demand` at the cheapest type."""
        known = self._live_prices()
        return on_demand * (min(known) / self.low if known else self.prices.spot_share)

    def _live_prices(self) -> list[float]:
        per_hour = self.live.per_hour if self.live is not None else {}
        return [per_hour[instance] for instance in self.instances if instance in per_hour]


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars spent so far at the cheapest suitable instance type, and what the same would have cost on demand."""

    spent: float
    on_demand: float
    rate: Rate

    @property
    def saved(self) -> float:
        """What spot has saved."""
        return self.on_demand - self.spent


def rate(provider: str, instances: Sequence[str], gpu: str, gpus: int) -> Rate | None:
    """The price of a node of any of these instance types; None if no price is known for any of them."""
    prices = price_list(provider)
    if prices is None:
        return None
    found = [(prices.node_per_hour(instance, gpu, gpus), instance) for instance in instances]
    known = sorted((price, instance) for price, instance in found if price is not None)
    if not known:
        return None
    return Rate(tuple(instance for _, instance in known), known[0][0], known[-1][0], prices)


def node_price(labels: Mapping[str, Any], gpus: int) -> float | None:
    """The price, in US dollars per hour, of a node with these labels and this many GPUs; None if it is unknown."""
    instance = str(labels.get(INSTANCE_LABEL, ""))
    accelerator = labels.get(GKE_GPU_LABEL)
    gpu = next((name for name, one in GPU_TYPES.items() if accelerator and one.gke_accelerator == accelerator), "")
    spot = any(labels.get(label) == value for label, value, _ in AWS_CAPACITY_LABELS)
    spot = spot or labels.get(GKE_SPOT_LABEL) == "true"
    attached = instance.startswith(f"{_ATTACHED_TO}-")
    for provider in ("aws", "gcp"):
        found = rate(provider, (_ATTACHED_TO if attached else instance,), gpu, gpus)
        if found is not None:
            return found.spot(found.low) if spot else found.low
    return None


def cost(job: ElasticJob, now: float) -> Cost | None:
    """What a job has cost up to `now` (seconds since the epoch); None if its nodes have no known price.

    Workers of unknown capacity count as on-demand.
    """
    one = rate_of(job)
    seconds = worker_seconds(job, now)
    if one is None or not seconds:
        return None
    hours = {kind: spent_s / 3600 for kind, spent_s in seconds.items()}
    on_demand = one.low * sum(hours.values())
    spot_hours = hours.get(SPOT, 0.0)
    return Cost(on_demand - one.low * spot_hours + one.spot(one.low * spot_hours), on_demand, one)


def prices_of(job: ElasticJob) -> Prices | None:
    """The prices of a worker of this job, on demand and on spot, from its goal or else from the price list."""
    if job.goal is not None and job.goal.prices is not None:
        return job.goal.prices
    one = rate_of(job)
    return None if one is None else Prices(one.low, one.spot(one.low), one.prices.source, one.prices.date)


def spent_usd(seconds: Mapping[str, float], prices: Prices) -> float:
    """The cost of these seconds of workers by capacity, where unknown capacity counts as on demand."""
    spot_s = seconds.get(SPOT, 0.0)
    return (spot_s * prices.spot + (sum(seconds.values()) - spot_s) * prices.on_demand) / 3600


def rate_of(job: ElasticJob) -> Rate | None:
    """The price of a node of this job's workers, from its goal or from what its pod template asks for."""
    said = job.goal.prices if job.goal is not None else None
    if said is not None:
        known = PriceList("", said.date, said.source, said.spot / said.on_demand, {})
        return Rate((said.source or "a worker",), said.on_demand, said.on_demand, known)
    labels, found = node_labels(job.template), hardware(job)
    if labels.get(INSTANCE_LABEL):
        return rate("aws", labels[INSTANCE_LABEL], "", found.gpus_per_worker)
    return _rate_at_gcp(labels, found)


def usd_per_h(job: ElasticJob, pool: str) -> float:
    """The price of a worker in a pool, for comparing pools; relative to an on-demand worker where no price is known."""
    gpus, named = hardware(job).gpus_per_worker, type_of(pool)
    of_type = (rate(provider, (named,), "", gpus) for provider in ("aws", "gcp")) if named else ()
    one = next((found for found in of_type if found is not None), None) or rate_of(job)
    on_demand, spot = (1.0, 0.3) if one is None else (one.low, one.spot(one.low))
    return spot if capacity_of(pool) == SPOT else on_demand


def worker_seconds(job: ElasticJob, now: float) -> dict[str, float]:
    """Seconds that workers have run, by capacity: those that have ended, from the status, and those still running."""
    status = job.status
    total = {kind: spent_s for kind, spent_s in status.worker_seconds.items() if spent_s > 0}
    asked = capacity(job.template) or ON_DEMAND
    for worker in status.workers:
        if worker.cause is None and worker.started_at is not None:
            kind = capacity_of(worker.pool) or asked
            total[kind] = total.get(kind, 0.0) + max(0.0, now - worker.started_at)
    return total


def _rate_at_gcp(labels: Mapping[str, tuple[str, ...]], found: Hardware) -> Rate | None:
    """On GCP the label names the GPU; the instance types are those with that many of it."""
    wanted = labels.get(GKE_GPU_LABEL, ())
    gpu = next((gpu for gpu in GPU_TYPES.values() if gpu.gke_accelerator in wanted), None)
    if gpu is None:
        return None
    return rate("gcp", gpu.gcp.get(found.gpus_per_worker, ()), gpu.name, found.gpus_per_worker)
