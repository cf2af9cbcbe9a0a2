"""Goodput: the share of wall time in which training moved forward. Pure.

Time moves training forward from a group's first step until it is told to stop, or until its last report; not while
workers start, import, wait, meet and restore, nor while the job is suspended. Of a group that was cut off, the share of
its time that went into steps which had to be done again is taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticctl.status import Generation, JobStatus


@dataclass(frozen=True, slots=True)
class Goodput:
    """Seconds of wall time, and of them those in which training moved forward, or did steps that were lost.

    `whole`: it is of the job's whole life; otherwise of the groups that its status still knows.
    """

    wall_s: float
    forward_s: float
    redone_s: float
    whole: bool = True

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return min(1.0, self.forward_s / self.wall_s) if self.wall_s > 0 else 0.0


def goodput(status: JobStatus, now: float) -> Goodput | None:
    """What came of a job's time up to `now` (seconds since the epoch), or its end; None before the first step."""
    groups = status.generations
    end = status.completion_time if status.completion_time is not None else now
    begin = _begin(status)
    if begin is None or end <= begin or not any(group.first_step_at is not None for group in groups):
        return None
    forward_s = redone_s = 0.0
    for position, group in enumerate(groups):
        spent_s = trained_s(status, position, end)
        lost_s = spent_s * _lost_share(group, groups[position + 1 :])
        forward_s += spent_s - lost_s
        redone_s += lost_s
    return Goodput(end - begin, forward_s, redone_s, whole=groups[0].generation <= 1)


def _begin(status: JobStatus) -> float | None:
    """When the clock started: with the job, or the oldest group that is still known."""
    if not status.generations:
        return None
    first = status.generations[0]
    moments = [first.opened_at, first.formed_at, first.first_step_at]
    if first.generation <= 1:
        moments.append(status.start_time)  # a resumed job's is later than its first group
    return min((moment for moment in moments if moment is not None), default=None)


def trained_s(status: JobStatus, position: int, end: float) -> float:
    """Seconds from the first step of a group until it was told to stop, or until `end`; 0 before that step."""
    group, later = status.generations[position], status.generations[position + 1 :]
    if group.first_step_at is None:
        return 0.0
    moments: tuple[float | None, ...] = (end if status.progress.at is None else min(end, status.progress.at),)
    if later:
        moments = (later[0].opened_at, later[0].formed_at, later[0].first_step_at, group.first_step_at)
    stop = next(moment for moment in moments if moment is not None)
    return max(0.0, stop - group.first_step_at)


def _lost_share(group: Generation, later: Sequence[Generation]) -> float:
    """The share of a group's steps that a later one did again."""
    resumed = next((item.resumed_step for item in later if item.resumed_step is not None), None)
    if resumed is None or group.last_step is None:
        return 0.0
    taken = group.last_step - (group.resumed_step or 0)
    return min(1.0, max(0, group.last_step - resumed) / taken) if taken > 0 else 0.0
