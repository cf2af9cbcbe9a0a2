"""What a job's own status says about its scaling and its interruptions. Pure.

Steps are the unit of work: the global batch stays the same when the group's size changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from elasticctl.api.cost import worker_seconds
from elasticctl.api.history import trained_s
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Cause, JobStatus
from elasticctl.simulation.scaling_curve import Point

LEAST_STEPS, LEAST_S = 10, 1.0
"""What a group of some size has to have done for its rate to say anything."""
_OF_THE_MACHINE = (Cause.PREEMPTED, Cause.EVICTED, Cause.NODE_LOST, Cause.DELETED, Cause.KILLED, Cause.UNRESPONSIVE)


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
        size, trained = len(group.workers), trained_s(status, position, end)
        if size and group.last_step is not None and trained > 0:
            steps[size] = steps.get(size, 0) + max(0, group.last_step - (group.resumed_step or 0))
            seconds[size] = seconds.get(size, 0.0) + trained
    return {
        size: steps[size] / seconds[size] for size in steps if steps[size] >= LEAST_STEPS and seconds[size] >= LEAST_S
    }


def _steps_left(status: JobStatus) -> int | None:
    total, done = status.progress.total_steps or 0, status.progress.step or 0
    return (max(total, done) if status.phase.terminal else max(total - done, 0)) or None
