"""When a group is stopped to admit newcomers: once the cost of re-forming pays for itself.

A group of n workers that re-forms with m > n stops for the measured cost R, and is then s(m) / s(n) times as fast.
Over the time T until the next change, it does more work if

    s(m) (T - R) > s(n) T,    which is    T > P  with  P = R / (1 - s(n) / s(m))

P is the payback time. So a group grows only if the next change, or the job's end, is expected later than P. If more
newcomers are starting, waiting for them costs the gain of those that are ready, and not waiting costs another R. This
is the ski rental problem: the worst-case regret is smallest if one waits until the lost gain equals that cost, which is
P again. So the group waits for them for P, and never longer than a window.

T is estimated as (time observed + typical quiet time) / (changes observed + 1): a job about which little is known is
assumed to be typical, and an undisturbed job is expected to stay so for longer and longer. Losses are never weighed: a
group that has lost a member re-forms immediately, with all newcomers that are ready.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from elasticctl.api.status import GroupGeneration, ProgressStatus
from elasticctl.api.text import join_some, plural, span
from elasticctl_controller.core.group.group_record import GroupRecord
from elasticctl_controller.core.group.group_states import GroupEvent

NEWCOMER_SETTLE_S = 2.0
"""How long a newcomer waits for others that are starting, so that they cost the group one re-forming rather than
several. A script that reports nothing is left alone for this long first, and twice as long after each stop."""
LONGEST_SETTLE_S = 600.0
MOST_STOPPED = 0.5
"""If stops for newcomers have taken a larger share of the group's time than this, the next waits until it pays off."""
_JOINED = " joined"
"""How the reason of a generation ends that newcomers have caused."""
UNMEASURED_COST_S = 10.0
"""The assumed cost of re-forming, until a group has formed again, or made its first step at all."""
LEAST_GAIN = 0.05
"""The smallest gain that is assumed: a size that was asked for is reached even if more workers are hardly faster."""
COSTS_KEPT = 3
LEAST_JOB_S = 3600.0
"""How long a job takes at least, if nothing else is known."""
LEAST_PACE_S = 1.0


def admit_newcomers(group: GroupRecord, now: float) -> float | None:
    """Drain the group if newcomers are ready and it is time to admit them; returns seconds until this should be asked
    again.
    """
    ready, before = group.next_generation, group.next_generation.growth
    ready.explain_waiting("")
    newcomers = ready.newcomers(group.members)
    if not newcomers or ready.first_join_at is None:
        return None
    reason = _why_not_at_all(group, len(newcomers), now)
    if reason:
        ready.explain_waiting(reason)
        return None
    starting = sum(uid not in ready.joined and uid not in group.members.ranked for uid in group.members.alive)
    waits = [ready.first_join_at + NEWCOMER_SETTLE_S] if starting and not group.rules.automatic else []
    waits.append(_pays_at(group, len(newcomers), bool(starting), now))
    if max(waits) > now:
        ready.explain_waiting(before or "newcomers wait until the group has trained long enough for a stop to pay off")
        return None if max(waits) == math.inf else max(waits) - now
    if group.rules.automatic and not group.reports.serves_commands:
        measured = measure_growth(group.history.generations, group.history.rates, group.history.progress, now)
        verdict = decide_growth(
            replace(measured, ready=len(newcomers), coming=starting, ready_since=ready.first_join_at), now
        )
        if not verdict.grow:
            ready.explain_waiting(before or verdict.words)  # the first words stay: the seconds left change all the time
            return None if verdict.again_at is None else max(0.0, verdict.again_at - now)
    group.advance(GroupEvent.NEWCOMERS_DUE, now, f"{join_some(newcomers, 'worker')}{_JOINED}")
    return None


def _why_not_at_all(group: GroupRecord, newcomers: int, now: float) -> str:
    """Why newcomers are not admitted until something changes; "" if they may be."""
    if group.members.trained:
        return "training is done"
    if group.reports.cannot_save:
        return "the storage does not answer, so what has not been saved would be lost"
    if group.notices.held(group.members.ranked):
        return "newcomers replace workers that have to leave"
    if _would_lose_more(group, newcomers, now):
        return "newcomers wait: the script reports no steps, so a stop may cost more work than they would add"
    return ""


def _would_lose_more(group: GroupRecord, newcomers: int, now: float) -> bool:
    """True if no person has asked for the newcomers, and the group may lose more to a stop than they would add."""
    if group.history.reports or group.reports.serves_commands or group.rules.asked or group.history.newest is None:
        return False
    return not outruns(group.history.generations, newcomers, now)


