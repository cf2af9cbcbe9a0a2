"""What nodes cost per hour: the list prices of `prices.toml`. Reads package data only."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

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

    data = tomllib.loads(resources.files("elasticctl").joinpath("prices.toml").read_text("utf-8"))
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
