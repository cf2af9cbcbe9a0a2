"""How fast a job trains on a number of GPUs: as measured, and by Amdahl's law between and beyond the measured sizes.

Amdahl ("Validity of the single processor approach to achieving large scale computing capabilities", 1967): a part of
each step's time shrinks with the number of GPUs n, the rest does not, so the time for one unit of work is a + b / n.
That is a straight line over 1 / n, and fitted as one.

The measured sizes come from a table, or from a job's own status (`evidence_of`). There the unit of work is a step: the
global batch stays the same when the group's size changes.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from elasticctl.api.errors import SpecError
from elasticctl.api.observed.cost import worker_seconds
from elasticctl.api.observed.history import training_s
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Cause, JobStatus
from elasticctl.api.text import quote

ASSUMED_FROM, ASSUMED_TO, ASSUMED_SPEEDUP = 4, 64, 9.0
"""Where only one size is known: the middle of the 8 to 10 times that the team whose platform this follows saw from 4 to
64 T4 GPUs."""
_MOST_GPUS = 100_000
LEAST_STEPS, LEAST_S = 10, 1.0
"""A group that did less says nothing about the rate of its size."""
_OF_THE_MACHINE = (
    Cause.PREEMPTED,
    Cause.DRAINED,
    Cause.EVICTED,
    Cause.NODE_LOST,
    Cause.DELETED,
    Cause.UNRESPONSIVE,
)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured rate: units of work (steps, samples) per second on this many GPUs."""

    gpus: int
    rate: float


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Measured points, by rising GPUs, at least one; `shrinks_s` is b of a + b / n, in seconds a unit.

    `assumed` is True if there is only one point, so that the shape is an assumption.
    """

    points: tuple[Point, ...]
    shrinks_s: float
    assumed: bool

    @classmethod
    def through(cls, points: Sequence[Point]) -> ScalingCurve:
        """The curve through these points, one for each number of GPUs; ValueError without any, or with one of 0."""
        known = tuple(sorted(points, key=lambda point: point.gpus))
        if not known or any(point.gpus < 1 or not point.rate > 0 for point in known):
            raise ValueError("a curve needs points with at least 1 GPU and a rate above 0")
        if len({point.gpus for point in known}) < len(known):
            raise ValueError("two points have the same number of GPUs")
        if len(known) == 1:
            return cls(known, _assumed_s(known[0]), assumed=True)
        return cls(known, _fitted_s(known), assumed=False)

    def rate(self, gpus: float) -> float:
        """Units of work a second on so many GPUs, 0 on none: as measured where it was, else from Amdahl's law.

        Between two measured sizes the law goes through both; beyond them it goes through the nearest, with the fitted
        shrinking part.
        """
        if gpus <= 0:
            return 0.0
        where = bisect_left([point.gpus for point in self.points], gpus)
        right = self.points[min(where, len(self.points) - 1)]
        if right.gpus == gpus:
            return right.rate
        shrinks_s = self.shrinks_s
        if 0 < where < len(self.points):
            left = self.points[where - 1]
            shrinks_s = (1 / left.rate - 1 / right.rate) / (1 / left.gpus - 1 / right.gpus)
        return 1 / (1 / right.rate + shrinks_s * (1 / gpus - 1 / right.gpus))

    def measured(self, gpus: int) -> bool:
        """True if exactly this size was measured."""
        return any(point.gpus == gpus for point in self.points)


def _assumed_s(point: Point) -> float:
    """b for one point: of its time the share that shrinks is the one that leads to the assumed speed-up."""
    wider = ASSUMED_TO / ASSUMED_FROM
    serial = (wider / ASSUMED_SPEEDUP - 1) / (wider - 1)  # of the time on ASSUMED_FROM GPUs
    shrinks = (1 - serial) * ASSUMED_FROM  # the time on n GPUs is in proportion to serial + shrinks / n
    return point.gpus / point.rate * (shrinks / (serial * point.gpus + shrinks))


def _fitted_s(points: Sequence[Point]) -> float:
    """b of the least squares of relative error, kept to what a machine can do: no slower than it was, no faster than
    in proportion to the GPUs."""
    weights = [point.rate**2 for point in points]
    total = sum(weights)
    xs, ys = [1 / point.gpus for point in points], [1 / point.rate for point in points]
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    return min(max(slope, 0.0), min(point.gpus / point.rate for point in points))


def parse_points(text: str, source: str) -> tuple[Point, ...]:
    """The points of a table; blank lines, `#` comments and one header line are skipped.

    Raises SpecError, with the line, for anything else.
    """
    points: dict[int, Point] = {}
    header_seen = False
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        cells = [cell for cell in re.split(r"[,;\s]+", line.partition("#")[0].strip()) if cell]
        if not cells:
            continue
        if not points and not header_seen and not any(char.isdigit() for cell in cells for char in cell):
            header_seen = True
            continue
        point = _parse_point(cells, number, source)
        if point.gpus in points:
            raise SpecError(f"{point.gpus} GPUs are given twice", line=number, source=source)
        points[point.gpus] = point
    if not points:
        raise SpecError("no line has GPUs and a rate. FIX: write lines such as `4, 1250`", source=source)
    return tuple(points[gpus] for gpus in sorted(points))


def _parse_point(cells: list[str], number: int, source: str) -> Point:
    try:
        gpus, rate = (int(cells[0]), float(cells[1])) if len(cells) == 2 else (0, 0.0)
    except ValueError:
        gpus, rate = 0, 0.0
    if not 1 <= gpus <= _MOST_GPUS or not 0 < rate < math.inf:
        raise SpecError(
            f"{quote(' '.join(cells))} is not a number of GPUs and a rate above 0. FIX: write lines such as `4, 1250`",
            line=number,
            source=source,
        )
    return Point(gpus, rate)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Rates in steps a second by GPUs (CPU ranks where there are none), and what disturbed the job.

    `interruptions` counts the losses of workers by no fault of the script, `worker_s` how long workers have run in all.
    `recovery_s` is the mean time from a loss to the next step, `write_s` how long the newest checkpoint took to be
    written beside training, `steps_left` what is to do yet (all of it once the job has ended). None: not known.
    """

    points: tuple[Point, ...]
    gpus_per_node: int
    on_gpus: bool
    interruptions: int
    worker_s: float
    recovery_s: float | None = None
    write_s: float | None = None
    steps_left: int | None = None


