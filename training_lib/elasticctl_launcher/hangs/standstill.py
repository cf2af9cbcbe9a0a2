"""Whether a rank stands still, from observations made from outside, and how long it may. Pure.

A rank moves if it prints, if its Python stacks change, or if it or one of its descendants uses the CPU or the disk. For
a rank in a collective, only its main thread and its output count: NCCL uses the CPU while it waits, and data loaders
and loggers may continue at the same time.

The limit is the user's, or follows from what was measured on the job itself. The reports of the training library
delimit the phases of a generation. A script without the library has one phase only, for which nothing is measured but
how long it stood still before it continued.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from elasticctl_launcher.hangs.process_activity import ProcessActivity
from elasticctl_launcher.hangs.rank_location import Kind, StackPlace
from elasticctl_launcher.hangs.stacks import Stacks, main_thread
from elasticctl_protocol.reports import FinishedReport, ProgressReport, RankPlace, ResumedReport

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


REPORT_S = 60.0
"""A standstill of this length is reported, but ends nothing."""
MEASURED_S = 600.0
"""The minimum for a phase that this job has completed before; torch's own limit for collectives of NCCL."""
UNMEASURED_S = 1800.0
"""The minimum for a phase that this job has never completed; torch's own limit for other collectives."""
FACTOR = 10.0
"""The limit is also at least this many times the longest duration of the phase."""


class RunPhase(Enum):
    """A part of a generation with a duration of its own."""

    STARTING = "from the start of the ranks to their first report"
    FIRST_STEP = "from there to the first step"
    STEP = "from one step to the next, saves included"
    ENDING = "what the script does after training"
    SILENT = "of a script that reports nothing"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many seconds the ranks may stand still until that is reported, and until the group restarts (None: never).

    `strict`: the group restarts only if the ranks are proved to stand still.
    """

    report_s: float
    end_s: float | None
    strict: bool


class TimeLimit:
    """The time limit of a job. `timeout_s` is the user's limit in seconds: 0 for no limit, None if there is none."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._longest_s: dict[RunPhase, float] = {}
        self._longest_standstill_s = 0.0
        self._since_s = 0.0
        self.phase = RunPhase.SILENT

    def start_generation(self, now_s: float) -> None:
        """Start a generation."""
        self.phase, self._since_s = RunPhase.STARTING if self._longest_s else RunPhase.SILENT, now_s

    def record_report(self, kind: str, now_s: float) -> None:
        """Record a report of the training library."""
        phase = RunPhase.STARTING if self.phase is RunPhase.SILENT else self.phase
        if kind == FinishedReport.kind:
            self.phase = RunPhase.ENDING
            return
        if kind == ResumedReport.kind and phase is RunPhase.ENDING:  # the script trains another model
            self.phase, self._since_s = RunPhase.FIRST_STEP, now_s
            return
        stepped = kind == ProgressReport.kind
        if phase is RunPhase.ENDING or (phase is not RunPhase.STARTING and not stepped):
            return  # for example, a commit in the middle of a step
        self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), now_s - self._since_s)
        self.phase, self._since_s = RunPhase.STEP if stepped else RunPhase.FIRST_STEP, now_s

    def record_standstill(self, still_s: float) -> None:
        """Record that the ranks stood still for `still_s` seconds and continued by themselves."""
        self._longest_standstill_s = max(self._longest_standstill_s, still_s)

    def allowance(self) -> Allowance:
        """Return the limits for the phase that the ranks are in."""
        ending = self.phase is RunPhase.ENDING
        if self._timeout_s is not None and not ending:
            report_s = min(REPORT_S, self._timeout_s / 2) or REPORT_S
            return Allowance(report_s, self._timeout_s or None, strict=False)
        floor_s = MEASURED_S if self.phase in self._longest_s else UNMEASURED_S
        end_s = max(floor_s, FACTOR * self._longest_s.get(self.phase, 0.0), FACTOR * self._longest_standstill_s)
        report_s = max(REPORT_S, 2 * self._longest_standstill_s)
        return Allowance(report_s, None if self._timeout_s == 0 else max(end_s, self._timeout_s or 0.0), strict=True)
