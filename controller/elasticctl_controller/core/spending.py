"""What the workers of projects cost, by the day: from pods, nodes and prices to US dollars. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.codec import Manifest, from_rfc3339, to_rfc3339
from elasticctl.api.objects import as_mapping, at
from elasticctl.api.observed.cost import node_price
from elasticctl.api.podtemplate import GPU_RESOURCE

HOUR_S, DAY_S = 3600.0, 86_400.0


@dataclass(frozen=True, slots=True)
class Spent:
    """US dollars that a project has spent on the day (UTC) of `at`, up to `at`, in seconds since the epoch."""

    usd: float
    at: float

    @classmethod
    def from_status(cls, quota: Mapping[str, Any]) -> Spent | None:
        """Read the status of an ElasticQuota; None if it is missing or invalid."""
        usd, when = at(quota, "status", "spent", "usd"), from_rfc3339(at(quota, "status", "spent", "at"))
        if not isinstance(usd, int | float) or isinstance(usd, bool) or not usd >= 0 or when is None:
            return None
        return cls(float(usd), when)

    def to_status(self) -> dict[str, Any]:
        """`status.spent` as it is stored."""
        stamp = to_rfc3339(self.at)
        return {"day": stamp[:10], "usd": round(self.usd, 4), "at": stamp}


def spend(before: Spent | None, usd_per_hour: float, now: float) -> Spent:
    """What has been spent by `now`, at this rate since `before`. Each day (UTC) starts at 0.

    Time in which nobody counted, because no controller was leading, is charged at the current rate.
    """
    today = now - now % DAY_S
    if before is None:
        return Spent(0.0, now)
    carried = before.usd if before.at >= today else 0.0
    return Spent(carried + usd_per_hour * max(0.0, now - max(before.at, today)) / HOUR_S, max(now, before.at))


def rates(pods: Iterable[tuple[str, str, int]], nodes: Iterable[Manifest], projects: Iterable[str]) -> dict[str, float]:
    """US dollars per hour of each project, for `pods` of (project, node, GPUs) that hold a place on a node.

    A worker pays for its share of the node's GPUs; one without GPUs, on a machine that has a price, for all of it. No
    project pays more for a node than it costs. Nodes without a known price cost nothing.
    """
    prices = {str(at(node, "metadata", "name")): _price(node) for node in nodes}
    shares: defaultdict[tuple[str, str], float] = defaultdict(float)
    found = dict.fromkeys(projects, 0.0)
    for project, node, gpus in pods:
        if project in found and node in prices:
            _, present = prices[node]
            shares[project, node] += gpus / present if gpus and present else 1.0
    for (project, node), share in shares.items():
        found[project] += min(1.0, share) * prices[node][0]
    return found


def _price(node: Manifest) -> tuple[float, int]:
    """US dollars per hour of a node, and its GPUs."""
    text = str(at(node, "status", "allocatable", GPU_RESOURCE) or "0")
    gpus = int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
    return node_price(as_mapping(at(node, "metadata", "labels")), gpus) or 0.0, gpus
