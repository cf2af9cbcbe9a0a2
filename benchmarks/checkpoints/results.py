"""Measurements of saves and restores, their summary compared with the aims, and their output."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from rich.markup import escape
from rich.table import Table

from benchmarks.results import Spread, machine, percentile, versions

SCHEMA = 1
GB = 1e9
MIB = 1 << 20
OURS = "elasticctl"
_MEASURED = ("boto3", "numpy", "obstore", "s3torchconnector", "torchsnapshot")


@dataclass(frozen=True, slots=True)
class Measurement:
    """One trial: the saves of fresh processes, and a restore in others. Empty lists and None: not measured; see `note`.

    `holds` are multiples of the trial's memcpy (median), that of the first save first; if ranks differ, the slowest
    counts. `cpu_s_per_gb` is that of all ranks together. `step_rate`: with an upload, relative to without. `exact`: the
    restored state is identical to the saved one.
    """

    size_bytes: int
    ranks: int
    contender: str
    repeat: int
    state_bytes: int = 0
    prepare_s: float | None = None
    copy_s: float | None = None
    holds: tuple[float, ...] = ()
    commits_s: tuple[float, ...] = ()
    cpu_s_per_gb: tuple[float, ...] = ()
    sink_cpu_s_per_gb: float | None = None
    step_rate: float | None = None
    extra_bytes: int | None = None
    restore_s: float | None = None
    first_step_s: float | None = None
    exact: bool | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """All trials of one size with one number of ranks by one contender.

    `first_hold` and `first_commit_s` are of the first saves, `hold` and `hold_p99` of all, the other figures of all but
    the first. `extra_shares`: extra memory as a multiple of a rank's share, after subtracting 64 MiB.
    """

    size_bytes: int
    ranks: int
    contender: str
    trials: int
    hold_s: float | None
    hold: Spread
    hold_p99: float | None
    first_hold: Spread
    commit_s: Spread
    first_commit_s: Spread
    cpu_s_per_gb: Spread
    sink_cpu_s_per_gb: Spread
    step_rate: Spread
    extra_mib: Spread
    extra_shares: Spread
    restore_s: Spread
    exact: bool
    note: str


@dataclass(frozen=True, slots=True)
class Aim:
    """One aim for one size and number of ranks: the figure, its bound, and whether that was reached."""

    size_bytes: int
    ranks: int
    contender: str
    what: str
    figure: float
    bound: float
    met: bool


def merge(plain: Measurement, saves: Sequence[Mapping[str, Any]], restores: Sequence[Mapping[str, Any]]) -> Measurement:
    """Return what the ranks measured (in order of rank, see `rank.Saves` and `rank.Restore`) as one measurement."""
    state_bytes = saves[0]["size_bytes"]
    rounds = list(zip(*(found["saves"] for found in saves), strict=True))
    copy_s = percentile(sorted(save["copy_s"] for found in saves for save in found["saves"]), 0.5)
    idle = [ranks for ranks in rounds if ranks[0]["kind"] != "busy"]
    busy = [ranks[0] for ranks in rounds if ranks[0]["kind"] == "busy"]
    values = {**asdict(plain), "state_bytes": state_bytes, "copy_s": copy_s}
    values["prepare_s"] = max(found["prepare_s"] for found in saves)
    values["holds"] = tuple(max(save["hold_s"] for save in ranks) / copy_s for ranks in rounds)
    values["commits_s"] = tuple(ranks[0]["commit_s"] for ranks in idle)
    values["cpu_s_per_gb"] = tuple(sum(save["cpu_s"] for save in ranks) * GB / state_bytes for ranks in idle)
    values["step_rate"] = _rate(save["during"] for save in busy) / _rate(save["quiet"] for save in busy)
    values["extra_bytes"] = max(found["extra_bytes"] for found in saves)
    values["restore_s"] = max(found["restore_s"] for found in restores)
    values["first_step_s"] = max(found["first_step_s"] for found in restores)
    values["exact"] = all(found["digest"] == saves[0]["digest"] for found in restores)
    return Measurement(**values)


def _rate(stretches: Iterable[Mapping[str, float]]) -> float:
    """Return the steps per second over all of them."""
    found = list(stretches)
    return sum(one["steps"] for one in found) / sum(one["seconds"] for one in found)


def summarise(measurements: Sequence[Measurement]) -> list[Summary]:
    """Return one summary for each size, number of ranks and contender, in the order in which they first appear."""
    groups: dict[tuple[int, int, str], list[Measurement]] = {}
    for one in measurements:
        groups.setdefault((one.size_bytes, one.ranks, one.contender), []).append(one)
    return [_summary(*key, trials) for key, trials in sorted(groups.items(), key=lambda item: item[0][:2])]


def _summary(size_bytes: int, ranks: int, contender: str, trials: Sequence[Measurement]) -> Summary:
    good = [trial for trial in trials if trial.holds]
    holds = sorted(hold for trial in good for hold in trial.holds)
    return Summary(
        size_bytes=size_bytes,
        ranks=ranks,
        contender=contender,
        trials=len(good),
        hold_s=Spread.of(hold * (trial.copy_s or 0.0) for trial in good for hold in trial.holds).p50,
        hold=Spread.of(holds),
        hold_p99=percentile(holds, 0.99) if holds else None,
        first_hold=Spread.of(trial.holds[0] for trial in good),
        commit_s=Spread.of(value for trial in good for value in trial.commits_s[1:]),
        first_commit_s=Spread.of(trial.commits_s[0] for trial in good),
        cpu_s_per_gb=Spread.of(value for trial in good for value in trial.cpu_s_per_gb[1:]),
        sink_cpu_s_per_gb=_spread(trial.sink_cpu_s_per_gb for trial in good),
        step_rate=_spread(trial.step_rate for trial in good),
        extra_mib=Spread.of((trial.extra_bytes or 0) / MIB for trial in good),
        extra_shares=Spread.of(_shares(trial) for trial in good),
        restore_s=_spread(trial.first_step_s for trial in good),
        exact=all(trial.exact for trial in good),
        note=next((trial.note for trial in trials if trial.note), ""),
    )


def _spread(values: Iterable[float | None]) -> Spread:
    return Spread.of(value for value in values if value is not None)


def _shares(trial: Measurement) -> float:
    return ((trial.extra_bytes or 0) - 64 * MIB) * trial.ranks / trial.state_bytes


def aims(summaries: Sequence[Summary]) -> list[Aim]:
    """Return the aims of our own contenders, each with its figure."""
    found = []
    for ours in summaries:
        if not ours.contender.startswith(OURS) or not ours.trials:
            continue
        same = [one for one in summaries if (one.size_bytes, one.ranks) == (ours.size_bytes, ours.ranks)]
        others = [one for one in same if not one.contender.startswith(OURS)]
        boto3 = [one.restore_s.p50 for one in others if one.contender == "boto3"]
        bounds = [
            ("standstill over memcpy, p50", ours.hold.p50, 1.2),
            ("standstill over memcpy, p99 with the first save", ours.hold_p99, 2.0),
            ("CPU seconds per GB", ours.cpu_s_per_gb.p50, 1.0),
            ("step rate lost during an upload", 1.0 - (ours.step_rate.p50 or math.nan), 0.1),
            ("extra memory less 64 MiB, in shares", ours.extra_shares.p50, 2.0),
            ("save to committed, s, against the fastest other", ours.commit_s.p50, _least(o.commit_s for o in others)),
            ("restore, s, against the fastest other", ours.restore_s.p50, _least(o.restore_s for o in others)),
            (
                "restore, s, against a third of boto3's",
                ours.restore_s.p50,
                (boto3[0] or math.nan) / 3 if boto3 else None,
            ),
        ]
        for what, figure, bound in bounds:
            if figure is not None and bound is not None and not math.isnan(bound):
                key = (ours.size_bytes, ours.ranks, ours.contender)
                found.append(Aim(*key, what, figure, bound, met=figure <= bound))
    return found


def _least(spreads: Iterable[Spread]) -> float | None:
    return min((spread.p50 for spread in spreads if spread.p50 is not None), default=None)


def size_in_words(size_bytes: int) -> str:
    """`64 MB`, `2 GB`."""
    return f"{size_bytes / GB:g} GB" if size_bytes >= GB else f"{size_bytes / 1e6:g} MB"


def table(summaries: Iterable[Summary]) -> Table:
    """Return the summaries as a table."""
    shown = Table(title="p50 (p95) over all saves and trials; standstill as a multiple of a memcpy of the rank's share")
    shown.add_column("state")
    shown.add_column("contender", no_wrap=True)
    headings = ("standstill ms", "x memcpy", "p99", "first", "CPU s/GB", "step rate", "committed s", "restored s")
    for heading in (*headings, "memory MiB"):
        shown.add_column(heading, justify="right")
    shown.add_column("")
    last = ""
    for row in summaries:
        place = f"{size_in_words(row.size_bytes)}, {row.ranks} rank{'s' * (row.ranks > 1)}"
        if last not in ("", place):
            shown.add_section()
        shown.add_row(place if place != last else "", row.contender, *_cells(row), escape(row.note))
        last = place
    return shown


def _cells(row: Summary) -> list[str]:
    if not row.trials:
        return ["-"] * 9
    return [
        f"{1000 * (row.hold_s or 0.0):.1f}",
        _numbers(row.hold),
        f"{row.hold_p99:.2f}",
        _numbers(row.first_hold),
        _numbers(row.cpu_s_per_gb),
        "-" if row.step_rate.p50 is None else f"{row.step_rate.p50:.0%}",
        _numbers(row.commit_s),
        _numbers(row.restore_s) + ("" if row.exact else " WRONG"),
        f"{row.extra_mib.p50:.0f}",
    ]


def _numbers(spread: Spread) -> str:
    return "-" if spread.p50 is None else f"{spread.p50:.2f} ({spread.p95:.2f})"


def aims_table(found: Iterable[Aim]) -> Table:
    """Return each aim with its figure, as a table."""
    shown = Table(title="aims")
    for heading in ("state", "contender", "what"):
        shown.add_column(heading)
    for heading in ("figure", "aim", ""):
        shown.add_column(heading, justify="right")
    for aim in found:
        state = f"{size_in_words(aim.size_bytes)} x {aim.ranks}"
        shown.add_row(
            state, aim.contender, aim.what, f"{aim.figure:.3f}", f"{aim.bound:.3f}", "met" if aim.met else "MISSED"
        )
    return shown


def as_json(parameters: Mapping[str, Any], measurements: Sequence[Measurement], began_at: float) -> dict[str, Any]:
    """Return all that is known about a run; `began_at` is in seconds since the epoch."""
    summaries = summarise(measurements)
    return {
        "schema": SCHEMA,
        "beganAt": datetime.fromtimestamp(began_at, UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions() | {name: version for name in _MEASURED if (version := _version(name))},
        "parameters": parameters,
        "measurements": [asdict(measurement) for measurement in measurements],
        "summary": [asdict(summary) for summary in summaries],
        "aims": [asdict(aim) for aim in aims(summaries)],
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
