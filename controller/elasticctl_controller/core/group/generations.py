"""When a generation ends and when the next one forms.

Members that cannot be reached and ranks that have failed break a formed generation. It drains for members that have to
leave, and for newcomers as `newcomers` says. The next one forms as soon as no more workers are worth waiting for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration
from elasticctl.api.text import join_some
from elasticctl_controller.core.group.failures import (
    CULPRIT_S,
    LAST_CALL_S,
    VICTIMS_S,
    Judgement,
    RanksEnd,
    find_root_cause,
    with_evidence,
)
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
from elasticctl_controller.core.interruption_notices import Replacements, lead_s, who_leaves
from elasticctl_protocol.reports import RankPlace

FIRST_SETTLE_S = 30.0
"""How long the first generation, or the first after the loss of all members, waits for workers that are alive but have
not joined, once the minimum has joined."""


def end_or_form_generation(group: GroupRecord, now: float) -> float | None:
    """End the formed generation, or form the next one, if it is time; returns seconds until it should be asked
    again."""
    if group.world is not None:
        again_s = _end_formed(group, now)
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


def _end_formed(group: GroupRecord, now: float) -> float | None:
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


STILL_S, STILL_FACTOR = 2.0, 2.0
"""A group stands still if it has made no step for this long, and for this many times the longest time between two
reports of steps."""
STARTED_S = 30.0
"""After this time, ranks that report nothing are assumed to have started; others have started with their first step."""


def end_unreachable(group: GroupRecord, now: float) -> float | None:
    """End a generation that stands still while a member is unreachable; returns seconds until this should be asked
    again.

    Either alone proves nothing: ranks that reach each other keep training without this service, and steps may be long.
    Once ranks report themselves that they do not move, a member that has been silent for long counts as unreachable
    too, because its host may have vanished while it had no call open.
    """
    members, signs = group.members, group.signs
    lost_at = {uid: at for uid, at in signs.unreachable.items() if members.is_awaited(uid)}
    if group.reports.places and not lost_at:
        lost_at = {uid: signs.newest[uid].at + ADOPT_S for uid in members.awaited() if uid in signs.newest}
    due = max(min(lost_at.values(), default=math.inf), _still_at(group))
    if due > now:
        return None if due == math.inf else due - now
    lost = [uid for uid, at in lost_at.items() if at <= now]
    if all(uid in lost for uid in members.awaited()):
        return None
    _leave_out(group, lost, "cannot reach", now)
    return None


def _still_at(group: GroupRecord) -> float:
    """From when on it is certain that no steps are being made (seconds since the epoch); infinite: not yet."""
    if group.reports.places or _has_victims_only(group):
        return 0.0
    known = group.history
    if known.stepped_at is None or group.reports.cannot_save:
        return math.inf
    return known.stepped_at + max(STILL_S, STILL_FACTOR * known.longest_step_s)


def _has_victims_only(group: GroupRecord) -> bool:
    """Have ranks failed, all of them because they lost a connection?"""
    return isinstance(group.situation, BreakingGroup) and not group.failures.has_culprit


def _leave_out(group: GroupRecord, lost: Collection[str], why: str, now: float) -> None:
    """End the generation: these members are lost, which explains any failures."""
    group.excuse_failure()
    group.advance(GroupEvent.MEMBER_LOST, now, f"{why} {group.members.name_some(lost)}")


def end_broken(group: GroupRecord, broken: BreakingGroup, now: float) -> float:
    """End a broken generation once the ends of the other members' ranks are known or have been waited for; returns how
    many more seconds to wait for them (<= 0: not at all).

    If all ranks have lost a connection, a silent member explains that: its machine may be gone while the controller
    cannot see it.
    """
    wait_s = _wait_for_ends_s(group, broken, now)
    if wait_s > 0:
        return wait_s
    silent: list[str] = []
    if not broken.drain and _has_victims_only(group):
        missing = (uid for uid in group.members.awaited() if uid not in group.failures.ends)
        silent = [uid for uid in missing if group.signs.silent_at(uid, broken.since) <= now]
    if silent:
        _leave_out(group, silent, "nothing is heard from", now)
    else:
        judge_failure(group, now)
    return wait_s


def _wait_for_ends_s(group: GroupRecord, broken: BreakingGroup, now: float) -> float:
    """How much longer to wait for the ends of the other members' ranks; <= 0: not at all."""
    failures = group.failures
    if all(uid in failures.ends for uid in group.members.awaited()):
        return 0.0
    end = find_root_cause(failures.ends.values())
    patience_s = VICTIMS_S * 4.0 ** min(failures.count, 10) if end.of_peers else CULPRIT_S
    if end.of_peers and not broken.drain and not group.rules.allow_restart(end, failures.count + 1):
        patience_s = max(patience_s, LAST_CALL_S)
    return broken.since + patience_s - now


