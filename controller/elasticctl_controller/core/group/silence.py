"""Workers of which nothing is heard: how long they are waited for, left out of the group, and replaced.

A worker may be silent because its machine is gone, because the network between it and this service is broken, or
because its launcher is busy. Its peers may still reach it, so a silent worker alone ends no generation.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from elasticctl.api.text import join_some
from elasticctl_controller.core.group.failures import excuse_failure
from elasticctl_controller.core.group.group_states import BreakingGroup, FormingGroup, GroupEvent
from elasticctl_controller.core.group.record import ADOPT_S, GroupRecord

SILENT_S = 10.0
"""A worker that has given no sign of life for this long is not waited for: launchers give one every 3 s."""
UNREACHABLE_S = 0.5
"""How long a worker whose host has stopped answering may take to call again. Launchers call again at once."""
STILL_S, STILL_FACTOR = 2.0, 2.0
"""No step for this long, and for so many times the longest that two reports of steps were apart: it stands still."""
SILENT_SHARE_PER_MIN = 0.1
"""The share of a group that may be deleted as silent within a minute; at least one worker."""


def end_unreachable(group: GroupRecord, now: float) -> float | None:
    """End a generation that stands still while a member is unreachable; returns when to ask again.

    Either alone proves nothing: ranks that reach each other train on without this service, and steps may be long. Once
    ranks say themselves that they do not move, a member of which nothing has been heard for long counts as unreachable
    too: its host may have vanished while it had no call open.
    """
    lost_at = {uid: since + UNREACHABLE_S for uid, since in group.unreachable.items() if group.is_awaited(uid)}
    if group.places and not lost_at:
        heard = (uid for uid in group.members if uid in group.signs and group.is_awaited(uid))
        lost_at = {uid: group.signs[uid].at + ADOPT_S for uid in heard}
    due = max(min(lost_at.values(), default=math.inf), _still_at(group))
    if due > now:
        return None if due == math.inf else due - now
    lost = [uid for uid, at in lost_at.items() if at <= now]
    if all(uid in lost for uid in group.members if group.is_awaited(uid)):
        return None
    _leave_out(group, lost, "cannot reach", now)
    return None


def _still_at(group: GroupRecord) -> float:
    """From when on it is known that no step is made (seconds since the epoch); infinite: not yet."""
    if group.places:
        return 0.0
    if _has_victims_only(group):
        return 0.0
    known = group.history
    if known.stepped_at is None or group.obstacle or group.unsaved:
        return math.inf
    return known.stepped_at + max(STILL_S, STILL_FACTOR * known.longest_step_s)


def end_for_silent(group: GroupRecord, now: float) -> bool:
    """End a generation in which ranks have lost their connections if a silent member explains that; True if so.

    Its machine may be gone while the controller cannot see it.
    """
    if not isinstance(group.situation, BreakingGroup) or group.situation.drain or not _has_victims_only(group):
        return False
    since = group.situation.since
    awaited = (uid for uid in group.members if group.is_awaited(uid) and uid not in group.ends)
    lost = [uid for uid in awaited if silent_at(group, uid, since) <= now]
    if lost:
        _leave_out(group, lost, "nothing is heard from", now)
    return bool(lost)


def _has_victims_only(group: GroupRecord) -> bool:
    """Have ranks failed, and all of them because they lost a connection?"""
    return isinstance(group.situation, BreakingGroup) and all(end.of_peers for end in group.ends.values())


def _leave_out(group: GroupRecord, lost: Collection[str], why: str, now: float) -> None:
    """End the generation: these members are lost, which explains whatever has failed."""
    excuse_failure(group)
    names = join_some([member.name for uid, member in group.members.items() if uid in lost], "worker")
    group.advance(GroupEvent.MEMBER_LOST, now, f"{why} {names}")


def mark_overdue(group: GroupRecord, now: float) -> float | None:
    """Have silent members replaced without which the group is too small; returns when to ask again.

    One whose host may still answer is given the time in which a launcher gives up a poll whose answer was lost.
    """
    if not isinstance(group.situation, FormingGroup):
        return None
    waits = []
    excused = group.joined.keys() | group.leaving | group.preparing | group.overdue
    for uid in group.members:
        if uid in group.alive and uid not in excused:
            left_s = silent_at(group, uid, group.situation.since) - now
            left_s += 0.0 if uid in group.unreachable else ADOPT_S - SILENT_S
            if left_s > 0:
                waits.append(left_s)
            else:
                group.overdue.add(uid)
    return min(waits, default=None)


def replace_overdue(group: GroupRecord, now: float) -> float | None:
    """Mark overdue workers to be replaced, few at a time: so many at once hints at a fault of the network.

    Returns when to ask again.
    """
    if not group.overdue - group.silent:
        return None
    group.silenced_at = [at for at in group.silenced_at if now - at < 60.0]
    room = max(1, int(SILENT_SHARE_PER_MIN * (len(group.members) + len(group.overdue)))) - len(group.silenced_at)
    waits = []
    for uid in sorted(group.overdue - group.silent):
        left_s = _dead_at(group, uid) - now
        if left_s <= 0 and room > 0:
            room -= 1
            group.silent.add(uid)
            group.silenced_at.append(now)
        else:
            waits.append(left_s if left_s > 0 else group.silenced_at[0] + 60.0 - now)
    return min(waits, default=None)


def silent_at(group: GroupRecord, uid: str, since: float) -> float:
    """From when on a worker is silent that is waited for since then, if it does not call before."""
    return max(since, group.signs[uid].at if uid in group.signs else since) + SILENT_S


def _dead_at(group: GroupRecord, uid: str) -> float:
    """From when on a worker counts as dead that gives no sign of life (seconds since the epoch).

    One of which a restarted service has not heard may be waiting for an answer of the one before.
    """
    sign = group.signs.get(uid)
    return (group.known_at or 0.0) + ADOPT_S if sign is None else sign.at + SILENT_S
