"""The cost for somebody who knows when spot machines exist: exactly or, if changes have a cost, a bound.

Without costs of change, only the time at each number of spot machines matters. At each number, the sizes form a curve
of dollars over work, and its lower hull is a list of steps, each with a price of work. Time can be divided between two
sizes, so the optimum uses the cheapest steps of all until the work is done.

With costs of change, it is a shortest path through (tick, spot workers, on-demand workers) for any given price of work.
The price that maximizes dollars minus the value of the work, plus the value of all work that is to be done, gives a
bound: no schedule costs less (Lagrangian relaxation of "all the work has to be done").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from elasticctl.planning.situation import Costs, Speeds


def most_there(traces: Sequence[Sequence[int]]) -> list[int]:
    """Return the highest number of machines in any one pool, at each tick."""
    return [max(counts) for counts in zip(*traces, strict=True)]


def without_changes(
    there: Sequence[int], gap_s: float, work: float, speeds: Speeds, spot_usd_per_h: float, on_demand_usd_per_h: float
) -> float:
    """Return the least cost of doing this work within these ticks; infinity if it is impossible."""
    steps: list[tuple[float, float]] = []
    for count, ticks in Counter(there).items():
        hull = _hull(_offers(count, speeds, spot_usd_per_h, on_demand_usd_per_h))
        for (gain, usd), (more, dearer) in pairwise(hull):
            steps.append(((dearer - usd) / (more - gain), (more - gain) * ticks * gap_s / 3600))
    total = 0.0
    for price, much in sorted(steps):
        total += price * min(work, much)
        work -= min(work, much)
    return total if work <= 1e-9 * sum(much for _, much in steps) else float("inf")


def _offers(count: int, speeds: Speeds, spot: float, on_demand: float) -> list[tuple[float, float]]:
    """Return (work, dollars) per hour of every size."""
    found = [(0.0, 0.0)]
    for workers in range(1, speeds.most + 1):
        on_spot = min(workers, count)
        found.append((speeds.rate(workers) * 3600, on_spot * spot + (workers - on_spot) * on_demand))
    return found


def _hull(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lower hull, from nothing to the most work."""
    hull: list[tuple[float, float]] = []
    for x, y in sorted(points):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    return hull


def with_changes(
    there: Sequence[int],
    gap_s: float,
    work: float,
    speeds: Speeds,
    costs: Costs,
    prices: tuple[float, float],
) -> float:
    """Return a lower bound with paid starts and groups that stop; `prices` per hour: of spot, and on demand."""
    sizes = (0, *speeds.sizes)
    states = [(j, i) for j in sizes for i in sizes if i + j <= speeds.most]
    usd, gain = _tables(states, gap_s, speeds, costs, prices)
    room = {count: np.array([0.0 if j <= count else np.inf for j, _ in states]) for count in set(there)}

    def bound(price: float) -> float:
        step = usd - price * gain
        value = np.zeros(len(states))
        for count in reversed(there):
            value = (step + (value + room[count])[None, :]).min(axis=1)
        return float(value[states.index((0, 0))]) + price * work

    fastest = speeds.per_s[-1] * 3600
    low, high = 0.0, 8 * prices[1] * speeds.most / fastest
    golden = (5**0.5 - 1) / 2
    one, two = high - golden * (high - low), low + golden * (high - low)
    at_one, at_two = bound(one), bound(two)
    for _ in range(22):
        if at_one < at_two:
            low, one, at_one = one, two, at_two
            two = low + golden * (high - low)
            at_two = bound(two)
        else:
            high, two, at_two = two, one, at_one
            one = high - golden * (high - low)
            at_one = bound(one)
    return max(at_one, at_two)


def _tables(
    states: list[tuple[int, int]], gap_s: float, speeds: Speeds, costs: Costs, prices: tuple[float, float]
) -> tuple[np.ndarray, np.ndarray]:
    """Return dollars and work of a tick in one state that follows another."""
    usd, gain = np.zeros((len(states),) * 2), np.zeros((len(states),) * 2)
    for a, before in enumerate(states):
        for b, now in enumerate(states):
            stay = sum(map(min, before, now))
            usd[a, b] = (now[0] * prices[0] + now[1] * prices[1]) * gap_s / 3600
            waits_s = min(costs.start_s, gap_s) if sum(now) > stay else 0.0
            gain[a, b] = speeds.rate(stay) * waits_s + speeds.rate(sum(now)) * (gap_s - waits_s)
            if before != now and sum(now):
                gain[a, b] -= speeds.rate(sum(now)) * min(costs.reform_s, gap_s - waits_s)
    return usd, gain
