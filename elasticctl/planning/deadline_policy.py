"""Which workers to have now: the choice with the lowest expected cost among those with a fallback."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator

from elasticctl.planning.availability import GUESS_LEAVES
from elasticctl.planning.cost_to_go import Outlook, outlook, passing, rules_for, state_of
from elasticctl.planning.deadline_fallback import burn_usd_per_h, fallback_workers, is_safe, ready_in_s, spare_s
from elasticctl.planning.situation import (
    AGES_H,
    LEAST_LOOK_S,
    ON_DEMAND,
    Choice,
    HeldWorkers,
    PlannedSize,
    Situation,
    SizeReason,
    SpotPool,
)

HOLD_H = 1.0
"""A choice is valued as if it stayed for this long, so that changes have to pay within it."""
_STARTS = 4
"""... and for this many starts; otherwise no choice that needs a start would pay off shortly before the deadline."""
_LONGEST_H = 24.0 * 60
_OF_THE_MONEY = 0.9


def decide(now: Situation) -> PlannedSize:
    """Decide what to have now. The same situation always gives the same answer."""
    if now.work_left <= 0:
        return PlannedSize(Choice(), SizeReason.DONE, now.look_s, kept=True)
    safe = [choice for choice in _choices(now) if is_safe(now, choice)]
    there = _pool(now) is not None
    if (now.blind and there) or (now.time_left_s is None and (now.soon or there)):
        safe = [choice for choice in safe if choice.workers] or safe  # with no deadline, later always costs the same
    if safe:
        return PlannedSize(_cheapest(now, safe), SizeReason.CHEAPEST, now.look_s, kept=True)
    for spare in (True, False):
        workers = fallback_workers(now, now.work_left, now.time_left_s, now.money_left_usd, now.held, spare=spare)
        if workers is not None:
            return _affordable(now, Choice(on_demand=_without_shrinking(now, workers)), SizeReason.DEADLINE, kept=True)
    if _stays_in_time(now):
        return _affordable(now, Choice(on_demand=now.ready(ON_DEMAND)), SizeReason.DEADLINE, kept=True)
    return _best_effort(now)


def _without_shrinking(now: Situation, workers: int) -> int:
    """Do not release workers in the fallback: the group would need them again a little later."""
    present = min(now.workers(ON_DEMAND), now.speeds.most)
    money = now.money_left_usd
    if present <= workers or money is None:
        return max(present, workers)
    lasts_s = now.costs.reform_s + now.work_left / now.speeds.rate(present) + now.costs.billed_s
    return present if present * now.on_demand_usd_per_h * lasts_s / 3600 <= money else workers


def _stays_in_time(now: Situation) -> bool:
    """True if the on-demand workers alone that train now are just in time, if nothing changes."""
    present, rate = now.ready(ON_DEMAND), now.speeds.rate(now.ready(ON_DEMAND))
    if not rate or set(now.held) != {HeldWorkers(ON_DEMAND, present)}:
        return False
    takes_s = now.work_left / rate
    usd = present * now.on_demand_usd_per_h * (takes_s + now.costs.billed_s) / 3600
    in_time = now.time_left_s is None or takes_s <= now.time_left_s
    return in_time and (now.money_left_usd is None or usd <= now.money_left_usd)


def _best_effort(now: Situation) -> PlannedSize:
    """The choice when neither can be promised: keep the budget, and miss the deadline by as little as it allows."""
    pool = _pool(now)
    most = now.speeds.most
    spot = min(pool.there, most) if pool else 0
    name = pool.name if pool and spot else ON_DEMAND
    if fallback_workers(now, now.work_left, None, now.money_left_usd, now.held, spare=False) is not None:
        on_demand = max(most - spot, min(now.workers(ON_DEMAND), most))  # releases none that runs or is starting
        return _affordable(now, Choice(name, most - on_demand, on_demand), SizeReason.LATE, kept=False)
    if not spot:
        return PlannedSize(Choice(), SizeReason.POOR, now.look_s, kept=False)
    return _affordable(now, Choice(name, spot, 0), SizeReason.POOR, kept=False)


def _affordable(now: Situation, choice: Choice, reason: SizeReason, *, kept: bool) -> PlannedSize:
    """This choice while there is money for it and for a final checkpoint, or else no workers."""
    money = now.money_left_usd
    if money is None:
        return PlannedSize(choice, reason, now.look_s, kept)
    burn = burn_usd_per_h(now, choice)
    lasts_s = money / burn * 3600 - now.costs.reform_s if burn else math.inf
    grows = any(choice.of(name) > now.workers(name) for name in (ON_DEMAND, choice.pool))
    ends = now.work_left <= now.speeds.rate(choice.workers) * lasts_s
    least_s = max(0.0 if ends else LEAST_LOOK_S, max(now.costs.billed_s, now.costs.start_s) if grows else 0.0)
    if lasts_s <= least_s:
        return PlannedSize(Choice(), SizeReason.SPENT, now.look_s, kept=False)
    return PlannedSize(choice, reason, min(now.look_s, lasts_s), kept)


def _pool(now: Situation) -> SpotPool | None:
    """The best spot pool: the cheapest; among equals the one in use, then the one with the most machines."""
    there = [pool for pool in now.pools if pool.there > 0]
    if not there:
        return None
    return min(there, key=lambda pool: (pool.usd_per_h, -now.workers(pool.name), -pool.there, pool.name))


def _choices(now: Situation) -> Iterator[Choice]:
    """All choices worth considering: spot workers in the pool in use or the best one, with the others on demand."""
    yield Choice()
    for workers in now.speeds.sizes:
        yield Choice(on_demand=workers)
    best = _pool(now)
    pools = [pool for pool in now.pools if pool is best or (pool.there > 0 and now.workers(pool.name))]
    for pool in pools:
        whole = min(pool.there, now.speeds.most)
        if whole not in now.speeds.sizes:
            yield Choice(pool.name, whole, 0)
        for workers in now.speeds.sizes:
            spot = min(workers, whole)
            yield Choice(pool.name, spot, workers - spot)


def aim_h(now: Situation, table: Outlook, weights: tuple[float, ...]) -> float:
    """The hours to plan for: until the deadline, or, for an early end, only as many as the money allows."""
    if now.time_left_s is None:
        longest = min(4 * now.work_left / now.speeds.per_s[0] / 3600, _LONGEST_H)
    else:
        longest = (now.time_left_s - reserve_s(now)) / 3600
    money = now.money_left_usd
    if money is None or not (now.soon or now.time_left_s is None):
        return longest
    low, high = now.work_left / now.speeds.per_s[-1] / 3600, longest
    if low >= high or table.usd(weights, now.work_left, high) > _OF_THE_MONEY * money:
        return longest
    for _ in range(12):
        middle = (low + high) / 2
        if table.usd(weights, now.work_left, middle) <= _OF_THE_MONEY * money:
            high = middle
        else:
            low = middle
    return high


def reserve_s(now: Situation) -> float:
    """The time that the plan reserves for the fallback."""
    return now.costs.start_s + now.costs.reform_s + spare_s(now.costs) + now.look_s


def table_for(now: Situation) -> Outlook:
    """The table for this situation."""
    return outlook(rules_for(now.speeds, now.costs, now.on_demand_usd_per_h, now.market))


def weights_of(now: Situation) -> tuple[float, ...]:
    """The probabilities of the market's states: certainty of the present one."""
    state = state_of(any(pool.there for pool in now.pools), now.market.since_h)
    return tuple(float(index == state) for index in range(2 * len(AGES_H)))