def _pays_at(group: GroupRecord, newcomers: int, more_to_come: bool, now: float) -> float:
    """From when on stopping the group for newcomers pays off (seconds since the epoch); infinite: not before a step.

    If no more newcomers will come, it stops immediately, unless such stops have taken much of its time already.
    """
    newest = group.history.newest
    if newest is None or newest.formed_at is None or group.reports.serves_commands:
        return 0.0
    if group.history.reports:
        if newest.first_step_at is None:
            return math.inf
        if not more_to_come and stopped_share(group.history.generations, _JOINED, now) <= MOST_STOPPED:
            return 0.0
        return newest.first_step_at + payback_s(group.history.generations, newcomers, group.history.rates)
    by_newcomers = (item.reason.endswith(_JOINED) for item in reversed(group.history.generations))
    in_a_row = sum(1 for _ in itertools.takewhile(bool, by_newcomers))
    return newest.formed_at + min(LONGEST_SETTLE_S, NEWCOMER_SETTLE_S * 2.0**in_a_row)


@dataclass(frozen=True, slots=True)
class Batching:
    """`window_s`: the longest wait for newcomers that are starting; `typical_quiet_s`: how long a group about which
    nothing is known stays unchanged; `exponent`: s(n) = n ** exponent for sizes whose rate has not been measured.

    The default exponent comes from data-parallel training over ordinary cloud networks: 8 to 10 times the rate on 16
    times the GPUs (4 to 64).
    """

    window_s: float = 30.0
    typical_quiet_s: float = 3600.0
    exponent: float = 0.8


@dataclass(frozen=True, slots=True)
class GrowthOption:
    """A group that trains on `size` workers, and the newcomers that could join it.

    `ready` workers could join now, the first of them since `ready_since`; `coming` are starting. `reform_cost_s` is the
    measured time that this job stops when it re-forms with notice. `changes` that the group did not choose (losses,
    preempted workers) were observed in `watched_s`. `remaining_s` is how long the job will still run (None: unknown).
    `rates` are its measured rates by number of workers, in any unit.
    """

    size: int
    ready: int
    coming: int
    ready_since: float
    reform_cost_s: float
    changes: int = 0
    watched_s: float = 0.0
    remaining_s: float | None = None
    rates: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GrowthDecision:
    """Whether to re-form now; if not, when to ask again (None: after the next change); and why, in `words`.

    `pays_back_s`: the P of the module's formula; infinite if more workers are not faster.
    """

    grow: bool
    again_at: float | None
    pays_back_s: float
    words: str


def decide_growth(growth: GrowthOption, now: float, batching: Batching = Batching()) -> GrowthDecision:
    """Decide whether the group re-forms at `now` to take in the newcomers that are ready."""
    if growth.ready <= 0:
        return GrowthDecision(False, None, math.inf, "no worker is ready to join")
    if growth.size <= 0:
        return GrowthDecision(True, None, 0.0, "there is no group yet")
    gain = 1.0 - 1.0 / speedup(growth.size, growth.size + growth.ready, growth.rates, batching.exponent)
    if gain <= 0.0:
        words = f"{plural(growth.ready, 'more worker')} would not make training faster, as measured"
        return GrowthDecision(False, None, math.inf, words)
    pays_back_s = growth.reform_cost_s / gain
    price = f"joining costs {span(growth.reform_cost_s)} and pays for itself after {span(pays_back_s)}"
    if growth.remaining_s is not None and growth.remaining_s <= pays_back_s:
        words = f"{price}, but training ends in {span(growth.remaining_s)}"
        return GrowthDecision(False, None, pays_back_s, words)
    quiet_s = expected_quiet_s(growth.changes, growth.watched_s, batching)
    if quiet_s <= pays_back_s:
        later_s = (pays_back_s - quiet_s) * (growth.changes + 1)
        words = f"{price}, but the next change is expected in {span(quiet_s)}"
        return GrowthDecision(False, now + max(later_s, 1.0), pays_back_s, words)
    until = growth.ready_since + min(batching.window_s, pays_back_s)
    if growth.coming > 0 and now < until:
        words = f"{growth.ready} ready to join; waits at most {span(until - now)} for {growth.coming} more to start"
        return GrowthDecision(False, until, pays_back_s, words)
    return GrowthDecision(True, None, pays_back_s, f"{price}; the next change is expected in {span(quiet_s)}")


def expected_quiet_s(changes: int, watched_s: float, batching: Batching = Batching()) -> float:
    """Seconds until the next change of a group that has seen `changes` in `watched_s`: the T of the module's formula.

    The mean of a Poisson process's interval under a prior worth one change in `typical_quiet_s`.
    """
    return (max(watched_s, 0.0) + batching.typical_quiet_s) / (max(changes, 0) + 1)


