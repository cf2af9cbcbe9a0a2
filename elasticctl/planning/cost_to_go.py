"""The lowest expected cost of the rest of a job, by work left, time left and whether there are spot machines.

This is dynamic programming, backwards from the deadline. The availability of spot machines is a Markov chain with the
states (available or not, for how long), see `Market`. Each size is tried in each state, with spot machines first and
the others on demand. Work that is not done in time falls to the largest size on demand (`deadline_fallback`).
Changes cost time: each span of spot begins with a start and ends with repeated work.

A table has rows for times left, dense near the deadline. A row has values for shares, dense near 0 and 1, of the work
that on-demand machines could still do in that time; more work than that is in no row. Computing a row takes about 1 ms
and happens when it is first used.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

from elasticctl.planning.availability import GUESS_LEAVES, GUESS_RETURNS, rounded
from elasticctl.planning.situation import AGES_H, Costs, Market, Speeds

SHARES = 28
NODES = tuple((1.0 - math.cos(math.pi * i / SHARES)) / 2 for i in range(SHARES + 1))
"""Shares of the work that could still be done on demand: close together where hardly any time, or work, is left."""
_AGES = len(AGES_H)
_STATES = 2 * _AGES
_LEAST_H, _FINEST_H, _FINE_H, _FINE_UNTIL_H, _PART = 0.003, 0.05, 0.5, 50.0, 0.06
"""Rows are as far apart as a start takes, within the first two, and further away from the deadline."""
_CAUTION = 1.5
"""A plan takes spot machines to leave this many times as often as was seen, and to come back as much less often: it
depends on whether they come back in time, and estimates are uncertain. Of 1, 1.5 and 2 it was best on AWS's traces."""
_Row = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class CostInputs:
    """The input of a table. Measured values are rounded, so that tables can be shared."""

    speeds: Speeds
    costs: Costs
    on_demand_usd_per_h: float
    spot_usd_per_h: float
    depth: int
    leaves: float
    returns: float
    losses_per_h: float


def rules_for(speeds: Speeds, costs: Costs, on_demand_usd_per_h: float, market: Market) -> CostInputs:
    """The rules of the table for this market."""
    depth = max((size for size in speeds.sizes if size <= market.depth), default=0)
    leaves, returns, losses = (
        rounded(market.leaves * _CAUTION),
        rounded(market.returns / _CAUTION),
        rounded(market.losses_per_h),
    )
    return CostInputs(speeds, costs, on_demand_usd_per_h, market.usd_per_h, depth, leaves, returns, losses)


def state_of(up: bool, since_h: float) -> int:
    """The index of the chain's state: those with spot machines come first, ordered by age."""
    age = sum(since_h >= edge for edge in AGES_H) - 1
    return age if up else _AGES + age


