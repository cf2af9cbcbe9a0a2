"""When a training group is stopped to admit newcomers. `growth` estimates what that costs and gains."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from elasticctl.api.text import join_some
from elasticctl_controller.core.group.group_record import GroupRecord
from elasticctl_controller.core.group.group_states import GroupEvent
from elasticctl_controller.core.group.growth import decide_growth, measure_growth, outruns, payback_s, stopped_share

NEWCOMER_SETTLE_S = 2.0
"""How long a newcomer waits for others that are starting, so that they cost the group one re-forming rather than
several. A script that reports nothing is left alone for this long first, and twice as long after each stop."""
LONGEST_SETTLE_S = 600.0
MOST_STOPPED = 0.5
"""If stops for newcomers have taken a larger share of the group's time than this, the next waits until it pays off."""
_JOINED = " joined"
"""How the reason of a generation ends that newcomers have caused."""


def admit_newcomers(group: GroupRecord, now: float) -> float | None:
    """Drain the group if newcomers are ready and it is time to admit them; returns seconds until this should be asked
    again.
    """
    newcomers = [member.name for uid, member in group.joined.items() if uid not in group.members]
    before, group.growth = group.growth, ""
    if not newcomers or group.first_join_at is None:
        return None
    if group.trained:
        group.growth = "training is done"
        return None
    if group.obstacle or group.unsaved:
        group.growth = "the storage does not answer, so what has not been saved would be lost"
        return None
    if group.notices.held(group.members):
        group.growth = "newcomers replace workers that have to leave"
        return None
    if _would_lose_more(group, len(newcomers), now):
        group.growth = "newcomers wait: the script reports no steps, so a stop may cost more work than they would add"
        return None
    starting = [uid for uid in group.alive if uid not in group.joined and uid not in group.members]
    waits = [group.first_join_at + NEWCOMER_SETTLE_S] if starting and not group.rules.automatic else []
    waits.append(_pays_at(group, len(newcomers), bool(starting), now))
    if max(waits) > now:
        group.growth = before or "newcomers wait until the group has trained long enough for a stop to pay off"
        return None if max(waits) == math.inf else max(waits) - now
    if group.rules.automatic and not group.serves_commands:
        measured = measure_growth(group.history.generations, group.history.rates, group.history.progress, now)
        verdict = decide_growth(
            replace(measured, ready=len(newcomers), coming=len(starting), ready_since=group.first_join_at), now
        )
        if not verdict.grow:
            group.growth = before or verdict.words  # the first words stay: the seconds left change all the time
            return None if verdict.again_at is None else max(0.0, verdict.again_at - now)
    group.advance(GroupEvent.NEWCOMERS_DUE, now, f"{join_some(newcomers, 'worker')}{_JOINED}")
    return None


def _would_lose_more(group: GroupRecord, newcomers: int, now: float) -> bool:
    """True if nobody has asked for the newcomers, and the group may lose more to a stop than they would add."""
    if group.history.reports or group.serves_commands or group.rules.asked or group.history.newest is None:
        return False
    return not outruns(group.history.generations, newcomers, now)


def _pays_at(group: GroupRecord, newcomers: int, more_to_come: bool, now: float) -> float:
    """From when on stopping the group for newcomers pays off (seconds since the epoch); infinite: not before a step.

    If no more newcomers will come, it stops at once, unless such stops have taken much of its time already.
    """
    newest = group.history.newest
    if newest is None or newest.formed_at is None or group.serves_commands:
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