def evidence_of(job: ElasticJob, now: float) -> Evidence:
    """Read a job's status; `now` is seconds since the epoch."""
    status, found = job.status, hardware(job)
    each = found.gpus_per_worker or found.ranks_per_worker
    recoveries = [item.recovery_s for item in status.interruptions if item.recovery_s is not None]
    return Evidence(
        points=tuple(Point(workers * each, rate) for workers, rate in sorted(_rates(status, now).items())),
        gpus_per_node=each,
        on_gpus=found.gpus_per_worker > 0,
        interruptions=sum(status.restarts.get(cause.value, 0) for cause in _OF_THE_MACHINE),
        worker_s=sum(worker_seconds(job, now).values()),
        recovery_s=sum(recoveries) / len(recoveries) if recoveries else None,
        write_s=status.checkpoint.duration_s,
        steps_left=_steps_left(status),
    )


def _rates(status: JobStatus, now: float) -> dict[int, float]:
    """Workers -> steps a second, of all groups of that many together."""
    steps: dict[int, int] = {}
    seconds: dict[int, float] = {}
    end = status.completion_time if status.completion_time is not None else now
    for position, group in enumerate(status.generations):
        size, trained = len(group.workers), training_s(status, position, end)
        if size and group.last_step is not None and trained > 0:
            steps[size] = steps.get(size, 0) + max(0, group.last_step - (group.resumed_step or 0))
            seconds[size] = seconds.get(size, 0.0) + trained
    return {
        size: steps[size] / seconds[size] for size in steps if steps[size] >= LEAST_STEPS and seconds[size] >= LEAST_S
    }


def _steps_left(status: JobStatus) -> int | None:
    total, done = status.progress.total_steps or 0, status.progress.step or 0
    return (max(total, done) if status.phase.terminal else max(total - done, 0)) or None
