"""Where the time between an event and the first step goes, phase by phase."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from benchmarks.recoveries.timeline import Expected, Step, outcome
from benchmarks.results import Spread
from elasticctl.api.codec import from_rfc3339

PHASES = {
    "opened": "the service opens the group",
    "formed": "survivors have stopped their ranks and joined",
    "script": "ranks are at the script's first line",
    "imported": "imports are done",
    "built": "data, model and optimizer are made",
    "joined": "the process groups are initialised",
    "restored": "the checkpoint is read",
    "run": "it is loaded: Run(...) returns",
    "wrapped": "the model is in DistributedDataParallel",
    "stepped": "the first step is done",
}
"""The phases in order, and what is true when each ends."""


def reached(
    marks: str, steps: Sequence[Step], injected_at: float, expected: Expected, generations: Sequence[Mapping[str, Any]]
) -> dict[str, float]:
    """Return when the new group's slowest rank had completed each phase, in seconds after the event; seen phases only.

    `marks` are the lines that the script recorded, `generations` those of the job's status, if it has any.
    """
    first_step_s = outcome(steps, injected_at, expected).first_step_s
    if first_step_s is None:
        return {}
    group = next(step.group for step in steps if step.at == injected_at + first_step_s)
    pids = {step.pid for step in steps if step.group == group}
    found: dict[str, float] = {}
    for line in marks.splitlines():
        mark = json.loads(line)
        if mark["pid"] in pids:
            found[mark["phase"]] = max(mark["at"] - injected_at, found.get(mark["phase"], 0.0))
    began_s = found.get("script", first_step_s)
    for generation in generations:
        formed = from_rfc3339(generation.get("formedAt"))
        if (
            formed is not None and 0.0 < formed - injected_at <= began_s
        ):  # the last one that formed before the ranks started
            opened = from_rfc3339(generation.get("openedAt"))
            found |= {"formed": formed - injected_at} | ({"opened": opened - injected_at} if opened is not None else {})
    return {phase: found[phase] for phase in PHASES if phase in found}


def table(contender: str, trials: Mapping[str, Sequence[Mapping[str, float]]]) -> Table:
    """Return how long each phase took in each scenario, in milliseconds: medians over its trials."""
    shown = Table(title=f"{contender}: ms in each phase between the event and the first step (medians)")
    shown.add_column("until")
    for scenario in trials:
        shown.add_column(scenario, justify="right")
    for phase, meaning in PHASES.items():
        medians = [Spread.of(_took(trial, phase) for trial in found if phase in trial) for found in trials.values()]
        if any(median.p50 is not None for median in medians):
            shown.add_row(meaning, *("-" if m.p50 is None else f"{1000 * m.p50:.0f}" for m in medians))
    return shown


def _took(trial: Mapping[str, float], phase: str) -> float:
    earlier = [trial[name] for name in list(PHASES)[: list(PHASES).index(phase)] if name in trial]
    return trial[phase] - max(earlier, default=0.0)
