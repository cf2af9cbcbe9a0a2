"""Signs of life of a group's workers, and which of them count as silent or unreachable.

A worker may be silent because its machine is gone, because the network between it and this service is broken, or
because its launcher is busy. Its peers may still reach it, so silence alone does not end a generation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

ADOPT_S = 45.0
"""How long newcomers wait for a restarted service to hear from a group that may still be training: a launcher whose
connection has died unnoticed calls again after 40 s."""
SILENT_S = 10.0
"""The group does not wait for a worker that has given no sign of life for this long: launchers give one every 3 s."""
UNREACHABLE_S = 0.5
"""How long a worker whose host has stopped answering may take to call again. Launchers call again immediately."""
HUNG_UP_S = 2.0
"""The same for a worker that has hung up. It may be starved of processors, and the end of its pod may be about to be
reported, which is better evidence."""
SILENT_SHARE_PER_MIN = 0.1
"""The share of a group that may be deleted as silent within a minute; at least one worker."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A worker's newest sign of life: when (`at`), and what it is `doing` since when; in seconds since the epoch."""

    at: float
    doing: str = ""
    since: float = 0.0


@dataclass(slots=True)
class SignsOfLife:
    """The `newest` sign of life of each worker, by uid.

    `unreachable` are workers whose connections have broken, each with the time from which on it counts as unreachable
    unless it calls again. `hung_up` is the last that closed its connection, and when. `overdue` are workers that were
    left out of the newest generation because they gave no sign of life, `silent` the ones among them that are to be
    replaced, and `silenced_at` is when the last ones became silent. Times are in seconds since the epoch.
    """

    newest: dict[str, Sign] = field(default_factory=dict)
    unreachable: dict[str, float] = field(default_factory=dict)
    hung_up: tuple[str, float] = ("", -math.inf)
    overdue: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    silenced_at: list[float] = field(default_factory=list)

    def drop_absent(self, alive: Collection[str]) -> None:
        """Drop the workers that are not alive."""
        self.silent.intersection_update(alive)
        self.overdue.intersection_update(alive)
        for known in (self.newest, self.unreachable):
            for uid in known.keys() - alive:
                del known[uid]

    def add_sign(self, uid: str, now: float, doing: str = "", for_s: float = 0.0) -> bool:
        """A live worker has called, and has been `doing` something for `for_s` seconds; True if that is new."""
        self.unreachable.pop(uid, None)
        before = self.newest.get(uid)
        doing = doing or (before.doing if before else "")
        is_new = before is None or before.doing != doing
        self.newest[uid] = Sign(now, doing, now - for_s if is_new or before is None else before.since)
        return is_new

    def lose_contact(self, uid: str, now: float, *, hung_up: bool) -> bool:
        """The connection of a live worker has broken; True if it may become unreachable.

        With `hung_up`, it has closed the connection. If several hang up at the same time, the cause is the network, and
        nothing follows from it.
        """
        grace_s = UNREACHABLE_S
        if hung_up:
            (other, at), self.hung_up, grace_s = self.hung_up, (uid, now), HUNG_UP_S
            if other != uid and now < at + HUNG_UP_S:
                self.unreachable.pop(other, None)
                return False
        self.unreachable[uid] = now + grace_s
        return True

    def clear_overdue(self, uid: str) -> None:
        """A worker joins after all."""
        self.silent.discard(uid)
        self.overdue.discard(uid)

    def mark_overdue(self, uids: Iterable[str]) -> None:
        """These members were left out of the newest generation, or hold it up."""
        self.overdue.update(uids)

    def mark_silent_members_overdue(self, awaited: Iterable[str], since: float, now: float) -> float | None:
        """Mark members for replacement that a group that is too small without them has `awaited` in vain; returns
        seconds until this should be asked again.

        A member whose host may still answer has as long as a launcher takes to give up a poll whose answer was lost.
        """
        waits = []
        for uid in awaited:
            left_s = self.silent_at(uid, since) - now
            left_s += 0.0 if uid in self.unreachable else ADOPT_S - SILENT_S
            if left_s > 0:
                waits.append(left_s)
            else:
                self.overdue.add(uid)
        return min(waits, default=None)

    def replace_overdue(self, members: int, known_at: float, now: float) -> float | None:
        """Mark overdue workers as silent, a few at a time, because many at the same time suggest a fault of the
        network.

        The group has this many members. A worker that has not called since `known_at`, when this service first heard of
        it, may still be waiting for an answer of the service before. Returns seconds until this should be asked again.
        """
        if not self.overdue - self.silent:
            return None
        self.silenced_at = [at for at in self.silenced_at if now - at < 60.0]
        room = max(1, int(SILENT_SHARE_PER_MIN * (members + len(self.overdue)))) - len(self.silenced_at)
        waits = []
        for uid in sorted(self.overdue - self.silent):
            sign = self.newest.get(uid)
            left_s = (known_at + ADOPT_S if sign is None else sign.at + SILENT_S) - now
            if left_s <= 0 and room > 0:
                room -= 1
                self.silent.add(uid)
                self.silenced_at.append(now)
            else:
                waits.append(left_s if left_s > 0 else self.silenced_at[0] + 60.0 - now)
        return min(waits, default=None)

    def silent_at(self, uid: str, since: float) -> float:
        """From when on a worker counts as silent if the group has waited for it `since` then and it does not call."""
        return max(since, self.newest[uid].at if uid in self.newest else since) + SILENT_S
