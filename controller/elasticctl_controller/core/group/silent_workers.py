"""Silent workers: how long the group waits for them, and when they are left out of the group and replaced.

A worker may be silent because its machine is gone, because the network between it and this service is broken, or
because its launcher is busy. Its peers may still reach it, so silence alone does not end a generation.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from elasticctl.api.text import join_some
from elasticctl_controller.core.group.failures import excuse_failure
from elasticctl_controller.core.group.group_record import ADOPT_S, GroupRecord
from elasticctl_controller.core.group.group_states import BreakingGroup, FormingGroup, GroupEvent

SILENT_S = 10.0
"""The group does not wait for a worker that has given no sign of life for this long: launchers give one every 3 s."""
UNREACHABLE_S = 0.5
"""How long a worker whose host has stopped answering may take to call again. Launchers call again at once."""
HUNG_UP_S = 2.0
"""The same for a worker that has hung up. It may be starved of processors, and its pod's end may be about to be known,
which says more."""
STILL_S, STILL_FACTOR = 2.0, 2.0
"""A group stands still if it has made no step for this long, and for this many times the longest time between two
reports of steps."""
SILENT_SHARE_PER_MIN = 0.1
"""The share of a group that may be deleted as silent within a minute; at least one worker."""


def end_unreachable(group: GroupRecord, now: float) -> float | None:
    """End a generation that stands still while a member is unreachable; returns seconds until this should be asked
    again.

    Either alone proves nothing: ranks that reach each other keep training without this service, and steps may be long.
    Once ranks report themselves that they do not move, a member that has been silent for long counts as unreachable
    too, because its host may have vanished while it had no call open.
    """
    lost_at = {uid: at for uid, at in group.unreachable.items() if group.is_awaited(uid)}
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
    """From when on it is certain that no steps are being made (seconds since the epoch); infinite: not yet."""
    if group.places:
        return 0.0
    if _has_victims_only(group):
        return 0.0
    known = group.history
    if known.stepped_at is None or group.obstacle or group.unsaved:
        return math.inf
    return known.stepped_at + max(STILL_S, STILL_FACTOR * known.longest_step_s)


def end_for_silent(group: GroupRecord, now: float) -> bool:
    """End a generation whose ranks have lost their connections if a silent member explains that; True if it does.

    The member's machine may be gone while the controller cannot see it.
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
    """Have ranks failed, all of them because they lost a connection?"""
    return isinstance(group.situation, BreakingGroup) and all(end.of_peers for end in group.ends.values())


def _leave_out(group: GroupRecord, lost: Collection[str], why: str, now: float) -> None:
    """End the generation: these members are lost, which explains any failures."""
    excuse_failure(group)
    names = join_some([member.name for uid, member in group.members.items() if uid in lost], "worker")
    group.advance(GroupEvent.MEMBER_LOST, now, f"{why} {names}")


def mark_overdue(group: GroupRecord, now: float) -> float | None:
    """Mark silent members for replacement if the group is too small without them; returns seconds until this should be
    asked again.

    A member whose host may still answer has as long as a launcher takes to give up a poll whose answer was lost.
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
    """Mark overdue workers for replacement, a few at a time, because many at once suggest a fault of the network.

    Returns seconds until this should be asked again.
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
    """From when on a worker counts as silent if the group has waited for it `since` then and it does not call."""
    return max(since, group.signs[uid].at if uid in group.signs else since) + SILENT_S


def _dead_at(group: GroupRecord, uid: str) -> float:
    """From when on a worker that gives no sign of life counts as dead (seconds since the epoch).

    A worker that has not called a restarted service may still be waiting for an answer of the previous one.
    """
    sign = group.signs.get(uid)
    return (group.known_at or 0.0) + ADOPT_S if sign is None else sign.at + SILENT_S
