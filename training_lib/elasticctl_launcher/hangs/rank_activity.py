"""Decides whether a rank moves, from observations made from outside. Pure.

A rank moves if it prints, if its Python stacks change, or if it or one of its descendants uses the CPU or the disk. For
a rank in a collective, only its main thread and its output count: NCCL uses the CPU while it waits, and data loaders
and loggers may continue at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticctl_launcher.hangs.process_activity import ProcessActivity
from elasticctl_launcher.hangs.rank_location import Kind, StackPlace
from elasticctl_launcher.hangs.stacks import Stacks, main_thread
from elasticctl_protocol.reports import RankPlace

BUSY_CORES = 0.05
"""Less CPU use than this does not count as work: idle loggers, monitors and metrics clients need that much."""
CLOCK_STEP_S = 0.03
"""A tolerance, because the kernel counts CPU time in steps of 10 ms."""
BUSY_BYTES_PER_S = 65_536
WAKEFUL_PER_S = 2.0
"""A main thread that wakes up more often than this receives data, or polls for it."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was observed of a rank at `at_s` (a time of `time.monotonic`).

    `lines` is how many lines the rank has printed. `stacks` is None if they were not read, or could not be.
    """

    at_s: float
    lines: int
    activity: ProcessActivity | None
    stacks: Stacks | None
    place: StackPlace


@dataclass(frozen=True, slots=True)
class Track:
    """The newest sighting of a rank, and when it was last seen to move.

    `polls`: it wakes up again and again, as if it waits for data from other ranks.
    """

    seen: Sighting
    moved_at_s: float
    polls: bool = False

    @property
    def waits(self) -> bool:
        """True if the other ranks may have to move first, rather than this one."""
        return self.seen.place.kind.waits or self.polls


def follow(before: Track | None, seen: Sighting, *, strict: bool) -> Track:
    """Return the track after one more sighting. `strict`: movement is assumed when in doubt, so stillness is proof."""
    if before is None:
        return Track(seen, seen.at_s)
    moved_at_s = seen.at_s if moves(before.seen, seen, strict=strict) else before.moved_at_s
    return Track(seen, moved_at_s, _is_wakeful(before.seen, seen))


def moves(before: Sighting, after: Sighting, *, strict: bool) -> bool:
    """True if the rank did something between two sightings, or if that is unknown."""
    if after.lines != before.lines:
        return True
    waits = before.place.kind is after.place.kind is Kind.COLLECTIVE
    if before.stacks is not None and after.stacks is not None:
        if waits:
            if main_thread(before.stacks) != main_thread(after.stacks):
                return True
        elif before.stacks != after.stacks:
            return True
    elif strict:
        return True
    return not waits and _works(before, after, strict=strict)


def _works(before: Sighting, after: Sighting, *, strict: bool) -> bool:
    if before.activity is None or after.activity is None:
        return True
    between_s = after.at_s - before.at_s
    cpu_s = after.activity.cpu_s - before.activity.cpu_s
    io_bytes = after.activity.io_bytes - before.activity.io_bytes
    return (
        not 0 <= cpu_s <= BUSY_CORES * between_s + CLOCK_STEP_S  # it is less than before if a process has ended
        or not 0 <= io_bytes <= BUSY_BYTES_PER_S * between_s
        or (strict and (after.activity.running or _is_wakeful(before, after)))
    )


def _is_wakeful(before: Sighting, after: Sighting) -> bool:
    if before.activity is None or after.activity is None:
        return False
    return after.activity.wakeups - before.activity.wakeups > WAKEFUL_PER_S * (after.at_s - before.at_s)


def where_all_are(tracks: Mapping[int, Track], now_s: float) -> tuple[RankPlace, ...]:
    """Return the places of ranks that stand still, in order of rank."""
    return tuple(
        RankPlace(rank, track.seen.place.where, now_s - track.moved_at_s, track.waits)
        for rank, track in sorted(tracks.items())
    )


def wakes_by_itself(tracks: Mapping[int, Track]) -> bool:
    """True if a rank sleeps for a time that it has chosen, so its standstill does not prove a hang."""
    return any(track.seen.place.kind is Kind.SLEEP for track in tracks.values())
