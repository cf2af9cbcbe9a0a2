"""What a job costs, planned and so far, against what it would cost on demand. Pure but for the price list.

List prices, and for spot a share of them: estimates, and said to be. A job whose pods do not ask for instances with a
known price (on this machine, on a cluster of one's own, without GPUs) has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticctl.catalog import GKE_GPU_LABEL, GPU_TYPES, INSTANCE_LABEL
from elasticctl.podtemplate import ON_DEMAND, SPOT, Hardware, capacity, hardware, node_labels
from elasticctl.spec import ElasticJob

if TYPE_CHECKING:
    from elasticctl.prices import PriceList, SpotPrices


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
    from elasticctl.prices import price_list  # not for jobs without a price

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
