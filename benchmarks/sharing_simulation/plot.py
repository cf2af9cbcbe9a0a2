"""Draw the simulated weeks in SVG, for the documentation: one row per load, one column per figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plot import COLOURS, SETTINGS
from benchmarks.sharing_simulation.results import OURS, UTILISATION_AIM, Summary

PANELS: Sequence[tuple[str, Callable[[Summary], float], str, float | None]] = (
    ("utilisation of what demand allows", lambda one: one.of_possible, ".0%", UTILISATION_AIM),
    ("goodput, GPU hours per GPU hour", lambda one: one.goodput, ".2f", None),
    ("mean completion, h", lambda one: one.mean_completion_h, ".1f", None),
    ("p95 completion, h", lambda one: one.p95_completion_h, ".0f", None),
    ("cost of a job, $", lambda one: one.cost_per_job_usd, ".2f", None),
)
"""Each figure, its format, and its aim if that is a number."""


def save_svg(summaries: Sequence[Summary], path: Path) -> None:
    """Draw the means; aims are dashed lines."""
    loads = list(dict.fromkeys(summary.load for summary in summaries))
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": "sharing", "font.size": 8}):
        figure = Figure(figsize=(13, 0.5 + 1.2 * len(loads)), layout="constrained")
        grid = figure.subplots(len(loads), len(PANELS), squeeze=False)
        for row, load in enumerate(loads):
            of_load = [summary for summary in summaries if summary.load == load]
            for column, (title, figure_of, form, aim) in enumerate(PANELS):
                axes = grid[row][column]
                _panel(axes, of_load, figure_of, form)
                if aim is not None:
                    axes.axvline(aim, color="#333333", linewidth=0.8, linestyle="--")
                axes.set_title(title if row == 0 else "", fontsize=9)
                axes.set_yticks(range(len(of_load)), [one.contender if column == 0 else "" for one in of_load])
            grid[row][0].set_ylabel(f"load {load:g}")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Axes, summaries: Sequence[Summary], figure_of: Callable[[Summary], float], form: str) -> None:
    for place, summary in enumerate(summaries):
        length = figure_of(summary)
        axes.barh(place, length, 0.7, color=COLOURS[2] if summary.contender == OURS else COLOURS[1])
        axes.annotate(
            format(length, form), (length, place), xytext=(3, 0), textcoords="offset points", va="center"
        )  # fmt: skip
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
