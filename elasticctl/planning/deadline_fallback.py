"""The fallback: finishing on demand, in time and within the budget, even if all spot machines are lost.

A choice is safe if a fallback still exists after the worst case until the next decision: at its end, all spot machines
are lost, and all work since the last save with them. The fallback includes its own start and the loss of one on-demand
machine; the promise rests on that.
"""

from __future__ import annotations

from collections.abc import Iterable

from elasticctl.planning.situation import ON_DEMAND, Choice, Costs, HeldWorkers, Situation

_ROUNDING_S = 1e-3


def spare_s(costs: Costs) -> float:
    """The longest time that the loss of one on-demand machine takes."""
    return costs.start_s + costs.save_every_s + costs.loss_s + costs.reform_s


def ready_in_s(held: Iterable[HeldWorkers], workers: int, costs: Costs, pool: str = ON_DEMAND) -> float:
    """Seconds until this many workers of a pool could train, if the missing ones are requested now."""
    longest = 0.0
    for part in sorted((part for part in held if part.pool == pool), key=lambda part: part.ready_in_s):
        if workers <= 0:
            break
        longest = max(longest, part.ready_in_s)
        workers -= part.workers
    return longest if workers <= 0 else max(longest, costs.start_s)


def fallback_workers(
    now: Situation,
    left: float,
    time_s: float | None,
    money_usd: float | None,
    held: Iterable[HeldWorkers],
    *,
    spare: bool,
) -> int | None:
    """The smallest number of on-demand workers that does this work in time and within the money; None if none does."""
    for workers, per_s in zip(now.speeds.sizes, now.speeds.per_s, strict=True):
        takes_s = fallback_s(now, left, workers, per_s, held, spare=spare)
        if time_s is not None and takes_s > time_s + _ROUNDING_S:
            continue
        usd = workers * now.on_demand_usd_per_h * (max(takes_s, now.costs.billed_s) + now.costs.billed_s) / 3600
        if money_usd is None or usd <= money_usd + 1e-9:
            return workers
    return None


def least_usd(now: Situation) -> float:
    """The lowest cost of the rest on demand, however long it takes."""
    times_s = [
        (workers, fallback_s(now, now.work_left, workers, per_s, (), spare=False))
        for workers, per_s in zip(now.speeds.sizes, now.speeds.per_s, strict=True)
    ]
    billed_s = now.costs.billed_s
    return min(n * now.on_demand_usd_per_h * (max(takes_s, billed_s) + billed_s) / 3600 for n, takes_s in times_s)


def fallback_s(
    now: Situation, left: float, workers: int, per_s: float, held: Iterable[HeldWorkers], *, spare: bool
) -> float:
    """Seconds that this many on-demand workers take for the rest."""
    waits_s = ready_in_s(held, workers, now.costs)
    return waits_s + now.costs.reform_s + left / per_s + (spare_s(now.costs) if spare else 0.0)


def burn_usd_per_h(now: Situation, choice: Choice) -> float:
    """The most that is paid during the change to this choice: workers leave only when the new ones are ready."""
    total = max(choice.on_demand, now.workers(ON_DEMAND)) * now.on_demand_usd_per_h
    for pool in now.pools:
        total += max(choice.of(pool.name), now.workers(pool.name)) * pool.usd_per_h
    return total


def is_safe(now: Situation, choice: Choice) -> bool:
    """True if there is a fallback even after the worst case until the next decision."""
    look_s = now.look_s
    kept = tuple(_after(now.held, choice.on_demand, look_s, now.costs))
    training = min(choice.on_demand, now.ready(ON_DEMAND))
    left = now.saved_left
    if training:
        still_s = now.costs.reform_s + (now.costs.loss_s if choice.spot else 0.0)
        left = max(0.0, now.work_left - now.speeds.rate(training) * max(0.0, look_s - still_s))
        if set(now.held) == {HeldWorkers(ON_DEMAND, choice.on_demand)} and not choice.spot:
            left = max(0.0, now.work_left - now.speeds.rate(training) * look_s)
    time_s = None if now.time_left_s is None else now.time_left_s - look_s
    money_usd = now.money_left_usd
    if money_usd is not None:
        money_usd -= burn_usd_per_h(now, choice) * max(look_s, now.costs.billed_s) / 3600
        if money_usd < 0:
            return False
    return fallback_workers(now, left, time_s, money_usd, kept, spare=True) is not None


def _after(held: Iterable[HeldWorkers], workers: int, time_s: float, costs: Costs) -> Iterable[HeldWorkers]:
    """The on-demand workers of a choice after this time."""
    for part in sorted((part for part in held if part.pool == ON_DEMAND), key=lambda part: part.ready_in_s):
        stay = min(workers, part.workers)
        workers -= stay
        if stay:
            yield HeldWorkers(ON_DEMAND, stay, max(0.0, part.ready_in_s - time_s))
    if workers > 0:
        yield HeldWorkers(ON_DEMAND, workers, max(0.0, costs.start_s - time_s))
