"""Prices of the nodes that a job is going to use, with the current spot price where AWS returns it."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime

from elasticctl.api.gpu_types import GpuType
from elasticctl.api.observed.cost import Rate, rate
from elasticctl.api.text import dollars


def rate_of_nodes(provider: str, gpu: GpuType | None, gpus_per_node: int) -> Rate | None:
    """The price of one node with so many GPUs; None if it is unknown."""
    if gpu is None:
        return None
    instances = gpu.nodes(provider).get(gpus_per_node, ())
    return with_live_spot(rate(provider, instances, gpu.name, gpus_per_node))


def with_live_spot(one: Rate | None) -> Rate | None:
    """The same with the current spot price, if AWS returns it within three seconds."""
    from elasticctl.api.observed.cost import price_list  # not needed for what a job has cost

    if one is None or one.prices is not price_list("aws"):
        return one
    from elasticctl.settings.spot_prices import spot_prices

    return dataclasses.replace(one, live=spot_prices(one.instances, time.time()))


def plan_line(one: Rate, nodes: int) -> str:
    """`4 x g4dn.xlarge to g4dn.16xlarge: $0.63 to $5.22 an hour on spot (estimated), $2.10 to $17.41 on demand; …`."""
    kinds = one.instances[0] if len(one.instances) == 1 else f"{one.instances[0]} to {one.instances[-1]}"
    low, high = (price * nodes for price in one.spot_range)
    return (
        f"{nodes} x {kinds}: {_between(low, high)} an hour on spot ({spot_basis(one)}),"
        f" {_between(one.low * nodes, one.high * nodes)} on demand; list prices of {region_and_date(one)}"
    )


def spot_basis(one: Rate) -> str:
    """The source of a spot price: `estimated`, or region and time."""
    if one.live is None or not one.spot_is_live:
        return "estimated"
    return f"cheapest zone of {one.live.region}, {datetime.fromtimestamp(one.live.at, UTC):%Y-%m-%d %H:%M} UTC"


def _between(low: float, high: float) -> str:
    return dollars(low) if low == high else f"{dollars(low)} to {dollars(high)}"


def region_and_date(one: Rate) -> str:
    """Where and when list prices hold: `us-east-1, 2026-05-01`."""
    return f"{one.prices.region}, {one.prices.date}"
