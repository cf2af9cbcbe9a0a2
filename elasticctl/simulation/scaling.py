"""The points of a job's scaling curve, from a table of rates or from the job's own status (`evidence_of`).

In a status the unit of work is a step: the global batch stays the same when the group's size changes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from elasticctl.api.errors import SpecError
from elasticctl.api.observed.cost import worker_seconds
from elasticctl.api.observed.history import steps_per_s_by_size
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Cause, JobStatus
from elasticctl.api.text import quote
from elasticctl.planning.scaling_curve import Point

_MOST_GPUS = 100_000
_OF_THE_MACHINE = (
    Cause.PREEMPTED,
    Cause.DRAINED,
    Cause.EVICTED,
    Cause.NODE_LOST,
    Cause.DELETED,
    Cause.UNRESPONSIVE,
)


def parse_points(text: str, source: str) -> tuple[Point, ...]:
    """Parse the points of a table, skipping blank lines, `#` comments and one header line.

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
    """Rates in steps per second by number of GPUs (or CPU ranks), and the disturbances of the job.

    `interruptions` counts the losses of workers through no fault of the script, and `worker_s` the seconds that workers
    have run in total. `recovery_s` is the mean time from a loss to the next step, `write_s` the time to write the
    newest checkpoint during training, and `steps_left` the remaining steps (all once the job has ended). None: unknown.
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
        points=tuple(Point(workers * each, rate) for workers, rate in sorted(steps_per_s_by_size(status, now).items())),
        gpus_per_node=each,
        on_gpus=found.gpus_per_worker > 0,
        interruptions=sum(status.restarts.get(cause.value, 0) for cause in _OF_THE_MACHINE),
        worker_s=sum(worker_seconds(job, now).values()),
        recovery_s=sum(recoveries) / len(recoveries) if recoveries else None,
        write_s=status.checkpoint.duration_s,
        steps_left=_steps_left(status),
    )


def _steps_left(status: JobStatus) -> int | None:
    total, done = status.progress.total_steps or 0, status.progress.step or 0
    return (max(total, done) if status.phase.terminal else max(total - done, 0)) or None
