"""The expected time, cost and goodput of some work on a number of GPUs, in closed form.

Interruptions come independently to each node, exponentially distributed, so to a group of N nodes N times as often. A
save stops training for delta seconds every tau seconds, and an interruption loses the work since the last save. While
the group trains, its time over time of work is thus

    M * (exp((tau + delta) / M) - 1) / tau                     M: mean time between the group's interruptions

(Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22, 2006, equation 20, without the restart). tau is chosen as `elasticctl_train.save_policy` chooses it: Young's
sqrt(2 * delta * M) ("A first order approximation to the optimum checkpoint interval", 1974) within the same bounds.

The group stands still for R seconds after an interruption, and again when the replacement joins. Another interruption
in that time restarts it, so it takes M * (exp(R / M) - 1) seconds; a replacement that comes in that time joins
without another pause. Both come every M seconds while the group trains, so the share of time in which it does is

    1 / (2 * exp(R / M) - 1)

A lost node is away until another comes; meanwhile the group trains without it. Each node is thus there for the share
m / (m + away) of the time (m: mean time between its interruptions), and how many of N are is binomially distributed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from elasticctl.planning.scaling_curve import ScalingCurve

SHORTEST_S, LONGEST_S = 5.0, 600.0
"""Between these the training library chooses its interval between saves."""
QUIET_S = 24 * 3600.0
"""The rarest that it takes interruptions to be."""
_LARGEST_EXPONENT = 700.0
_FOR_EVER_S = 1000 * 365 * 86_400.0


@dataclass(frozen=True, slots=True)
class Conditions:
    """Assumptions about nodes and saves, in seconds except for numbers of GPUs and `spot_share` of the on-demand price.

    `between_s`: mean time between interruptions of one spot node; `recovery_s`: from a loss to the next step, and again
    when the replacement joins; `away_s`: until that happens; `save_s`: how long a save stops training; `write_s`: how
    long it is then written during training; `interval_s`: between saves, None: as the training library chooses it.
    On-demand nodes are assumed to last.
    """

    gpus_per_node: int = 1
    between_s: float = 86_400.0
    recovery_s: float = 30.0
    away_s: float = 300.0
    save_s: float = 0.1
    write_s: float = 0.0
    interval_s: float | None = None
    spot_share: float = 0.3


@dataclass(frozen=True, slots=True)
class Forecast:
    """What to expect of a number of GPUs; times in seconds (None: it never ends), `rate` in units per second.

    `nodes_there` is the average number of spot nodes; node hours are paid hours. `saved` is the share of the
    cost that spot saves against the same work on demand at the reference size; below 0 where it costs more.
    """

    gpus: int
    nodes: int
    measured: bool
    rate: float
    speedup: float
    between_s: float
    interval_s: float
    goodput: float
    nodes_there: float
    spot_s: float | None
    on_demand_s: float
    spot_node_hours: float | None
    on_demand_node_hours: float
    saved: float | None


def forecast_for(gpus: int, work: float, curve: ScalingCurve, conditions: Conditions, reference_gpus: int) -> Forecast:
    """Forecast `work` units on `gpus` GPUs; ValueError unless they fill whole nodes.

    Speed-up and saving are relative to `reference_gpus`.
    """
    if gpus < 1 or gpus % conditions.gpus_per_node:
        raise ValueError(f"{gpus} GPUs do not fill nodes with {conditions.gpus_per_node} each")
    nodes = gpus // conditions.gpus_per_node
    between_s = conditions.between_s / nodes
    tau_s = interval_s(conditions, between_s)
    there = conditions.between_s / (conditions.between_s + conditions.away_s)
    lost_every_s = between_s / there  # a node that is away cannot be lost
    share = forward_share(tau_s, conditions.save_s, lost_every_s) * training_share(conditions.recovery_s, lost_every_s)
    rate = curve.rate(gpus)
    speed = share * _mean_rate(nodes, there, curve, conditions.gpus_per_node)
    spot_s = work / speed if speed * _FOR_EVER_S > work else None
    spot_node_hours = None if spot_s is None else spot_s / 3600 * nodes * there
    reference_cost = _on_demand_s(work, curve.rate(reference_gpus), conditions) * reference_gpus / gpus * nodes / 3600
    on_demand_s = _on_demand_s(work, rate, conditions)
    return Forecast(
        gpus=gpus,
        nodes=nodes,
        measured=curve.measured(gpus),
        rate=rate,
        speedup=rate / curve.rate(reference_gpus),
        between_s=between_s,
        interval_s=tau_s,
        goodput=share,
        nodes_there=nodes * there,
        spot_s=spot_s,
        on_demand_s=on_demand_s,
        spot_node_hours=spot_node_hours,
        on_demand_node_hours=on_demand_s / 3600 * nodes,
        saved=None if spot_node_hours is None else 1 - conditions.spot_share * spot_node_hours / reference_cost,
    )


def interval_s(conditions: Conditions, between_s: float) -> float:
    """Seconds between saves: as given, or as the training library chooses for this frequency of interruptions."""
    if conditions.interval_s is not None:
        return conditions.interval_s
    young_s = math.sqrt(2 * conditions.save_s * min(between_s, QUIET_S)) if conditions.save_s else 0.0
    return min(max(young_s, 2 * conditions.write_s, SHORTEST_S), LONGEST_S)


def forward_share(tau_s: float, save_s: float, between_s: float) -> float:
    """Daly's formula: the share of the time of training that moves it forward, from 0 to 1."""
    if (tau_s + save_s) / between_s > _LARGEST_EXPONENT:
        return 0.0
    return tau_s / (between_s * math.expm1((tau_s + save_s) / between_s))


def training_share(recovery_s: float, between_s: float) -> float:
    """The share of time in which the group trains, rather than recovers from a loss or lets a replacement join."""
    if recovery_s / between_s > _LARGEST_EXPONENT:
        return 0.0
    return 1 / (2 * math.exp(recovery_s / between_s) - 1)


def _on_demand_s(work: float, rate: float, conditions: Conditions) -> float:
    """Without interruptions only saves cost time, and there are as few as the library makes."""
    tau_s = interval_s(conditions, math.inf)
    return work / rate * (tau_s + conditions.save_s) / tau_s


def _mean_rate(nodes: int, there: float, curve: ScalingCurve, gpus_per_node: int) -> float:
    """The expected rate when each of the nodes is there with this probability."""
    if there >= 1:
        return curve.rate(nodes * gpus_per_node)
    total = 0.0
    for count in range(1, nodes + 1):
        log_p = math.lgamma(nodes + 1) - math.lgamma(count + 1) - math.lgamma(nodes - count + 1)
        log_p += count * math.log(there) + (nodes - count) * math.log1p(-there)
        total += math.exp(log_p) * curve.rate(count * gpus_per_node)
    return total
