"""How fast a job has trained on each number of workers, from its own generations."""

from __future__ import annotations

from elasticctl.api.observed.history import training_s
from elasticctl.api.status import JobStatus

LEAST_STEPS, LEAST_S = 10, 1.0
"""A group that did less says nothing about the rate of its size."""


def steps_per_s_by_size(status: JobStatus, now: float) -> dict[int, float]:
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
