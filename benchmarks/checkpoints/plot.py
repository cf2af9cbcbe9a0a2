"""Draw the results of a checkpoint run in SVG, for the documentation: one row per state, one column per figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.checkpoints.results import OURS, Summary, size_in_words
from benchmarks.plot import COLOURS, SETTINGS
from benchmarks.results import Spread

PANELS: Sequence[tuple[str, Callable[[Summary], Spread], float | None]] = (
    ("standstill, x memcpy", lambda summary: summary.hold, 1.2),
    ("CPU seconds per GB", lambda summary: summary.cpu_s_per_gb, 1.0),
    ("step rate during an upload", lambda summary: summary.step_rate, 0.9),
    ("save to committed, s", lambda summary: summary.commit_s, None),
    ("restore to first step, s", lambda summary: summary.restore_s, None),
)
"""Each figure, and its aim if that is a number."""


def save_svg(summaries: Sequence[Summary], path: Path) -> None:
    """Draw the medians with lines to the 95th percentiles, and the aims as dashed lines."""
    places = list(dict.fromkeys((summary.size_bytes, summary.ranks) for summary in summaries))
    contenders = list(dict.fromkeys(summary.contender for summary in summaries))
    with matplotlib.rc_context({**SETTINGS, "svg.hashsalt": "checkpoint", "font.size": 8}):
        height = len(places) * (0.6 + 0.24 * len(contenders))
        figure = Figure(figsize=(13, height), layout="constrained")
        grid = figure.subplots(len(places), len(PANELS), squeeze=False)
        for row, place in enumerate(places):
            of_place = [summary for summary in summaries if (summary.size_bytes, summary.ranks) == place]
            for column, (title, figure_of, aim) in enumerate(PANELS):
                axes = grid[row][column]
                _panel(axes, of_place, figure_of, aim)
                axes.set_title(title if row == 0 else "", fontsize=9)
                axes.set_yticks(range(len(of_place)), [one.contender if column == 0 else "" for one in of_place])
            grid[row][0].set_ylabel(f"{size_in_words(place[0])}, {place[1]} rank{'s' * (place[1] > 1)}")
        figure.savefig(path, format="svg", metadata={"Date": None})


def _panel(axes: Axes, summaries: Sequence[Summary], figure_of: Callable[[Summary], Spread], aim: float | None) -> None:
    for place, summary in enumerate(summaries):
        spread = figure_of(summary)
        if spread.p50 is None or spread.p95 is None:
            axes.annotate("not measured", (0, place), xytext=(4, 0), textcoords="offset points", va="center")
            continue
        axes.barh(place, spread.p50, 0.7, color=COLOURS[2] if summary.contender.startswith(OURS) else COLOURS[1])
        axes.plot([spread.p50, spread.p95], [place, place], color="#333333", linewidth=1)
        axes.annotate(
            f"{spread.p50:.2f}", (max(spread.p50, spread.p95), place), xytext=(3, 0), textcoords="offset points",
            va="center",
        )  # fmt: skip
    if aim is not None:
        axes.axvline(aim, color="#333333", linewidth=0.8, linestyle="--")
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
