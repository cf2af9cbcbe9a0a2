"""How the time of training is spent, in words, from what the training library reports about each worker."""

from __future__ import annotations

from collections.abc import Iterable

from elasticctl.api.observed.history import reports_steps
from elasticctl.api.status import JobStatus
from elasticctl.api.usage import StepTimes, WorkerUsage

PARTS = ("Data", "Compute", "All-reduce", "Save")
"""What `part_texts` has."""
_SOON = "not known yet"
_UNKNOWN = "unknown: only scripts that use the training library report it"


def mean_times(workers: Iterable[WorkerUsage]) -> StepTimes:
    """The mean over all workers that report; a part that one of them does not know is unknown."""
    told = [worker.step_times for worker in workers if worker.step_times.is_known]

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known and len(known) == len(values) else None

    data, reduced, saved = (
        mean([times.data for times in told]),
        mean([times.all_reduce for times in told]),
        mean([times.save for times in told]),
    )
    apart = sum(share for share in (data, reduced, saved) if share is not None)
    return StepTimes(data, max(0.0, 1.0 - apart) if told else None, reduced, saved)


def part_texts(times: StepTimes) -> tuple[str, ...]:
    """`12%` and so on, in the order of `PARTS`; empty where unknown."""
    return tuple("" if share is None else f"{100 * share:.0f}%" for share in times.shares)


def times_text(times: StepTimes) -> str:
    """`data 12%, compute 70%, all-reduce 15%, save 3%`; parts that are not measured separately are named together."""
    named = dict(zip(PARTS, part_texts(times), strict=True))
    apart = [name.lower() for name, text in named.items() if not text]
    if "compute" in apart:
        return ""
    rest = " with ".join(["compute", " and ".join(apart)]) if apart else "compute"
    return ", ".join(f"{rest if name == 'Compute' else name.lower()} {text}" for name, text in named.items() if text)


def step_times_text(status: JobStatus) -> str:
    """The same over all workers of a job, or why it is unknown; empty before anything has been measured."""
    if status.usage is None or not status.usage.workers:
        return ""
    text = times_text(mean_times(status.usage.workers))
    return text or (_SOON if reports_steps(status) else _UNKNOWN)
