"""Ranks that fail: how long to wait for the ends of the others, which one is to blame, and whether they restart.

`root_cause` compares the ends of ranks alone. This module adds what the group knows: which members were lost or out of
reach in the meantime, how many failures there have been since the last checkpoint, and what the ranks had reported.
"""

from __future__ import annotations

from dataclasses import replace

from elasticctl.api.observed.hang_description import RankPlace
from elasticctl.api.text import join_some
from elasticctl_controller.core.group.group_record import ADOPT_S, GroupRecord
from elasticctl_controller.core.group.group_states import BreakingGroup, FormingGroup, GroupEvent
from elasticctl_controller.core.group.root_cause import Judgement, RanksEnd, find_root_cause, with_evidence

VICTIMS_S, CULPRIT_S, LAST_CALL_S = 10.0, 1.0, 2 * ADOPT_S
"""How long to wait for the ends of the other members' ranks: after broken connections, which must have a cause (four
times as long with each such failure in a row), after an error of a rank's own, and at least if broken connections would
end the job: long enough for a launcher whose report was lost to report twice more."""


def wait_for_ends_s(group: GroupRecord, broken: BreakingGroup, now: float) -> float:
    """How much longer to wait for the ends of the other members' ranks; <= 0: not at all."""
    if all(uid in group.ends or uid in group.finished or uid not in group.alive for uid in group.members):
        return 0.0
    end = find_root_cause(group.ends.values())
    patience_s = VICTIMS_S * 4.0 ** min(group.failures, 10) if end.of_peers else CULPRIT_S
    if end.of_peers and not broken.drain and not group.rules.allow_restart(end, group.failures + 1):
        patience_s = max(patience_s, LAST_CALL_S)
    return broken.since + patience_s - now


def judge_failure(group: GroupRecord, now: float) -> None:
    """Find the end that is to blame, and count the failure."""
    end = find_root_cause(group.ends.values())
    if end.of_peers and isinstance(group.situation, BreakingGroup) and group.situation.drain:
        group.advance(GroupEvent.MEMBER_LEFT, now, group.situation.drain)  # who has stopped for it has hung up
        return
    unheard = unheard_beside(group, end)
    if unheard:
        names = join_some([member.name for uid, member in group.members.items() if uid in unheard], "worker")
        group.advance(GroupEvent.MEMBER_LEFT, now, f"hung while nobody could hear {names}")
        return
    finished = {member.name: uid in group.terminated for uid, member in group.members.items() if uid in group.finished}
    end = with_evidence(end, finished, _places_beside(group, end.uid))
    explains = 0 if end.of_peers or _has_begun(group) else group.unexplained
    is_known = group.generation in group.recalled  # this service heard of it before it knew who the members are
    group.failures += not (explains or is_known)
    group.hangs += end.failure.is_hang
    group.judged = Judgement(group.generation, end, exits=not may_restart(group, end), explains=explains)
    group.advance(GroupEvent.FAILURE_JUDGED, now, f"{end.name} {'lost a connection' if end.of_peers else 'failed'}")


def _places_beside(group: GroupRecord, uid: str) -> dict[int, RankPlace]:
    """The places of ranks that stand still, without those of this member."""
    first = 0
    for member in group.members.values():
        if member.uid == uid:
            return {rank: at for rank, at in group.places.items() if not first <= rank < first + member.slots}
        first += member.slots
    return group.places


def unheard_beside(group: GroupRecord, end: RanksEnd) -> set[str]:
    """If this is a hang: the uids of the members that could not be heard at the time, because no service was running.

    To its peers, a machine that is cut off looks like a hang, so such a hang is nobody's failure.
    """
    others = {uid for uid in (*group.members, *group.remembered) if uid != end.uid and uid in group.alive}
    if not end.failure.is_hang or group.known_at is None:
        return set()
    return others - group.finished - (set() if end.at < group.known_at else group.signs.keys())


def _has_begun(group: GroupRecord) -> bool:
    """Have the ranks of the newest generation met?"""
    newest = group.history.newest
    return newest is not None and (newest.resumed_step is not None or newest.first_step_at is not None)


def may_restart(group: GroupRecord, end: RanksEnd) -> bool:
    """May the ranks restart? A script that has made a step can be imported; if it cannot be now, something else is
    wrong."""
    if end.permanent and group.history.has_stepped:
        end = replace(end, permanent=False)
    return group.rules.allow_restart(end, group.failures)


def excuse_failure(group: GroupRecord) -> None:
    """A member has been lost. That explains the failure of its peers, which then does not count."""
    group.unseen = 0
    if group.judged is not None and not group.judged.exits:
        group.failures = max(0, group.failures - (not group.judged.explains))
        group.judged = None
        if isinstance(group.situation, FormingGroup):
            group.situation = replace(group.situation, not_before=0.0)


def awaits_exit(group: GroupRecord) -> bool:
    """True while the worker that is to blame ends, and the job with it, unless the controller replaces the worker.

    It does not replace the worker if there are enough others.
    """
    if group.judged is None or not group.judged.exits or any(uid not in group.members for uid in group.joined):
        return False
    stay = group.alive.keys() - group.leaving
    return group.judged.end.uid in group.alive or len(stay) < group.rules.desired or not stay <= group.members.keys()
