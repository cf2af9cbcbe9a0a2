"""The results of the contenders, side by side and compared with the aims: tables and JSON. No I/O."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.table import Table

from benchmarks.results import machine, percentile, versions
from benchmarks.sharing_simulation.engine import Figures
from benchmarks.sharing_simulation.scale import Pass

SCHEMA = 1
OURS, YARDSTICK = "elasticctl", "fixed size"
GOODPUT_AIM = 1.3
UTILISATION_AIM = 0.95
PASS_AIM_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """A simulated week: its load, and its results."""

    load: float
    figures: Figures


@dataclass(frozen=True, slots=True)
class Summary:
    """Means over the seeds of one load and contender. `goodput_ratio` is relative to fixed sizes on the same trace."""

    load: float
    contender: str
    seeds: int
    utilisation: float
    of_possible: float
    goodput: float
    goodput_ratio: float | None
    completed_in_week: float
    mean_completion_h: float
    p95_completion_h: float
    cost_per_job_usd: float
    redone_gpu_h: float
    reformings: float
    suspensions: float


@dataclass(frozen=True, slots=True)
class Aim:
    """One aim: the figure, its bound, and whether that was reached."""

    what: str
    figure: float
    bound: float
    met: bool


def summarise(found: Sequence[Found]) -> list[Summary]:
    """Return one summary for each load and contender, in the order in which they first appear."""
    pairs = dict.fromkeys((one.load, one.figures.contender) for one in found)
    yardstick = {(one.load, one.figures.seed): one.figures for one in found if one.figures.contender == YARDSTICK}
    return [
        _summary(load, [one.figures for one in found if (one.load, one.figures.contender) == (load, name)], yardstick)
        for load, name in pairs
    ]


def _summary(load: float, weeks: Sequence[Figures], yardstick: Mapping[tuple[float, int], Figures]) -> Summary:
    beside = [(week, yardstick[load, week.seed]) for week in weeks if (load, week.seed) in yardstick]
    return Summary(
        load=load,
        contender=weeks[0].contender,
        seeds=len(weeks),
        utilisation=statistics.fmean(week.utilisation for week in weeks),
        of_possible=statistics.fmean(week.of_possible for week in weeks),
        goodput=statistics.fmean(week.goodput for week in weeks),
        goodput_ratio=statistics.fmean(one.goodput / other.goodput for one, other in beside) if beside else None,
        completed_in_week=statistics.fmean(week.completed_in_week / week.jobs for week in weeks),
        mean_completion_h=statistics.fmean(statistics.fmean(week.completion_h) for week in weeks),
        p95_completion_h=statistics.fmean(percentile(sorted(week.completion_h), 0.95) for week in weeks),
        cost_per_job_usd=statistics.fmean(week.cost_per_job_usd for week in weeks),
        redone_gpu_h=statistics.fmean(week.redone_gpu_h for week in weeks),
        reformings=statistics.fmean(week.reformings / week.jobs for week in weeks),
        suspensions=statistics.fmean(week.suspensions / week.jobs for week in weeks),
    )


def aims(summaries: Iterable[Summary], passes: Iterable[Pass]) -> list[Aim]:
    """Return our aims at each load, and for the duration of a decision."""
    found = []
    for one in summaries:
        if one.contender != OURS:
            continue
        if one.goodput_ratio is not None:
            what = f"load {one.load:g}: goodput over that of fixed sizes"
            found.append(Aim(what, one.goodput_ratio, GOODPUT_AIM, one.goodput_ratio >= GOODPUT_AIM))
        what = f"load {one.load:g}: utilisation of what demand allows"
        found.append(Aim(what, one.of_possible, UTILISATION_AIM, one.of_possible >= UTILISATION_AIM))
    for one in passes:
        what = f"{one.jobs} jobs, {one.workers} workers, {one.what}: CPU seconds to decide"
        found.append(Aim(what, one.cpu_s, PASS_AIM_S, one.cpu_s <= PASS_AIM_S))
    return found


def table(summaries: Iterable[Summary]) -> Table:
    """Return the summaries as a table."""
    shown = Table(title="means over the seeds; completion from arrival to end; redone in GPU hours of all jobs")
    shown.add_column("load")
    shown.add_column("contender", no_wrap=True)
    headings = ("utilisation", "of possible", "goodput", "over fixed", "ended in week", "mean h", "p95 h")
    for heading in (*headings, "$ a job", "redone", "re-formings", "suspensions"):
        shown.add_column(heading, justify="right")
    last: float | None = None
    for row in summaries:
        if last not in (None, row.load):
            shown.add_section()
        shown.add_row(
            f"{row.load:g}" if row.load != last else "",
            row.contender,
            f"{row.utilisation:.1%}",
            f"{row.of_possible:.1%}",
            f"{row.goodput:.3f}",
            "-" if row.goodput_ratio is None else f"{row.goodput_ratio:.2f}",
            f"{row.completed_in_week:.0%}",
            f"{row.mean_completion_h:.1f}",
            f"{row.p95_completion_h:.1f}",
            f"{row.cost_per_job_usd:.2f}",
            f"{row.redone_gpu_h:.1f}",
            f"{row.reformings:.1f}",
            f"{row.suspensions:.2f}",
        )
        last = row.load
    return shown


def aims_table(found: Iterable[Aim]) -> Table:
    """Return each aim with its figure, as a table."""
    shown = Table(title="aims")
    shown.add_column("what")
    for heading in ("figure", "aim", ""):
        shown.add_column(heading, justify="right")
    for aim in found:
        shown.add_row(aim.what, f"{aim.figure:.3f}", f"{aim.bound:.2f}", "met" if aim.met else "MISSED")
    return shown


def as_json(
    parameters: Mapping[str, Any], found: Sequence[Found], passes: Sequence[Pass], began_at: float
) -> dict[str, Any]:
    """Return all that is known about a run; `began_at` is in seconds since the epoch."""
    summaries = summarise(found)
    return {
        "schema": SCHEMA,
        "beganAt": datetime.fromtimestamp(began_at, UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "parameters": parameters,
        "weeks": [{"load": one.load, **asdict(one.figures)} for one in found],
        "summary": [asdict(summary) for summary in summaries],
        "passes": [asdict(one) for one in passes],
        "aims": [asdict(aim) for aim in aims(summaries, passes)],
    }
