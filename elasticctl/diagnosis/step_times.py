"""Rules about how the time of steps is spent: slow data, waiting for gradients, saves."""

from __future__ import annotations

from elasticctl.api.observed.history import is_training
from elasticctl.api.observed.usage import mean_times, total_usage
from elasticctl.diagnosis.findings import Case, Finding, NextStep, Severity, short_worker_name

MUCH_DATA, MUCH_REDUCED, MUCH_SAVED = 0.3, 0.4, 0.15
"""More than these shares of the time is worth a word."""
BUSY_PERCENT = 85.0
"""GPUs that work more than this are fed in time, however long the process that feeds them waits."""


def bound_by(case: Case) -> Finding | None:
    """What training waits for most, unless that is its own computation."""
    usage = case.status.usage
    if usage is None or not is_training(case.status):
        return None
    times = mean_times(usage.workers)
    busy = [percent for percent in total_usage(usage).gpus.percent if percent is not None]
    is_fed = bool(busy) and sum(busy) / len(busy) > BUSY_PERCENT
    see = NextStep("see it worker by worker", f"elasticctl top {case.name}")
    if times.data is not None and times.data > MUCH_DATA and not is_fed:
        slowest = max(usage.workers, key=lambda worker: worker.step_times.data or 0.0)
        share = slowest.step_times.data or 0.0
        worker = short_worker_name(slowest.worker, case.name)
        most = "" if share - times.data < 0.1 else f" ({_percent(share)} on {worker})"
        text = (
            f"Training waits for data {_percent(times.data)} of the time{most}: more or faster workers in its data "
            "loader (num_workers of run.loader), or more CPUs, would speed it up."
        )
        return Finding("data-bound", Severity.INFO, text, (see,))
    if times.all_reduce is not None and times.all_reduce > MUCH_REDUCED and not is_fed:
        text = (
            f"Training waits for the gradients of other ranks {_percent(times.all_reduce)} of the time: for the "
            "network, or for a slower rank. A larger batch for each rank, or fewer and larger workers, would help."
        )
        return Finding("communication-bound", Severity.INFO, text, (see,))
    if times.save is not None and times.save > MUCH_SAVED:
        text = f"Saves stop training {_percent(times.save)} of the time: saving less often would speed it up."
        return Finding("save-bound", Severity.INFO, text, (see,))
    return None


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%"
