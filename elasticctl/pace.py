"""How fast a job's training goes in steps, and when it will be done at that pace. Pure."""

from __future__ import annotations

from elasticctl.status import JobStatus, Phase

_LEAST_S = 1.0
"""Shorter than this, what a group has done says little about its pace."""


def steps_per_s(status: JobStatus) -> float | None:
    """Steps a second of the group that trains now, from its first step on; None before that can be told.

    Of this group only: one of another size had another pace.
    """
    group = status.generations[-1] if status.generations else None
    step, at = status.progress.step, status.progress.at
    if status.phase is not Phase.RUNNING or group is None or group.first_step_at is None or step is None or at is None:
        return None
    took_s = at - group.first_step_at
    done = step - (group.resumed_step or 0) - 1  # the first step had ended by then
    return done / took_s if done > 0 and took_s >= _LEAST_S else None


def share_done(status: JobStatus) -> float | None:
    """How much of all steps is done, from 0 to 1; None where the script does not say how many there are."""
    step, total = status.progress.step, status.progress.total_steps
    if step is None or not total or total < 0:
        return None
    return min(1.0, max(0.0, step / total))


def left_s(status: JobStatus) -> float | None:
    """Seconds until the last step at the present pace; None where that cannot be told."""
    pace, step, total = steps_per_s(status), status.progress.step, status.progress.total_steps
    if pace is None or step is None or total is None:
        return None
    return max(0, total - step) / pace
