"""When a generation ends and when the next one forms.

A formed generation drains for members that have to leave and for newcomers, and ends once ranks have failed or a member
cannot be reached. The next one forms as soon as no more workers are worth waiting for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration
from elasticctl.api.text import join_some
from elasticctl_controller.core.group.failures import awaits_exit, excuse_failure, judge_failure, wait_for_ends_s
from elasticctl_controller.core.group.group_record import ADOPT_S, GroupRecord
from elasticctl_controller.core.group.group_states import (
    BreakingGroup,
    FormingGroup,
    GroupEvent,
    GroupState,
    GroupWorld,
)
from elasticctl_controller.core.group.newcomers import admit_newcomers
from elasticctl_controller.core.group.silent_workers import (
    end_for_silent,
    end_unreachable,
    mark_overdue,
    silent_at,
)
from elasticctl_controller.core.interruption_notices import Replacements, lead_s, who_leaves

FIRST_SETTLE_S = 30.0
"""How long the first generation, or the first after the loss of all members, waits for workers that are alive but have
not joined, once the minimum has joined."""
STARTED_S = 30.0
"""After this time, ranks that report nothing are assumed to have started; others have started with their first step."""


def settle_generation(group: GroupRecord, now: float) -> float | None:
    """End the formed generation, or form the next one, if it is time; returns seconds until it should be asked
    again."""
    if group.world is not None:
        again_s = _settle_formed(group, now)
        if group.world is not None:
            return again_s
    if group.state is GroupState.OVER or not group.joined or awaits_exit(group):
        return None
    if len(group.joined) < group.minimum:
        return mark_overdue(group, now)
    wait_s = _wait_for_missing_s(group, now)
    if wait_s > 0:
        return wait_s
    _form_generation(group, now)
    return None


def _settle_formed(group: GroupRecord, now: float) -> float | None:
    """End the formed generation if it is time; returns seconds until it should be asked again."""
    waits = [end_unreachable(group, now)]
    if group.state is GroupState.TRAINING:
        waits.append(_settle_notices(group, now))
    if group.state is GroupState.TRAINING:
        waits.append(admit_newcomers(group, now))
    elif isinstance(group.situation, BreakingGroup):
        wait_s = wait_for_ends_s(group, group.situation, now)
        if wait_s <= 0 and not end_for_silent(group, now):
            judge_failure(group, now)
        waits.append(wait_s)
    return min((wait_s for wait_s in waits if wait_s is not None), default=None)


def _settle_notices(group: GroupRecord, now: float) -> float | None:
    """Drain the group once members that have to leave can be replaced, or their time is up; returns seconds until this
    should be asked again.
    """
    held = group.notices.held(uid for uid in group.members if group.is_awaited(uid))
    if not held:
        return None
    others, started_at = Replacements(), _started_at(group)
    if started_at <= now and not (group.obstacle or group.unsaved or group.trained):
        ready = sum(uid not in group.members for uid in group.joined) + group.notices.replaced
        known = group.joined.keys() | group.members.keys() | group.leaving
        others = Replacements(ready, any(uid not in known for uid in group.alive), group.first_join_at)
    leaving, again_at = who_leaves(held, others, leaving_lead_s(group), now)
    if leaving:
        reasons = join_some(sorted({held[uid].reason for uid in leaving}), "reason")
        let_go(group, leaving, f"{who_stops(group, leaving)}: {reasons}", now)
    again_at = min(again_at, started_at if started_at > now else math.inf)
    return None if again_at == math.inf else max(0.0, again_at - now)


def who_stops(group: GroupRecord, uids: Collection[str]) -> str:
    """Which members have to stop, in words."""
    names = join_some([group.members[uid].name for uid in uids], "worker")
    return f"{names} {'has' if len(uids) == 1 else 'have'} to stop"


def let_go(group: GroupRecord, uids: Collection[str], reason: str, now: float) -> None:
    """Tell members to stop, and drain the group."""
    group.notices.depart(uids)
    group.leaving |= group.notices.departing
    group.advance(GroupEvent.REMOVAL_ANNOUNCED, now, reason)


def leaving_lead_s(group: GroupRecord) -> float:
    """How many seconds before its deadline a member of this group begins to leave."""
    return lead_s(group.history.longest_step_s, group.history.checkpoint.duration_s or 0.0)


def _started_at(group: GroupRecord) -> float:
    """When the ranks of this generation have started (seconds since the epoch): with their first step, if they report
    steps; infinite: not yet. Stopping them earlier gains nothing.
    """
    newest = group.history.newest
    if newest is None or newest.formed_at is None or newest.first_step_at is not None:
        return 0.0
    return math.inf if group.history.reports else newest.formed_at + STARTED_S


def _wait_for_missing_s(group: GroupRecord, now: float) -> float:
    """How many more seconds to wait for workers that are alive but have not joined; <= 0: none."""
    pause_s = group.situation.not_before - now if isinstance(group.situation, FormingGroup) else 0.0
    absent = group.leaving | group.preparing
    missing = (uid for uid in group.alive if uid not in group.joined and uid not in absent)
    first = next(missing, None)  # in a large group almost every join ends here: build no list of all the others
    if first is None:
        return pause_s
    joined_at = now if group.first_join_at is None else group.first_join_at
    if group.generation == 0 or (group.members and not any(uid in group.alive for uid in group.members)):
        return max(pause_s, joined_at + FIRST_SETTLE_S - now)
    if (
        group.state is GroupState.RESTORED
        and group.remembered & group.alive.keys() - group.joined.keys() - group.leaving
    ):
        return joined_at + ADOPT_S - now  # only newcomers have called, and the last generation may be training
    since = group.situation.since if isinstance(group.situation, FormingGroup) else joined_at
    for uid in itertools.chain((first,), missing):
        if uid in group.members or not group.members:
            until = silent_at(group, uid, since)
            if uid in group.unreachable:
                until = min(until, group.unreachable[uid])
            if until > now:
                return max(pause_s, until - now)
    return pause_s


def _form_generation(group: GroupRecord, now: float) -> None:
    """Rank the members (survivors keep their order, newcomers follow by name), and start the generation.

    Members of the last generation that are alive and have not joined become overdue.
    """
    overdue = group.members.keys() & group.alive.keys() - group.joined.keys() - group.leaving - group.preparing
    if overdue:
        excuse_failure(group)
    if group.judged is not None:
        group.history.note_failure(group.judged.explains or group.judged.generation, group.judged.end.failure)
    group.unexplained = group.judged.generation if group.judged is not None and group.judged.end.of_peers else 0
    ranks = {uid: rank for rank, uid in enumerate(group.members)}
    newcomers = sum(uid not in group.members for uid in group.joined)
    members = sorted(group.joined.values(), key=lambda m: (ranks.get(m.uid, len(ranks)), len(m.name), m.name))
    opened_at = group.situation.since if isinstance(group.situation, FormingGroup) else group.first_join_at
    group.generation += 1
    group.begun = group.begun or group.generation
    group.history.add(
        GroupGeneration(
            generation=group.generation,
            workers=tuple(m.name for m in members),
            reason=group.reason,
            opened_at=Timestamp(now if opened_at is None else opened_at),
            formed_at=Timestamp(now),
        )
    )
    group.advance(
        GroupEvent.QUORUM_REACHED, now, world=GroupWorld(group.generation, tuple(members), group.is_deadlocked)
    )
    group.judged, group.unseen, group.first_join_at, group.obstacle, group.unsaved = None, 0, None, "", ""
    group.notices.note_formed(newcomers, group.members)
    group.places.clear()
    for left in (group.joined, group.ends, group.finished, group.terminated, group.trained):
        left.clear()
    group.overdue |= overdue
