"""What a job costs, planned and so far, against what it would cost on demand. Pure but for the price list.

List prices, and for spot a share of them: estimates, and said to be. A job whose pods do not ask for instances with a
known price (on this machine, on a cluster of one's own, without GPUs) has none.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from elasticctl.api.gpu_types import GKE_GPU_LABEL, GPU_TYPES, INSTANCE_LABEL
from elasticctl.api.podtemplate import ON_DEMAND, SPOT, Hardware, capacity, hardware, node_labels
from elasticctl.api.spec import ElasticJob

if TYPE_CHECKING:
    pass


_ATTACHED_TO = "n1-standard"


@dataclass(frozen=True, slots=True)
class PriceList:
    """On-demand prices of one provider, in US dollars per hour; `attached` those of GPUs that are attached to a node.

    `spot_share` is what spot is estimated at, as a share of on-demand. `date` is when the prices were written down.
    """

    region: str
    date: str
    source: str
    spot_share: float
    per_hour: Mapping[str, float]
    attached: Mapping[str, float] = field(default_factory=dict)

    def node_per_hour(self, instance: str, gpu: str, gpus: int) -> float | None:
        """An on-demand node of this type with so many GPUs of this type; None where the list does not say."""
        if instance != _ATTACHED_TO:
            return self.per_hour.get(instance)
        if gpu not in self.attached:
            return None
        return gpus * (self.attached[gpu] + self.attached["n1_standard_per_gpu"])


@dataclass(frozen=True, slots=True)
class SpotPrices:
    """Spot as it was asked for, in US dollars per hour by instance type, in the cheapest zone of a region.

    `at`: when, in seconds since the epoch.
    """

    region: str
    at: float
    per_hour: Mapping[str, float]


@functools.cache
def price_list(provider: str) -> PriceList | None:
    """The prices of a provider; None for one without (this machine, a cluster of one's own)."""
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
    """One node's on-demand price in US dollars per hour, of the cheapest and the dearest instance type that will do.

    `live`: what spot costs there now, where that is known; it is estimated otherwise.
    """

    instances: tuple[str, ...]
    low: float
    high: float
    prices: PriceList
    live: SpotPrices | None = None

    @property
    def spot_is_live(self) -> bool:
        """Is spot known for any of the instance types?"""
        return bool(self._live_prices())

    @property
    def spot_range(self) -> tuple[float, float]:
        """One node on spot, of the cheapest and the dearest type."""
        known = self._live_prices()
        return (min(known), max(known)) if known else (self.spot(self.low), self.spot(self.high))

    def spot(self, on_demand: float) -> float:
        """What spot costs, or is estimated at, for something that costs this much on demand at the cheapest type."""
        known = self._live_prices()
        return on_demand * (min(known) / self.low if known else self.prices.spot_share)

    def _live_prices(self) -> list[float]:
        per_hour = self.live.per_hour if self.live is not None else {}
        return [per_hour[instance] for instance in self.instances if instance in per_hour]


@dataclass(frozen=True, slots=True)
class Cost:
    """US dollars so far, at the cheapest instance type that will do: spent, and had it all been on demand."""

    spent: float
    on_demand: float
    rate: Rate

    @property
    def saved(self) -> float:
        """What spot has saved."""
        return self.on_demand - self.spent


def rate(provider: str, instances: Sequence[str], gpu: str, gpus: int) -> Rate | None:
    """What one of these instance types costs; None where no price is known for any of them."""
    pass  # not for jobs without a price

    prices = price_list(provider)
    if prices is None:
        return None
    found = [(prices.node_per_hour(instance, gpu, gpus), instance) for instance in instances]
    known = sorted((price, instance) for price, instance in found if price is not None)
    if not known:
        return None
    return Rate(tuple(instance for _, instance in known), known[0][0], known[-1][0], prices)


def cost(job: ElasticJob, now: float) -> Cost | None:
    """What a job has cost up to `now` (seconds since the epoch); None where its nodes have no known price.

    Time of workers whose capacity is not known counts as on-demand.
    """
    one = rate_of(job)
    seconds = worker_seconds(job, now)
    if one is None or not seconds:
        return None
    hours = {kind: spent_s / 3600 for kind, spent_s in seconds.items()}
    on_demand = one.low * sum(hours.values())
    spot_hours = hours.get(SPOT, 0.0)
    return Cost(on_demand - one.low * spot_hours + one.spot(one.low * spot_hours), on_demand, one)


def rate_of(job: ElasticJob) -> Rate | None:
    """What a node of this job's workers costs, from what its pod template asks for."""
    labels, found = node_labels(job.template), hardware(job)
    if labels.get(INSTANCE_LABEL):
        return rate("aws", labels[INSTANCE_LABEL], "", found.gpus_per_worker)
    return _rate_at_gcp(labels, found)


def worker_seconds(job: ElasticJob, now: float) -> dict[str, float]:
    """Seconds that workers have run, by capacity: those that ended, as the status says, and those that run."""
    status = job.status
    total = {kind: spent_s for kind, spent_s in status.worker_seconds.items() if spent_s > 0}
    kind = capacity(job.template) or ON_DEMAND
    for worker in status.workers:
        if worker.cause is None and worker.started_at is not None:
            total[kind] = total.get(kind, 0.0) + max(0.0, now - worker.started_at)
    return total


def _rate_at_gcp(labels: Mapping[str, tuple[str, ...]], found: Hardware) -> Rate | None:
    """There the label is of the GPU, and the instance types are those that have so many of it."""
    wanted = labels.get(GKE_GPU_LABEL, ())
    gpu = next((gpu for gpu in GPU_TYPES.values() if gpu.gke_accelerator in wanted), None)
    if gpu is None:
        return None
    return rate("gcp", gpu.gcp.get(found.gpus_per_worker, ()), gpu.name, found.gpus_per_worker)
