"""Draw the results of a recovery run as a bar chart in SVG, for the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.results import Summary

COLOURS = ("#adb5bd", "#52708f", "#e8590c")
TITLE = "Seconds from the event to the first optimizer step of the new group: median, and line to p95"
# Keep text as text, and make equal figures give equal files.
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "recovery", "font.family": "sans-serif", "font.size": 9}


def save_svg(summaries: Sequence[Summary], titles: Mapping[str, str], path: Path) -> None:
    """Draw one bar for each scenario and contender, with the number of lost trials, if any."""
    scenarios = list(dict.fromkeys(summary.scenario for summary in summaries))
    contenders = list(dict.fromkeys(summary.contender for summary in summaries))
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9, 1.2 + 0.75 * len(scenarios)), layout="constrained")
        axes = figure.add_subplot()
        height = 0.8 / len(contenders)
        for number, contender in enumerate(contenders):
            colour = COLOURS[number % len(COLOURS)]
            for summary in summaries:
                if summary.contender == contender:
                    place = scenarios.index(summary.scenario) + (number - (len(contenders) - 1) / 2) * height
                    _bar(axes, summary, place, height, colour)
        axes.set_yticks(range(len(scenarios)), [titles.get(scenario, scenario) for scenario in scenarios])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlim(left=0)
        axes.set_title(TITLE, fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        handles = [Patch(color=COLOURS[n % len(COLOURS)], label=name) for n, name in enumerate(contenders)]
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.6 / (1.2 + 0.75 * len(scenarios))), ncols=3, handles=handles
        )
        figure.savefig(path, format="svg", metadata={"Date": None})


def _bar(axes: Axes, summary: Summary, place: float, height: float, colour: str) -> None:
    """Draw one bar at `place` on the axis of scenarios, with its label."""
    spread = summary.first_step_s
    length, end = spread.p50 or 0.0, spread.p95 or 0.0
    axes.barh(place, length, 0.9 * height, color=colour)
    if end > length:
        axes.plot([length, end], [place, place], color="#333333", linewidth=1)
    axes.annotate(label(summary), (max(length, end), place), xytext=(4, 0), textcoords="offset points", va="center")


def label(summary: Summary) -> str:
    """Return the median in words, or why there is none."""
    if not summary.measured:
        return "not measured"
    lost = summary.measured - summary.survived
    if summary.first_step_s.p50 is None:
        return f"lost {lost} of {summary.measured}"
    return f"{summary.first_step_s.p50:.2f} s" + (f", lost {lost} of {summary.measured}" if lost else "")
