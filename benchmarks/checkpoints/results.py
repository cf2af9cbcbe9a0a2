"""Measurements of saves and restores, and their summary next to the goals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import percentile, spread

GB, MIB = 1e9, 1 << 20
OURS = "elasticctl"


@dataclass(frozen=True, slots=True)
class SaveMeasurement:
    """One trial: the saves of fresh processes, and a restore in others.

    `holds` are multiples of the trial's memcpy (median), that of the first save first; if ranks differ, the slowest
    counts. `cpu_s_per_gb` is that of all ranks together. `step_rate`: with an upload, relative to without. `exact`: the
    restored state is identical to the saved one.
    """

    state_bytes: int
    holds: tuple[float, ...]
    commits_s: tuple[float, ...]
    cpu_s_per_gb: tuple[float, ...]
    step_rate: float
    extra_bytes: int
    restored_s: float
    exact: bool


@dataclass(frozen=True, slots=True)
class SaveTrial:
    """What was to be measured. `found` None: it could not be, and `note` says why."""

    size_bytes: int
    ranks: int
    contender: str
    found: SaveMeasurement | None = None
    note: str = ""


def merge(saves: Sequence[Mapping[str, Any]], restores: Sequence[Mapping[str, Any]]) -> SaveMeasurement:
    """Return what the ranks measured (in order of rank, see `rank.TimedSaves` and `rank.Restore`) as one
    measurement."""
    state_bytes = saves[0]["size_bytes"]
    rounds = list(zip(*(found["saves"] for found in saves), strict=True))
    copy_s = percentile((save["copy_s"] for found in saves for save in found["saves"]), 0.5)
    idle = [ranks for ranks in rounds if ranks[0]["kind"] != "busy"]
    busy = [ranks[0] for ranks in rounds if ranks[0]["kind"] == "busy"]
    return SaveMeasurement(
        state_bytes=state_bytes,
        holds=tuple(max(save["hold_s"] for save in ranks) / copy_s for ranks in rounds),
        commits_s=tuple(ranks[0]["commit_s"] for ranks in idle),
        cpu_s_per_gb=tuple(sum(save["cpu_s"] for save in ranks) * GB / state_bytes for ranks in idle),
        step_rate=_rate(save["during"] for save in busy) / _rate(save["quiet"] for save in busy),
        extra_bytes=max(found["extra_bytes"] for found in saves),
        restored_s=max(found["first_step_s"] for found in restores),
        exact=all(found["digest"] == saves[0]["digest"] for found in restores),
    )


def _rate(stretches: Iterable[Mapping[str, float]]) -> float:
    """Return the steps per second over all of them."""
    found = list(stretches)
    return sum(one["steps"] for one in found) / sum(one["seconds"] for one in found)


def size_in_words(size_bytes: int) -> str:
    """`64 MB`, `2 GB`."""
    return f"{size_bytes / GB:g} GB" if size_bytes >= GB else f"{size_bytes / 1e6:g} MB"


COLUMNS = (
    "state, ranks", "contender", "standstill, x memcpy", "p99", "first save", "CPU s/GB", "step rate", "committed, s",
    "restored, s", "memory, MiB", "",
)  # fmt: skip


def rows(trials: Sequence[SaveTrial]) -> Iterator[list[str]]:
    """Return a row for each state and contender: medians (p95), of all saves but the first where that is not named."""
    last = ""
    for (size_bytes, ranks, contender), found in _grouped(trials).items():
        state = f"{size_in_words(size_bytes)}, {ranks}"
        note = next((trial.note for trial in trials if trial.note and trial.contender == contender), "")
        yield [state if state != last else "", contender, *(_cells(found) if found else ["-"] * 8), note]
        last = state


def _cells(found: Sequence[SaveMeasurement]) -> list[str]:
    holds = [hold for one in found for hold in one.holds]
    return [
        spread(holds, 1),
        f"{percentile(holds, 0.99):.1f}",
        f"{percentile((one.holds[0] for one in found), 0.5):.1f}",
        spread((value for one in found for value in one.cpu_s_per_gb[1:]), 1),
        f"{percentile((one.step_rate for one in found), 0.5):.0%}",
        spread(value for one in found for value in one.commits_s[1:]),
        spread(one.restored_s for one in found) + ("" if all(one.exact for one in found) else " WRONG"),
        f"{percentile((one.extra_bytes for one in found), 0.5) / MIB:.0f}",
    ]


def _grouped(trials: Sequence[SaveTrial]) -> dict[tuple[int, int, str], list[SaveMeasurement]]:
    """Return (size, ranks, contender) -> what was measured, in order of size and ranks."""
    groups: dict[tuple[int, int, str], list[SaveMeasurement]] = {}
    for trial in sorted(trials, key=lambda one: (one.size_bytes, one.ranks)):
        found = groups.setdefault((trial.size_bytes, trial.ranks, trial.contender), [])
        found += [trial.found] if trial.found else []
    return groups


def goals(trials: Sequence[SaveTrial]) -> Iterator[list[str]]:
    """Return a row for each of our goals: the figure, its bound, and whether that was reached."""
    groups = {key: found for key, found in _grouped(trials).items() if found}
    for (size_bytes, ranks, contender), found in groups.items():
        if not contender.startswith(OURS):
            continue
        others = {
            name: theirs
            for (size, number, name), theirs in groups.items()
            if (size, number) == (size_bytes, ranks) and not name.startswith(OURS)
        }
        holds = [hold for one in found for hold in one.holds]
        commit_s = _middle(value for one in found for value in one.commits_s[1:])
        restore_s = _middle(one.restored_s for one in found)
        memory = _middle((one.extra_bytes - 64 * MIB) * ranks / one.state_bytes for one in found)
        bounds = [
            ("standstill over memcpy", _middle(holds), 1.2),
            ("standstill over memcpy, p99 with the first save", percentile(holds, 0.99), 2.0),
            ("CPU seconds per GB", _middle(value for one in found for value in one.cpu_s_per_gb[1:]), 1.0),
            ("step rate lost during an upload", 1.0 - _middle(one.step_rate for one in found), 0.1),
            ("memory less 64 MiB, in shares of a rank", memory, 2.0),
        ]
        if others:
            commits = (_middle(value for one in theirs for value in one.commits_s[1:]) for theirs in others.values())
            restores = [_middle(one.restored_s for one in theirs) for theirs in others.values()]
            bounds.append(("committed, s, against the fastest other", commit_s, min(commits)))
            bounds.append(("restored, s, against the fastest other", restore_s, min(restores)))
        if "boto3" in others:
            third_s = _middle(one.restored_s for one in others["boto3"]) / 3
            bounds.append(("restored, s, against a third of boto3's", restore_s, third_s))
        for what, figure, bound in bounds:
            met = "met" if figure <= bound else "MISSED"
            yield [f"{size_in_words(size_bytes)}, {ranks}", contender, what, f"{figure:.3g}", f"{bound:.3g}", met]


def _middle(values: Iterable[float]) -> float:
    return percentile(values, 0.5)