def judge_failure(group: GroupRecord, now: float) -> None:
    """Find the end that is to blame, and count the failure."""
    members, failures = group.members, group.failures
    end = find_root_cause(failures.ends.values())
    if end.of_peers and isinstance(group.situation, BreakingGroup) and group.situation.drain:
        group.advance(GroupEvent.MEMBER_LEFT, now, group.situation.drain)  # the members that stop hang up
        return
    unheard = unheard_members(group, end)
    if unheard:
        group.advance(GroupEvent.MEMBER_LEFT, now, f"hung while {members.name_some(unheard)} could not be heard")
        return
    finished = {m.name: uid in members.terminated for uid, m in members.ranked.items() if uid in members.finished}
    end = with_evidence(end, finished, _places_of_others(group, end.uid))
    explains = 0 if end.of_peers or _has_begun(group) else failures.unexplained
    is_known = group.generation in group.restored_service.recalled  # before this service knew who the members are
    if not (explains or is_known):
        failures.count_one()
    if end.failure.is_hang:
        failures.count_hang()
    failures.judge(Judgement(group.generation, end, exits=not group.may_restart(end), explains=explains))
    group.advance(GroupEvent.FAILURE_JUDGED, now, f"{end.name} {'lost a connection' if end.of_peers else 'failed'}")


def _places_of_others(group: GroupRecord, uid: str) -> dict[int, RankPlace]:
    """The places of ranks that stand still, without those of this member."""
    places, first = group.reports.places, 0
    for member in group.members.ranked.values():
        if member.uid == uid:
            return {rank: at for rank, at in places.items() if not first <= rank < first + member.slots}
        first += member.slots
    return places


def unheard_members(group: GroupRecord, end: RanksEnd) -> set[str]:
    """If this is a hang: the uids of the other members that could not be heard at the time, because no service was
    running.

    To its peers, a machine that is cut off looks like a hang, so such a hang is not counted as a failure.
    """
    members, restored = group.members, group.restored_service
    if not end.failure.is_hang or restored.known_at is None:
        return set()
    known = (*members.ranked, *restored.remembered)
    others = {uid for uid in known if uid != end.uid and uid in members.alive} - members.finished
    return others if end.at < restored.known_at else others - group.signs.newest.keys()


def _has_begun(group: GroupRecord) -> bool:
    """Have the ranks of the newest generation met?"""
    newest = group.history.newest
    return newest is not None and (newest.resumed_step is not None or newest.first_step_at is not None)


def drain_for_notices(group: GroupRecord, now: float) -> float | None:
    """Drain the group once members that have to leave can be replaced, or their time is up; returns seconds until this
    should be asked again.
    """
    members, ready = group.members, group.next_generation
    held = group.notices.held(members.awaited())
    if not held:
        return None
    # No member leaves early for a replacement while a stop would cost more than it saves: before the ranks have
    # started, while nothing can be saved, and once training is done.
    others, started_at = Replacements(), _started_at(group)
    if started_at <= now and not (group.reports.cannot_save or members.trained):
        count = len(ready.newcomers(members)) + group.notices.replaced
        known = ready.joined.keys() | members.ranked.keys() | members.leaving
        others = Replacements(count, any(uid not in known for uid in members.alive), ready.first_join_at)
    leaving, again_at = who_leaves(held, others, leaving_lead_s(group), now)
    if leaving:
        reasons = join_some(sorted({held[uid].reason for uid in leaving}), "reason")
        let_go(group, leaving, f"{members.who_stops(leaving)}: {reasons}", now)
    again_at = min(again_at, started_at if started_at > now else math.inf)
    return None if again_at == math.inf else max(0.0, again_at - now)


def let_go(group: GroupRecord, uids: Collection[str], reason: str, now: float) -> None:
    """Ask members to stop, and drain the group."""
    group.notices.depart(uids)
    group.members.mark_leaving(group.notices.departing)
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
