"""How many workers trained when, and how many were wanted: steps over time, from a job's status. Pure."""

from __future__ import annotations

from itertools import zip_longest

from elasticctl.spec import ElasticJob
from elasticctl.status import JobStatus, Phase

Steps = list[tuple[float, int]]
"""(moment in seconds since the epoch, how many from then on), in order of time."""


def training(job: ElasticJob) -> Steps:
    """How many workers were in the group: none from when it is told to stop until the next one has formed.

    A status knows the last groups only; what was before them is not told.
    """
    status = job.status
    steps: Steps = []
    for group, following in zip_longest(status.generations, status.generations[1:]):
        if group.formed_at is None:
            continue
        steps.append((float(group.formed_at), len(group.workers)))
        if following is not None and following.opened_at is not None:
            steps.append((max(float(following.opened_at), float(group.formed_at)), 0))
    stopped_at = _stopped_at(status)
    if steps and stopped_at is not None:
        steps.append((max(stopped_at, steps[-1][0]), 0))
    return steps


def wanted(job: ElasticJob, now: float) -> Steps:
    """How many workers the job was meant to have, as far back as its status knows; it goes on to its end, or to now."""
    scalings = [item for item in job.status.scalings if item.at is not None]
    if job.created_at is None:
        return []
    steps = [(float(job.created_at), scalings[0].from_workers if scalings else job.desired)]
    steps += [(float(item.at), item.to_workers) for item in scalings if item.at is not None]
    end = job.status.completion_time if job.status.completion_time is not None else now
    return [*steps, (max(float(end), steps[-1][0]), steps[-1][1])]


def _stopped_at(status: JobStatus) -> float | None:
    """When training stopped for the time being, or for good."""
    if status.phase.terminal:
        return status.completion_time
    if status.phase is not Phase.SUSPENDED:
        return None
    moments = [item.last_transition_time for item in status.conditions if item.type == "Suspended"]
    return next((moment for moment in moments if moment is not None), None)
