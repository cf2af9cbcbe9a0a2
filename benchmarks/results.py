"""Measurements, their summary, and how both are shown: as a table and as JSON. No I/O except in `machine`."""

from __future__ import annotations

import importlib.metadata
import math
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trial. `survived` None: it was not measured, and `note` says why.

    `workers_restarted`: those lost to the event, and those whose agents gave up because of it. `timeline` defines the
    other figures.
    """

    scenario: str
    contender: str
    repeat: int
    survived: bool | None = None
    first_step_s: float | None = None
    standstill_s: float | None = None
    whole_s: float | None = None
    steps_redone: int | None = None
    workers_restarted: int | None = None
    note: str = ""
    step_s: float | None = None
    processes_new: int | None = None
    samples_lost: int | None = None
    samples_doubled: int | None = None


@dataclass(frozen=True, slots=True)
class Spread:
    """Percentiles of a sample, interpolated linearly between the nearest values; None if it was empty."""

    p50: float | None = None
    p95: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of `values`."""
        ordered = sorted(values)
        return cls(percentile(ordered, 0.50), percentile(ordered, 0.95)) if ordered else cls()


@dataclass(frozen=True, slots=True)
class Summary:
    """All trials of one scenario with one contender; times and steps are of those that survived."""

    scenario: str
    contender: str
    measured: int
    survived: int
    first_step_s: Spread
    standstill_s: Spread
    whole_s: Spread
    steps_redone: Spread
    most_redone: int | None
    workers_restarted: Spread
    note: str
    step_s: Spread = Spread()
    processes_new: Spread = Spread()
    samples_lost: Spread = Spread()
    samples_doubled: Spread = Spread()


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Return the value below which `fraction` of a sorted, non-empty sample is."""
    place = fraction * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summarise(measurements: Sequence[Measurement]) -> list[Summary]:
    """Return one summary for each pair of scenario and contender, in the order in which they first appear."""
    pairs = dict.fromkeys((m.scenario, m.contender) for m in measurements)
    return [_summary([m for m in measurements if (m.scenario, m.contender) == pair]) for pair in pairs]


def _summary(trials: Sequence[Measurement]) -> Summary:
    survivors = [trial for trial in trials if trial.survived]
    redone = [trial.steps_redone for trial in survivors if trial.steps_redone is not None]
    return Summary(
        scenario=trials[0].scenario,
        contender=trials[0].contender,
        measured=sum(trial.survived is not None for trial in trials),
        survived=len(survivors),
        first_step_s=Spread.of(t.first_step_s for t in survivors if t.first_step_s is not None),
        standstill_s=Spread.of(t.standstill_s for t in survivors if t.standstill_s is not None),
        whole_s=Spread.of(t.whole_s for t in survivors if t.whole_s is not None),
        steps_redone=Spread.of(redone),
        most_redone=max(redone, default=None),
        workers_restarted=Spread.of(t.workers_restarted for t in survivors if t.workers_restarted is not None),
        note=next((trial.note for trial in trials if trial.note), ""),
        step_s=_spread(trials, "step_s"),
        processes_new=_spread(survivors, "processes_new"),
        samples_lost=_spread(survivors, "samples_lost"),
        samples_doubled=_spread(survivors, "samples_doubled"),
    )


def _spread(trials: Sequence[Measurement], name: str) -> Spread:
    return Spread.of(value for trial in trials if (value := getattr(trial, name)) is not None)


def table(summaries: Iterable[Summary], titles: dict[str, str]) -> Table:
    """Return the summaries as a table; `titles` are the scenarios' names for display. Times are in seconds."""
    shown = Table(title="seconds from the event: p50 (p95) of the trials that survived")
    shown.add_column("event")
    shown.add_column("contender", no_wrap=True)
    columns = ("survived", "first step", "standstill", "whole again", "steps redone", "workers restarted")
    for heading in (*columns, "new processes", "samples lost", "samples doubled", "ms a step"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    last = ""
    for row in summaries:
        if last not in ("", row.scenario):
            shown.add_section()
        shown.add_row(
            titles.get(row.scenario, row.scenario) if row.scenario != last else "",
            row.contender,
            f"{row.survived} of {row.measured}" if row.measured else "-",
            *(_seconds(spread) for spread in (row.first_step_s, row.standstill_s, row.whole_s)),
            "-" if row.most_redone is None else f"{row.steps_redone.p50:.0f} (most {row.most_redone})",
            *(
                "-" if spread.p50 is None else f"{spread.p50:.0f}"
                for spread in (row.workers_restarted, row.processes_new, row.samples_lost, row.samples_doubled)
            ),
            "-" if row.step_s.p50 is None else f"{1000 * row.step_s.p50:.2f}",
            row.note,
        )
        last = row.scenario
    return shown


def _seconds(spread: Spread) -> str:
    return "-" if spread.p50 is None else f"{spread.p50:.2f} ({spread.p95:.2f})"


def as_json(parameters: dict[str, Any], measurements: Sequence[Measurement], began_at: float) -> dict[str, Any]:
    """Return all that is known about a run; `began_at` is in seconds since the epoch."""
    return {
        "schema": SCHEMA,
        **circumstances(parameters, began_at),
        "measurements": [asdict(measurement) for measurement in measurements],
        "summary": [asdict(summary) for summary in summarise(measurements)],
    }


def circumstances(parameters: dict[str, Any], began_at: float) -> dict[str, Any]:
    """Return when and where a run was made, and with what; `began_at` is in seconds since the epoch."""
    return {
        "beganAt": datetime.fromtimestamp(began_at, UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "parameters": parameters,
    }


def machine() -> dict[str, Any]:
    """Return the properties of this machine, and its load averages over the last 1, 5 and 15 minutes."""
    return {
        "cpu": _first_of("/proc/cpuinfo", "model name") or platform.processor(),
        "cpus": os.cpu_count(),
        "memory": _first_of("/proc/meminfo", "MemTotal"),
        "system": platform.platform(),
        "load": os.getloadavg(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what is measured."""
    names = ("elasticctl", "torch", "aiohttp")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def _first_of(path: str, name: str) -> str:
    """Return the value of the first line `name: value` of such a file; "" if there is none."""
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
