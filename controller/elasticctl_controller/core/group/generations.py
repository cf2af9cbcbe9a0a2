"""When a generation ends and when the next one forms.

A formed generation ends as `endings` says, and drains for newcomers as `newcomers` says. The next one forms as soon as
no more workers are worth waiting for.
"""

from __future__ import annotations

import itertools

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration
from elasticctl_controller.core.group.endings import drain_for_notices, end_broken, end_unreachable
from elasticctl_controller.core.group.group_record import GroupRecord
from elasticctl_controller.core.group.group_states import (
    BreakingGroup,
    FormingGroup,
    GroupEvent,
    GroupState,
    GroupWorld,
)
from elasticctl_controller.core.group.newcomers import admit_newcomers
from elasticctl_controller.core.group.signs_of_life import ADOPT_S

FIRST_SETTLE_S = 30.0
"""How long the first generation, or the first after the loss of all members, waits for workers that are alive but have
not joined, once the minimum has joined."""


def settle_generation(group: GroupRecord, now: float) -> float | None:
    """End the formed generation, or form the next one, if it is time; returns seconds until it should be asked
    again."""
    if group.world is not None:
        again_s = _settle_formed(group, now)
        if group.world is not None:
            return again_s
    joined = group.next_generation.joined
    if group.state is GroupState.OVER or not joined or _awaits_exit(group):
        return None
    if len(joined) < group.members.minimum:
        return _mark_overdue(group, now)
    wait_s = _wait_for_missing_s(group, now)
    if wait_s > 0:
        return wait_s
    _form_generation(group, now)
    return None


def _settle_formed(group: GroupRecord, now: float) -> float | None:
    """End the formed generation if it is time; returns seconds until it should be asked again."""
    waits = [end_unreachable(group, now)]
    if group.state is GroupState.TRAINING:
        waits.append(drain_for_notices(group, now))
    if group.state is GroupState.TRAINING:
        waits.append(admit_newcomers(group, now))
    elif isinstance(group.situation, BreakingGroup):
        waits.append(end_broken(group, group.situation, now))
    return min((wait_s for wait_s in waits if wait_s is not None), default=None)


def _awaits_exit(group: GroupRecord) -> bool:
    """True while the worker that is to blame ends, and the job with it, unless the controller replaces the worker.

    It does not replace the worker if there are enough others.
    """
    members, judged = group.members, group.failures.judged
    if judged is None or not judged.exits or group.next_generation.newcomers(members):
        return False
    stay = members.alive.keys() - members.leaving
    return judged.end.uid in members.alive or len(stay) < group.rules.desired or not stay <= members.ranked.keys()


def _absent(group: GroupRecord) -> set[str]:
    """The live members that should have joined and have not."""
    members, ready = group.members, group.next_generation
    return members.ranked.keys() & members.alive.keys() - ready.joined.keys() - members.leaving - ready.preparing


def _mark_overdue(group: GroupRecord, now: float) -> float | None:
    """Mark silent members for replacement, because the group is too small without them; returns seconds until this
    should be asked again."""
    if not isinstance(group.situation, FormingGroup):
        return None
    absent = _absent(group) - group.signs.overdue
    return group.signs.mark_silent_members_overdue(absent, group.situation.since, now)


def _wait_for_missing_s(group: GroupRecord, now: float) -> float:
    """How many more seconds to wait for workers that are alive but have not joined; <= 0: none."""
    members, ready, remembered = group.members, group.next_generation, group.restored_service.remembered
    pause_s = group.situation.not_before - now if isinstance(group.situation, FormingGroup) else 0.0
    excused = members.leaving | ready.preparing
    missing = (uid for uid in members.alive if uid not in ready.joined and uid not in excused)
    first = next(missing, None)  # in a large group almost every join ends here: build no list of all the others
    if first is None:
        return pause_s
    joined_at = now if ready.first_join_at is None else ready.first_join_at
    # Before the first generation, and after the loss of all members, nothing is lost by waiting for workers that start.
    if group.generation == 0 or (members.ranked and not any(uid in members.alive for uid in members.ranked)):
        return max(pause_s, joined_at + FIRST_SETTLE_S - now)
    if group.state is GroupState.RESTORED and remembered & members.alive.keys() - ready.joined.keys() - members.leaving:
        return joined_at + ADOPT_S - now  # only newcomers have called, and the last generation may be training
    # Otherwise only former members are waited for, each until it counts as silent or unreachable.
    since = group.situation.since if isinstance(group.situation, FormingGroup) else joined_at
    for uid in itertools.chain((first,), missing):
        if uid in members.ranked or not members.ranked:
            until = group.signs.silent_at(uid, since)
            if uid in group.signs.unreachable:
                until = min(until, group.signs.unreachable[uid])
            if until > now:
                return max(pause_s, until - now)
    return pause_s


def _form_generation(group: GroupRecord, now: float) -> None:
    """Start the next generation.

    Members of the last one that are alive and have not joined become overdue.
    """
    members, ready, failures = group.members, group.next_generation, group.failures
    overdue = _absent(group)
    if overdue:
        group.excuse_failure()
    judged = failures.judged
    if judged is not None:
        group.history.note_failure(judged.explains or judged.generation, judged.end.failure)
    ranked, newcomers = ready.rank(members), len(ready.newcomers(members))
    opened_at = group.situation.since if isinstance(group.situation, FormingGroup) else ready.first_join_at
    group.know_generation(group.generation + 1)
    group.restored_service.hear_of(group.generation)
    group.history.add_generation(
        GroupGeneration(
            generation=group.generation,
            workers=tuple(m.name for m in ranked),
            reason=group.reason,
            opened_at=Timestamp(now if opened_at is None else opened_at),
            formed_at=Timestamp(now),
        )
    )
    group.advance(
        GroupEvent.QUORUM_REACHED, now, world=GroupWorld(group.generation, tuple(ranked), group.is_deadlocked)
    )
    group.notices.count_newcomers(newcomers, members.ranked)
    group.restored_service.explain_unseen()
    failures.start_generation()
    ready.start_generation()
    members.start_generation()
    group.reports.start_generation()
    group.signs.mark_overdue(overdue)
