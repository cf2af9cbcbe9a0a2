"""What a group has measured of itself, for the rule by which it takes newcomers in (`sharing.resizing`). Pure."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from elasticctl.status import Generation, Progress
from elasticctl_controller.sharing.resizing import Growth

UNMEASURED_COST_S = 10.0
"""What a re-forming is taken to cost before one has been seen."""
COSTS_KEPT = 3
LEAST_PACE_S = 1.0


def growth_of(
    records: Sequence[Generation], rates: Mapping[int, float], progress: Progress | None, now: float
) -> Growth:
    """The newest group of `records` as far as its past tells; who could join is for the caller to fill in.

    `rates`: samples a second that were seen, by number of workers.
    """
    return Growth(
        size=len(records[-1].workers) if records else 0,
        ready=0,
        coming=0,
        ready_since=now,
        reform_cost_s=reform_cost_s(records),
        changes=_losses(records),
        watched_s=_watched_s(records, now),
        remaining_s=_remaining_s(records, progress, now),
        rates=dict(rates),
    )


def reform_cost_s(records: Sequence[Generation]) -> float:
    """How long this group stands still when it forms again: the mean of the last times, from its end to a step."""
    costs = [
        item.first_step_at - item.opened_at
        for item in records[1:]
        if item.first_step_at is not None and item.opened_at is not None
    ][-COSTS_KEPT:]
    return sum(costs) / len(costs) if costs else UNMEASURED_COST_S


def _losses(records: Sequence[Generation]) -> int:
    """How often a member was missing from the next group."""
    return sum(not {*before.workers} <= {*after.workers} for before, after in itertools.pairwise(records))


def _watched_s(records: Sequence[Generation], now: float) -> float:
    first = records[0].formed_at if records else None
    return 0.0 if first is None else max(0.0, now - first)


def _remaining_s(records: Sequence[Generation], progress: Progress | None, now: float) -> float | None:
    """Seconds until the last step at the newest group's pace; None where that cannot be told yet."""
    if not records or progress is None or progress.step is None or progress.total_steps is None:
        return None
    newest = records[-1]
    if newest.first_step_at is None or now - newest.first_step_at < LEAST_PACE_S:
        return None
    done = progress.step - (newest.resumed_step or 0) - 1  # the first step had ended by then
    if done <= 0:
        return None
    return max(0, progress.total_steps - progress.step) * (now - newest.first_step_at) / done
