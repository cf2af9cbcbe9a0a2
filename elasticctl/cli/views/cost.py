"""Prices and costs as text. Estimates are labelled as such."""

from __future__ import annotations

import dataclasses
import time
from datetime import UTC, datetime

from elasticctl.api.gpu_types import GPU_TYPES
from elasticctl.api.observed.cost import Cost, Rate, cost, rate
from elasticctl.api.spec import ElasticJob, JobSpec
from elasticctl.api.text import dollars


def rate_of_spec(spec: JobSpec) -> Rate | None:
    """The price of one node of a planned job; None if it is unknown."""
    gpu = GPU_TYPES.get(spec.gpu_type)
    if gpu is None:
        return None
    instances = gpu.nodes(spec.provider).get(spec.gpus_per_worker, ())
    return with_live_spot(rate(spec.provider, instances, gpu.name, spec.gpus_per_worker))


def with_live_spot(one: Rate | None) -> Rate | None:
    """The same with current spot prices, if AWS returns them within three seconds."""
    from elasticctl.api.observed.cost import price_list  # not for who only says what a job has cost

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
        f" {_between(one.low * nodes, one.high * nodes)} on demand; list prices of {_where(one)}"
    )


def spot_basis(one: Rate) -> str:
    """The source of a spot price: `estimated`, or region and time."""
    if one.live is None or not one.spot_is_live:
        return "estimated"
    return f"cheapest zone of {one.live.region}, {datetime.fromtimestamp(one.live.at, UTC):%Y-%m-%d %H:%M} UTC"


def cost_text(job: ElasticJob, now: float) -> str:
    """The cost of a job so far, and what it would have been on demand; "" if no price is known."""
    found = cost(job, now)
    if found is None:
        return ""
    against = f"; on demand it would be {dollars(found.on_demand)}" if found.saved > 0 else ""
    return f"about {dollars(found.spent)} so far{against} ({_basis(found)})"


def saved_line(found: Cost) -> str:
    """`spot saved about $2.87 of $4.10 (…)`, or the cost if there was no spot capacity."""
    if found.saved > 0:
        return f"spot saved about {dollars(found.saved)} of {dollars(found.on_demand)} ({_basis(found)})"
    return f"it cost about {dollars(found.spent)} ({_basis(found)})"


def _between(low: float, high: float) -> str:
    return dollars(low) if low == high else f"{dollars(low)} to {dollars(high)}"


def _basis(found: Cost) -> str:
    spot = f", spot at {found.rate.prices.spot_share:.0%} of them" if found.saved > 0 else ""
    if not found.rate.prices.region:  # prices that the job's goal says
        dated = f", {found.rate.prices.date}" if found.rate.prices.date else ""
        return f"prices: {found.rate.instances[0]}{dated}"
    return f"{found.rate.instances[0]} at list prices of {_where(found.rate)}{spot}"


def _where(one: Rate) -> str:
    return f"{one.prices.region}, {one.prices.date}"
