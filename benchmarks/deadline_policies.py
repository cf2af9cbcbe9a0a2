"""What others do with a job that has a deadline, and what a clairvoyant would pay, who knows when spot machines exist.

All contenders but ours have one size, `workers`. The clairvoyant's cost is exact if changes are free, and a bound
otherwise.

Without costs of change, only the time at each number of spot machines matters. At each number, the sizes form a curve
of dollars over work, and its lower hull is a list of steps, each with a price of work. Time can be divided between two
sizes, so the optimum uses the cheapest steps of all until the work is done.

With costs of change, it is a shortest path through (tick, spot workers, on-demand workers) for any given price of work.
The price that maximizes dollars minus the value of the work, plus the value of all work that is to be done, gives a
bound: no schedule costs less (Lagrangian relaxation of "all the work is done").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from elasticctl.planning.situation import ON_DEMAND, Choice, Costs, PlannedSize, Situation, SizeReason, Speeds
from elasticctl.simulation.replay import Policy


def _as_decision(now: Situation, choice: Choice) -> PlannedSize:
    return PlannedSize(choice, SizeReason.CHEAPEST, now.look_s, kept=True)


def spot_pool(now: Situation, workers: int) -> str:
    """Return the pool with room for the whole group: the one that it is in, else the first; '' if there is none."""
    fits = [pool.name for pool in now.pools if pool.there >= workers]
    return next((name for name in fits if now.workers(name)), fits[0] if fits else ON_DEMAND)


@dataclass(slots=True)
class OnDemandOnly:
    """On demand from the start to the end."""

    workers: int

    def __call__(self, now: Situation) -> PlannedSize:
        return _as_decision(now, Choice(on_demand=self.workers))


@dataclass(slots=True)
class SpotOnly:
    """On spot machines whenever there are any, regardless of the deadline."""

    workers: int

    def __call__(self, now: Situation) -> PlannedSize:
        pool = spot_pool(now, self.workers)
        return _as_decision(now, Choice(pool, self.workers) if pool else Choice())


@dataclass(slots=True)
class UniformProgress:
    """Uniform Progress of "Can't Be Late" (Wu and others, NSDI 2024).

    Use spot whenever it is available, without changes until it is lost. Without spot, use on demand if progress is
    behind that of a job that is spread evenly until the deadline, until it is two changes ahead. If only on demand can
    meet the deadline, use on demand until the end. That last rule has a margin for what the simulator may add to the
    paper's model: machines are checked once per tick, and work may be unsaved.
    """

    workers: int
    _total: float = 0.0
    _time_s: float = 0.0
    _on_demand: bool = False
    _to_the_end: bool = False

    def __call__(self, now: Situation) -> PlannedSize:
        time_s = now.time_left_s or 0.0
        if not self._time_s:
            self._total, self._time_s = now.work_left, time_s
        change_s = now.costs.start_s + now.costs.reform_s
        slack_s = time_s - now.saved_left / now.speeds.rate(self.workers)
        self._to_the_end |= slack_s <= 2 * change_s + now.look_s
        pool = spot_pool(now, self.workers)
        if self._to_the_end:
            return _as_decision(now, Choice(on_demand=self.workers))
        if pool:
            self._on_demand = False
            return _as_decision(now, Choice(pool, self.workers))
        done = self._total - now.work_left
        gone_s = self._time_s - time_s
        if self._on_demand:
            self._on_demand = done < self._total * (gone_s + 2 * change_s) / self._time_s
        else:
            self._on_demand = done < self._total * gone_s / self._time_s
        return _as_decision(now, Choice(on_demand=self.workers) if self._on_demand else Choice())


@dataclass(slots=True)
class TimeSliced:
    """Each tenth of the time does a tenth of the work: spot or nothing, until only on demand can do the rest of it."""

    workers: int
    slices: int = 10
    _total: float = 0.0
    _time_s: float = 0.0

    def __call__(self, now: Situation) -> PlannedSize:
        time_s = now.time_left_s or 0.0
        if not self._time_s:
            self._total, self._time_s = now.work_left, time_s
        gone = (self._time_s - time_s) / self._time_s
        slice_ends = min(self.slices, int(gone * self.slices + 1e-9) + 1) / self.slices
        left = self._total * slice_ends - (self._total - now.saved_left)
        slack_s = (slice_ends - gone) * self._time_s - left / now.speeds.rate(self.workers)
        change_s = now.costs.start_s + now.costs.reform_s
        pool = spot_pool(now, self.workers)
        forced = left > 0 and slack_s <= 2 * change_s + now.look_s
        if forced and (slice_ends == 1 or not pool):
            return _as_decision(now, Choice(on_demand=self.workers))
        return _as_decision(now, Choice(pool, self.workers) if pool else Choice())


RIGID: dict[str, Callable[[int], Policy]] = {
    "on demand only": OnDemandOnly,
    "spot only": SpotOnly,
    "uniform progress": UniformProgress,
    "time-sliced": TimeSliced,
}


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
            stay = min(before[0], now[0]) + min(before[1], now[1])
            usd[a, b] = (now[0] * prices[0] + now[1] * prices[1]) * gap_s / 3600
            waits_s = min(costs.start_s, gap_s) if now[0] + now[1] > stay else 0.0
            gain[a, b] = speeds.rate(stay) * waits_s + speeds.rate(now[0] + now[1]) * (gap_s - waits_s)
            if before != now and any(now):
                gain[a, b] -= speeds.rate(now[0] + now[1]) * min(costs.reform_s, gap_s - waits_s)
    return usd, gain
