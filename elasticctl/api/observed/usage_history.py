"""The total usage of a job's workers over time, at about a hundred moments, however long the job runs."""

from __future__ import annotations

from elasticctl.api.observed.history import MAX_POINTS, least_point, rounded
from elasticctl.api.observed.step_times import mean_times
from elasticctl.api.observed.usage import total_usage
from elasticctl.api.usage import JobUsage, UsageHistory


def add_usage(history: UsageHistory, usage: JobUsage | None) -> UsageHistory:
    """Return the history with one more moment, or the same one if nothing newer has been measured.

    Beyond `MAX_POINTS`, the moment whose neighbours are closest together is removed, so that the others stay evenly
    spread. The first and the last always stay.
    """
    at = None if usage is None else total_usage(usage).at
    if usage is None or at is None:
        return history
    since = at if history.since is None else history.since
    at_s = round(at - since, 1)
    if history.at_s and at_s <= history.at_s[-1]:
        return history
    before, told = len(history.at_s), _together(usage)
    columns = {
        name: (*fitted(history.columns.get(name, ()), before), told.get(name))
        for name in dict.fromkeys([*history.columns, *(name for name, value in told.items() if value is not None)])
    }
    longer = UsageHistory(since, (*history.at_s, at_s), columns)
    return longer if len(longer.at_s) <= MAX_POINTS else _without(longer, least_point(longer.at_s))


def fitted(column: tuple[float | None, ...], length: int) -> tuple[float | None, ...]:
    """The column with one value per moment; a shorter one began later."""
    return ((None,) * length + column)[len(column) :]


def _together(usage: JobUsage) -> dict[str, float | None]:
    """The total usage of all workers, by the column's name in JSON."""
    total, times = total_usage(usage), mean_times(usage.workers)
    percent = [value for value in total.gpus.percent if value is not None]
    found = {
        "cpusUsed": total.cpus_used,
        "memoryBytes": total.memory_bytes,
        "gpuPercent": sum(percent) / len(percent) if percent else None,
        "gpuMemoryBytes": _sum(total.gpus.memory_bytes),
        "powerW": _sum(total.gpus.power_w),
        "receivedBytesPerS": total.received_bytes_per_s,
        "sentBytesPerS": total.sent_bytes_per_s,
        "data": times.data,
        "compute": times.compute,
        "allReduce": times.all_reduce,
        "save": times.save,
    }
    return {name: None if value is None else rounded(value) for name, value in found.items()}


def _sum(values: tuple[float | None, ...]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _without(history: UsageHistory, point: int) -> UsageHistory:
    def cut(column: tuple[float | None, ...]) -> tuple[float | None, ...]:
        return column[:point] + column[point + 1 :]

    at_s = history.at_s[:point] + history.at_s[point + 1 :]
    return UsageHistory(history.since, at_s, {name: cut(column) for name, column in history.columns.items()})
