"""Figures, and the one way in which all benchmarks take and show them: in turns, as medians with 95th percentiles."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.table import Table

T = TypeVar("T")
WIDTH = 170
"""Columns of a table that is not printed on a terminal."""


def in_turns(contenders: Sequence[T], repeats: int) -> Iterator[tuple[int, T]]:
    """Yield (repeat, contender): all of them once per repeat, so that a busy moment of the machine affects each.

    Who comes first alternates.
    """
    for repeat in range(repeats):
        for contender in contenders[:: -1 if repeat % 2 else 1]:
            yield repeat, contender


def percentile(values: Iterable[float], fraction: float) -> float:
    """Return the value below which `fraction` of a non-empty sample is, interpolated between the nearest two."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Return `median (95th percentile)`; "-" if there are no values."""
    found = list(values)
    if not found:
        return "-"
    return f"{percentile(found, 0.5):.{digits}f} ({percentile(found, 0.95):.{digits}f})"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of a table of goals: the value at `fraction` of the sample must not exceed `goal`, if there is one."""

    name: str
    unit: str
    values: Sequence[float]
    goal: float | None = None
    fraction: float = 0.5

    @property
    def met(self) -> bool:
        """Whether the goal is reached; also true if there is none."""
        return self.goal is None or percentile(self.values, self.fraction) <= self.goal


def show_figures(title: str, figures: Sequence[Figure]) -> bool:
    """Print the figures next to their goals; return whether all goals are met."""
    rows = [
        [
            f"{one.name}, {one.unit}",
            *(f"{percentile(one.values, fraction):.3g}" for fraction in (0.5, 0.95, 1.0)),
            "" if one.goal is None else f"{one.goal:g}" + (f" at p{100 * one.fraction:.0f}" * (one.fraction != 0.5)),
            "" if one.goal is None else "met" if one.met else "MISSED",
        ]
        for one in figures
    ]
    show(title, ["", "median", "p95", "worst", "goal", ""], rows)
    return all(one.met for one in figures)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, and below it when and where it was measured. An empty first cell continues the row above."""
    grouped = any(not row[0] for row in rows)
    table = Table(title=title, caption=circumstances(), caption_justify="left", title_justify="left")
    for number, column in enumerate(columns):
        numbers = all(row[number][:1] in "-0123456789" for row in rows)
        table.add_column(column, justify="right" if numbers else "left")
    for number, row in enumerate(rows):
        if grouped and number and row[0]:
            table.add_section()
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else WIDTH, markup=False, highlight=False).print(table)


def progress(line: str) -> None:
    """Print a line on standard error, to show progress."""
    print(line, file=sys.stderr, flush=True)


def circumstances() -> str:
    """Return the date, the machine with its load average, and the versions of what is measured."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cpu = next(models, platform.processor())
    found = [f"python {platform.python_version()}"]
    for name in ("torch", "elasticctl"):
        found.append(f"{name} {importlib.metadata.version(name)}")
    load = f"load {os.getloadavg()[1]:.1f}"
    return f"{datetime.now(UTC):%Y-%m-%d}, {cpu}, {os.cpu_count()} cores, {load}, {', '.join(found)}"