class Outlook:
    """The table: dollars and hours of the best policy by time left, state of the chain and share of the work."""

    def __init__(self, rules: CostInputs) -> None:
        self.rules = rules
        self._fastest = rules.speeds.per_s[-1] * 3600
        self._offers = [choices(rules, state < _AGES) for state in range(_STATES)]
        self._finest_h = min(_FINEST_H, max(_LEAST_H, rules.costs.start_s / 3600))
        empty: _Row = ((0.0,) * (SHARES + 1),) * _STATES
        self._times_h: list[float] = [0.0]
        self._usd: list[_Row] = [empty]
        self._hours: list[_Row] = [empty]

    def usd(self, weights: tuple[float, ...], work: float, time_h: float) -> float:
        """Expected dollars for this work in this time, with these probabilities of the chain's states.

        Work beyond what on-demand machines could do in that time counts at four times their price.
        """
        dear = 4 * self.rules.speeds.most * self.rules.on_demand_usd_per_h
        return self._interpolate(self._usd, weights, work, time_h, dear)

    def hours(self, weights: tuple[float, ...], work: float, time_h: float) -> float:
        """Expected hours until it is done."""
        return self._interpolate(self._hours, weights, work, time_h, 1.0)

    def _interpolate(
        self, rows: list[_Row], weights: tuple[float, ...], work: float, time_h: float, beyond: float
    ) -> float:
        if work <= 0:
            return 0.0
        time_h = max(time_h, 0.0)
        extra, over = 0.0, work - self._fastest * time_h
        if over > 0:
            extra, work = over / self._fastest * beyond, work - over
        if work <= 0:
            return extra
        while self._times_h[-1] < time_h:
            self._add_row()
        step = bisect_right(self._times_h, time_h) - 1
        if step + 1 == len(self._times_h):
            step -= 1
        early_h, late_h = self._times_h[step : step + 2]
        part = (time_h - early_h) / (late_h - early_h)
        low, rest = node_of(work / (self._fastest * time_h))
        total = 0.0
        for state, weight in enumerate(weights):
            if weight:
                early, late = rows[step][state], rows[step + 1][state]
                first = early[low] + rest * (early[low + 1] - early[low])
                total += weight * (first + part * (late[low] + rest * (late[low + 1] - late[low]) - first))
        return total + extra

    def _add_row(self) -> None:
        before_h = self._times_h[-1]
        longest_h = _FINE_H * max(1.0, before_h / _FINE_UNTIL_H)
        step_h = min(max(_PART * before_h, self._finest_h), longest_h)
        chain = passing(self.rules, step_h)
        usd, hours = [], []
        before = list(zip(*self._usd[-1], strict=True)), list(zip(*self._hours[-1], strict=True))
        for state in range(_STATES):
            then, then_h = ([sum(map(mul, chain[state], shares)) for shares in table] for table in before)
            best = self._best(state, before_h, step_h, then, then_h)
            usd.append(tuple(least for least, _ in best))
            hours.append(tuple(takes for _, takes in best))
        self._times_h.append(before_h + step_h)
        self._usd.append(tuple(usd))
        self._hours.append(tuple(hours))

    def _best(
        self, state: int, before_h: float, step_h: float, then: Sequence[float], then_h: Sequence[float]
    ) -> list[tuple[float, float]]:
        """(dollars, hours) of the best size in this state, for each share of the work.

        `then` and `then_h` are the expected dollars and hours of the rest after this step, by share.
        """
        fits = self._fastest * before_h
        found = [(0.0, 0.0)]
        for share in range(1, SHARES + 1):
            work = self._fastest * (before_h + step_h) * NODES[share]
            least, takes = math.inf, step_h
            for rate_usd, gain in self._offers[state]:
                left = work - gain * step_h
                if left <= 0:
                    total = rate_usd * work / gain
                    if total < least:
                        least, takes = total, work / gain
                elif left <= fits * (1 + 1e-9) and rate_usd * step_h < least:
                    low, rest = node_of(left / fits)
                    total = rate_usd * step_h + then[low] + rest * (then[low + 1] - then[low])
                    if total < least:
                        least, takes = total, step_h + then_h[low] + rest * (then_h[low + 1] - then_h[low])
            found.append((least, takes))
        return found


@functools.lru_cache(maxsize=128)
def outlook(rules: CostInputs) -> Outlook:
    """The table for these rules, which is cached."""
    return Outlook(rules)


def node_of(share: float) -> tuple[int, float]:
    """The node at or below this share, and the position between it and the next one, from 0 to 1."""
    if share >= 1.0:
        return SHARES - 1, 1.0
    low = bisect_right(NODES, share, hi=SHARES) - 1
    return low, (share - NODES[low]) / (NODES[low + 1] - NODES[low])


def spot_share(rules: CostInputs) -> float:
    """The share of time in which a spot worker makes progress: each span has a start and ends with repeated work."""
    lost_h = (rules.costs.start_s + rules.costs.save_every_s / 2) / 3600
    return 1.0 / (1.0 + rules.losses_per_h * lost_h)


def choices(rules: CostInputs, up: bool) -> list[tuple[float, float]]:
    """(dollars per hour, work per hour) of each size in such a state, beginning with no workers."""
    found = [(0.0, 0.0)]
    there = rules.depth if up else 0
    for workers in rules.speeds.sizes:
        spot = min(workers, there)
        usd = spot * rules.spot_usd_per_h + (workers - spot) * rules.on_demand_usd_per_h
        found.append((usd, rules.speeds.rate(workers) * 3600 * (spot_share(rules) if spot else 1.0)))
    if there:
        found.append((rules.speeds.most * rules.on_demand_usd_per_h, rules.speeds.per_s[-1] * 3600))
    return found


@functools.lru_cache(maxsize=4096)
def passing(rules: CostInputs, hours: float) -> tuple[tuple[float, ...], ...]:
    """The probabilities of passing from each state to each other within these hours."""
    size = _STATES
    rates = [[0.0] * size for _ in range(size)]
    for age in range(_AGES):
        rates[age][_AGES] = rules.leaves * GUESS_LEAVES[age]
        rates[_AGES + age][0] = rules.returns * GUESS_RETURNS[age]
        if age + 1 < _AGES:
            older = 1.0 / (AGES_H[age + 1] - AGES_H[age])
            rates[age][age + 1] = older
            rates[_AGES + age][_AGES + age + 1] = older
    fastest = max(sum(row) for row in rates)
    doublings = max(0, math.ceil(math.log2(max(hours * fastest * 16, 1.0))))
    part = hours / 2**doublings
    found = [[(1.0 - part * sum(rates[i]) if i == j else part * rates[i][j]) for j in range(size)] for i in range(size)]
    for _ in range(doublings):
        found = [[sum(found[i][k] * found[k][j] for k in range(size)) for j in range(size)] for i in range(size)]
    return tuple(map(tuple, found))