def speedup(size: int, larger: int, rates: Mapping[int, float], exponent: float) -> float:
    """s(larger) / s(size): as measured, or from the measured sizes' slope in logarithms, or from `exponent`."""
    known = {workers: rate for workers, rate in rates.items() if workers > 0 and rate > 0.0}
    if size in known and larger in known:
        return known[larger] / known[size]
    slope = min(max(_slope(known), 0.0), 1.0) if len(known) > 1 else exponent
    return math.exp(slope * math.log(larger / size))


def _slope(rates: Mapping[int, float]) -> float:
    """The least-squares slope of log rate over log workers, of two sizes or more."""
    points = [(math.log(workers), math.log(rate)) for workers, rate in sorted(rates.items())]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def measure_growth(
    records: Sequence[GroupGeneration], rates: Mapping[int, float], progress: ProgressStatus | None, now: float
) -> GrowthOption:
    """Measure the newest generation of `records`; the caller fills in who could join.

    `rates`: measured samples a second by number of workers.
    """
    return GrowthOption(
        size=len(records[-1].workers) if records else 0,
        ready=0,
        coming=0,
        ready_since=now,
        reform_cost_s=reform_cost_s(records),
        changes=_losses(records),
        watched_s=_watched_s(records, now),
        remaining_s=_remaining_s(records, progress, now),
        rates=dict(rates),
    )


def payback_s(records: Sequence[GroupGeneration], ready: int, rates: Mapping[int, float]) -> float:
    """Seconds of training after which stopping the group for `ready` newcomers pays for itself: the P of the module's
    formula. A group that always trains that long between two stops does not fall behind a group without newcomers.
    """
    size = len(records[-1].workers)
    gain = 1.0 - 1.0 / speedup(size, size + ready, rates, Batching().exponent) if size else 1.0
    return reform_cost_s(records) / max(gain, LEAST_GAIN)


def outruns(records: Sequence[GroupGeneration], ready: int, now: float) -> bool:
    """Would a group that starts again from step 0, because its script saves nothing, finish sooner with the newcomers?

    How long the job takes is unknown. It is assumed to be half done, and to take at least an hour.
    """
    newest = records[-1]
    trained_s = max(0.0, now - newest.formed_at) if newest.formed_at is not None else 0.0
    size = len(newest.workers)
    times = speedup(size, size + ready, {}, Batching().exponent) if size else math.inf
    job_s = max(2 * trained_s, LEAST_JOB_S)
    return job_s / times + reform_cost_s(records) < job_s - trained_s


def stopped_share(records: Sequence[GroupGeneration], reason: str, now: float) -> float:
    """The share of the time since the first of `records` that stops for newcomers have taken, including one now.

    `reason` is the end of the reason of each generation that newcomers have caused.
    """
    costs = (
        item.first_step_at - item.opened_at
        for item in records
        if item.reason.endswith(reason) and item.first_step_at is not None and item.opened_at is not None
    )
    watched_s = _watched_s(records, now)
    return (sum(costs) + reform_cost_s(records)) / watched_s if watched_s > 0 else math.inf


def reform_cost_s(records: Sequence[GroupGeneration]) -> float:
    """How long this group stops when it re-forms: the mean of the last times from its end to its next step.

    A group that has formed only once is assumed to need as long as its ranks took to their first step.
    """
    costs = [
        item.first_step_at - item.opened_at
        for item in records[1:]
        if item.first_step_at is not None and item.opened_at is not None
    ][-COSTS_KEPT:]
    if costs:
        return sum(costs) / len(costs)
    first = records[0] if records else GroupGeneration()
    known = first.first_step_at is not None and first.formed_at is not None
    return first.first_step_at - first.formed_at if known else UNMEASURED_COST_S  # type: ignore[operator]


def _losses(records: Sequence[GroupGeneration]) -> int:
    """How often a member was missing from the next generation."""
    return sum(not {*before.workers} <= {*after.workers} for before, after in itertools.pairwise(records))


def _watched_s(records: Sequence[GroupGeneration], now: float) -> float:
    first = records[0].formed_at if records else None
    return 0.0 if first is None else max(0.0, now - first)


def _remaining_s(records: Sequence[GroupGeneration], progress: ProgressStatus | None, now: float) -> float | None:
    """Seconds until the last step at the pace of the newest generation; None if that is not known yet."""
    if not records or progress is None or progress.step is None or progress.total_steps is None:
        return None
    newest = records[-1]
    if newest.first_step_at is None or now - newest.first_step_at < LEAST_PACE_S:
        return None
    done = progress.step - (newest.resumed_step or 0) - 1  # the first step had ended by then
    if done <= 0:
        return None
    return max(0, progress.total_steps - progress.step) * (now - newest.first_step_at) / done
