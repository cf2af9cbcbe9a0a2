"""Does a rank move? The decision, from what was seen of it from outside; pure.

A rank moves if it prints, if its Python stacks change, or if it, or a process that it has started, is at work for the
processor or the disk. A rank in a collective is looked at less closely: NCCL spins while it waits, and data loaders and
loggers may go on beside it, so only its own main thread and its output count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticctl_launcher.hangs.places import Kind, Place, RankPlace
from elasticctl_launcher.hangs.stacks import Stacks, main_thread
from elasticctl_launcher.hangs.vitals import Vitals

BUSY_CORES = 0.05
"""Less than this is not work: loggers, monitors and clients of metrics take it while they have nothing to do."""
CLOCK_STEP_S = 0.03
"""The kernel counts processor time in steps of 10 ms."""
BUSY_BYTES_PER_S = 65_536
WAKEFUL_PER_S = 2.0
"""A main thread that wakes up more often than this receives something, or looks for it again and again."""


@dataclass(frozen=True, slots=True)
class Sighting:
    """What was seen of a rank at `at_s` (monotonic). `stacks` is None if nobody looked, or they could not be read;
    `lines` is how many lines it has printed.
    """

    at_s: float
    lines: int
    vitals: Vitals | None
    stacks: Stacks | None
    place: Place


@dataclass(frozen=True, slots=True)
class Track:
    """The newest sighting of a rank, and when it was last seen to move.

    `polls`: it wakes up again and again, as if to look for something that others have to bring.
    """

    seen: Sighting
    moved_at_s: float
    polls: bool = False

    @property
    def waits(self) -> bool:
        """True if others, not this rank, may have to move first."""
        return self.seen.place.kind.waits or self.polls


def follow(before: Track | None, seen: Sighting, *, strict: bool) -> Track:
    """The track after one more sighting. `strict`: a doubt counts as movement, so that stillness is proof."""
    if before is None:
        return Track(seen, seen.at_s)
    moved_at_s = seen.at_s if moves(before.seen, seen, strict=strict) else before.moved_at_s
    return Track(seen, moved_at_s, _is_wakeful(before.seen, seen))


def moves(before: Sighting, after: Sighting, *, strict: bool) -> bool:
    """True if the rank did something between two sightings, or if that cannot be told."""
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
    if before.vitals is None or after.vitals is None:
        return True
    between_s = after.at_s - before.at_s
    cpu_s = after.vitals.cpu_s - before.vitals.cpu_s
    io_bytes = after.vitals.io_bytes - before.vitals.io_bytes
    return (
        not 0 <= cpu_s <= BUSY_CORES * between_s + CLOCK_STEP_S  # less than before: a process has ended
        or not 0 <= io_bytes <= BUSY_BYTES_PER_S * between_s
        or (strict and (after.vitals.running or _is_wakeful(before, after)))
    )


def _is_wakeful(before: Sighting, after: Sighting) -> bool:
    if before.vitals is None or after.vitals is None:
        return False
    return after.vitals.wakeups - before.vitals.wakeups > WAKEFUL_PER_S * (after.at_s - before.at_s)


def where_all_are(tracks: Mapping[int, Track], now_s: float) -> tuple[RankPlace, ...]:
    """The places of ranks that stand still, by rank."""
    return tuple(
        RankPlace(rank, track.seen.place.where, now_s - track.moved_at_s, track.waits)
        for rank, track in sorted(tracks.items())
    )


def wakes_by_itself(tracks: Mapping[int, Track]) -> bool:
    """True if a rank sleeps for a time that it has chosen: it stands still, and yet that is no proof of a hang."""
    return any(track.seen.place.kind is Kind.SLEEP for track in tracks.values())