def _cheapest(now: Situation, choices: list[Choice]) -> Choice:
    """The cheapest choice by what is paid while it lasts, the cost of changing to it, and the outlook afterwards."""
    table, weights = table_for(now), weights_of(now)
    time_h = aim_h(now, table, weights)
    hold_h, start_h = now.look_s / 3600, now.costs.start_s / 3600
    while 2 * hold_h <= min(HOLD_H, max(time_h / 12, min(_STARTS * start_h, time_h / 2))):
        hold_h *= 2
    then = passing(table.rules, hold_h)[weights.index(1.0)]
    age = bisect_right(AGES_H, now.market.since_h) - 1
    leaves_per_h = now.market.leaves * GUESS_LEAVES[age]
    prices = {pool.name: pool.usd_per_h for pool in now.pools} | {ON_DEMAND: now.on_demand_usd_per_h}
    best, least = choices[0], math.inf
    for choice in choices:
        usd, gained = _held(now, choice, prices, leaves_per_h, hold_h)
        total = usd + table.usd(then, now.work_left - gained, time_h - hold_h)
        if total < least - 1e-9:
            best, least = choice, total
    return best


def _held(
    now: Situation, choice: Choice, prices: dict[str, float], leaves_per_h: float, hold_h: float
) -> tuple[float, float]:
    """Dollars and work of a choice that lasts for this long, including the cost of changing to it."""
    rate_h = now.speeds.rate(choice.workers) * 3600
    stays = sum(min(choice.of(name), now.ready(name)) for name in {ON_DEMAND, choice.pool})
    up_h, lost = hold_h, 0.0
    if choice.spot and leaves_per_h > 0:
        up_h = -math.expm1(-leaves_per_h * hold_h) / leaves_per_h
        if not choice.on_demand:
            lost = -math.expm1(-leaves_per_h * hold_h) * rate_h * now.costs.save_every_s / 2 / 3600
    alone_h = now.speeds.rate(choice.on_demand) * 3600
    gained = rate_h * up_h + alone_h * (hold_h - up_h) - lost
    usd = choice.spot * prices[choice.pool] * up_h + choice.on_demand * prices[ON_DEMAND] * hold_h
    if choice.workers > stays:
        meanwhile = sum(now.ready(name) for name in {part.pool for part in now.held})
        waits_s = max(ready_in_s(now.held, choice.of(name), now.costs, name) for name in {ON_DEMAND, choice.pool})
        waits_h = min(waits_s / 3600, up_h)
        gained -= max(0.0, rate_h - now.speeds.rate(meanwhile) * 3600) * waits_h
    if choice.workers and (choice.workers != stays or sum(part.workers for part in now.held) != stays):
        gained -= rate_h * now.costs.reform_s / 3600
    if gained >= now.work_left > 0:
        usd *= now.work_left / gained
        gained = now.work_left
    if choice.workers > stays:  # leaving workers stay until the new ones are ready
        leave = [(part.pool, max(0, part.workers - choice.of(part.pool))) for part in now.held]
        usd += sum(workers * prices.get(name, 0.0) for name, workers in leave) * waits_s / 3600
    return usd, gained
