"""How two jobs differ: their settings, their code as it is stored in their workspaces, and their results."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.observed.cost import cost
from elasticctl.api.observed.history import rate_text
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import dollars, part_of, plural, public_value, span
from elasticctl.cluster.job_storages import open_job_storage
from elasticctl.operations.metrics import Results, RunMetrics
from elasticctl.operations.workspace.workspace import QUICK
from elasticctl_protocol import variables
from elasticctl_store.errors import TrainError
from elasticctl_store.storage import Storage
from elasticctl_store.workspace import transfer
from elasticctl_store.workspace.packing import File, Item

MAX_FILE_BYTES = 1_000_000
"""Larger files are named; no person reads how they differ."""
MAX_BYTES = 20_000_000
_NUMBER = re.compile(r"-\.?[0-9]")
_OURS = "ELASTICCTL_"
ARGUMENT = "argument {}"


@dataclass(frozen=True, slots=True)
class CodeChanges:
    """Paths by their change from one workspace to the other; `unknown` is why the changes are unknown.

    `lines` are a unified diff of the text files among them.
    """

    changed: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    unknown: str = ""

    @property
    def same(self) -> bool:
        """True if both run the same code, as far as is known."""
        return not (self.changed or self.new or self.gone or self.unknown)

    @property
    def words(self) -> str:
        """`2 files changed, 1 file new`."""
        if self.unknown:
            return f"not known: {self.unknown}"
        if self.same:
            return "the same"
        parts = (("changed", self.changed), ("new", self.new), ("gone", self.gone))
        return ", ".join(f"{plural(len(paths), 'file')} {word}" for word, paths in parts if paths)


@dataclass(frozen=True, slots=True)
class JobComparison:
    """Two jobs side by side. `rows` are a name and both values: settings that differ, then all results.

    `code` is None if it was not compared. `troubles`: (job, why the values of its storage are not known).
    """

    jobs: tuple[ElasticJob, ElasticJob]
    results: tuple[Results, ...]
    rows: tuple[tuple[str, str, str], ...]
    code: CodeChanges | None
    troubles: tuple[tuple[str, str], ...] = ()


def compare(
    jobs: tuple[ElasticJob, ElasticJob], metrics: RunMetrics, now: float, *, with_code: bool = True
) -> JobComparison:
    """Compare two jobs; reads their storages. `now` is in seconds since the epoch."""
    found = [metrics.results(job) for job in jobs]
    results = tuple(values for values, _ in found)
    troubles = tuple((job.name, trouble) for job, (_, trouble) in zip(jobs, found, strict=True) if trouble)
    code = code_changes(*jobs) if with_code else None
    return JobComparison(jobs, results, tuple(comparison_rows(jobs, results, now)), code, troubles)


def comparison_rows(jobs: Sequence[ElasticJob], results: Sequence[Results], now: float) -> list[tuple[str, str, str]]:
    """The settings that differ, and all results: a name and both values."""
    rows = [(name, *pair) for name, pair in differences(*map(settings, jobs)).items()]
    ends = [outcome(job, now) for job in jobs]
    rows += [(name, ends[0][name], ends[1][name]) for name in ends[0] if any(end[name] for end in ends)]
    for metric in dict.fromkeys(name for found in results for name in found):
        for word, key in (("last", "last"), ("lowest", "min"), ("highest", "max")):
            one, two = (_value(found.get(metric, {}), key) for found in results)
            rows.append((f"{metric} {word}", one, two))
    return rows


def settings(job: ElasticJob) -> dict[str, str]:
    """The settings of a job: arguments, hardware, image, and the variables that the user has set."""
    found = hardware(job)
    each = plural(found.gpus_per_worker, "GPU") if found.gpus_per_worker else plural(found.ranks_per_worker, "CPU rank")
    ours = {name: value for name, value in found.env.items() if not name.startswith(_OURS)}
    return {
        **arguments(job),
        "workers": f"{job.desired} ({job.bounds}), {each} each",
        "image": found.image,
        **{f"${name}": value for name, value in ours.items()},
    }


def arguments(job: ElasticJob) -> dict[str, str]:
    """The script's arguments by name, for `--lr 0.1` and `--lr=0.1` alike, or by position."""
    words = list(hardware(job).command)
    words = words[words.index("--") + 1 :] if "--" in words else words
    found: dict[str, list[str]] = {}
    place = 0
    while words:
        word = words.pop(0)
        if not word.startswith("-") or _NUMBER.match(word) or word in ("-", "--"):
            place += 1
            found[ARGUMENT.format(place)] = [word]
            continue
        name, equals, value = word.partition("=")
        if not equals:
            follows = bool(words) and (not words[0].startswith("-") or bool(_NUMBER.match(words[0])))
            value = words.pop(0) if follows else "yes"
        found.setdefault(name, []).append(value)
    return {name: " ".join(values) for name, values in found.items()}


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Name -> both values, if they differ; "" for a missing one. Values of secret variables are hidden."""
    found = {}
    for name in dict.fromkeys((*before, *after)):
        one, two = before.get(name, ""), after.get(name, "")
        if one != two:
            is_variable = name.startswith("$")
            found[name] = (public_value(name, one), public_value(name, two)) if is_variable else (one, two)
    return found


def outcome(job: ElasticJob, now: float) -> dict[str, str]:
    """The results of a job, without its metrics."""
    status, spent = job.status, cost(job, now)
    took_s = None if status.start_time is None else (status.completion_time or now) - status.start_time
    return {
        "phase": status.phase.value,
        "step": part_of(status.progress.step, status.progress.total_steps),
        "epoch": part_of(status.progress.epoch, status.progress.total_epochs),
        "took": "" if took_s is None else span(took_s),
        "rate": rate_text(status, now, long=True),
        "interruptions": str(len(status.interruptions)),
        "steps redone": "" if status.steps_redone is None else str(status.steps_redone),
        "cost": "" if spent is None else dollars(spent.spent),
    }


def _value(found: Mapping[str, Any], key: str) -> str:
    lost, value = found.get("lost"), found.get(key)
    if key == "last" and lost is not None:
        return f"{lost[1]} since step {lost[0]:.0f}"
    return "" if value is None else f"{value:.6g}"


def code_changes(before: ElasticJob, after: ElasticJob) -> CodeChanges:
    """The changes from one job's code to the other's."""
    places = [hardware(job).env.get(variables.WORKSPACE, "").rpartition("#") for job in (before, after)]
    bare = [job.name for job, (url, _, _) in zip((before, after), places, strict=True) if not url]
    if len(bare) == 2:
        return CodeChanges(unknown="both run what is in their image or on this machine")
    if bare:
        return CodeChanges(unknown=f"{bare[0]} brought no workspace along")
    if places[0][2] == places[1][2]:
        return CodeChanges()
    try:
        one, two = (_open(url, digest) for url, _, digest in places)
        return _changes(one, two)
    except TrainError as e:
        return CodeChanges(unknown=str(e))


@dataclass(slots=True)
class _StoredCode:
    """A workspace, as far as it has been read."""

    storage: Storage
    kept: transfer.Kept
    contents: dict[str, bytes] = field(default_factory=dict)

    def by_path(self) -> Mapping[str, Item]:
        return {item.path: item for item in self.kept.listing.items}


def _open(url: str, digest: str) -> _StoredCode:
    storage = open_job_storage(url, QUICK)
    return _StoredCode(storage, transfer.find(storage, digest))


def _changes(one: _StoredCode, two: _StoredCode) -> CodeChanges:
    then, now = one.by_path(), two.by_path()
    changed = [path for path in now if path in then and then[path] != now[path]]
    new, gone = [path for path in now if path not in then], [path for path in then if path not in now]
    paths = sorted((*changed, *new, *gone))
    for code, items in ((one, then), (two, now)):
        code.contents = transfer.read_files(code.storage, code.kept, _readable(items.get(path) for path in paths))
    lines = [line for path in paths for line in _diff(path, _text(one, then.get(path)), _text(two, now.get(path)))]
    return CodeChanges(tuple(changed), tuple(new), tuple(gone), tuple(lines))


def _readable(items: Iterator[Item | None]) -> Iterator[File]:
    """The files among them that are small enough to compare, up to a total size."""
    room = MAX_BYTES
    for item in items:
        if isinstance(item, File) and item.size_bytes <= min(MAX_FILE_BYTES, room):
            room -= item.size_bytes
            yield item


def _text(code: _StoredCode, item: Item | None) -> list[str] | None:
    """The lines of a file; none if it does not exist, None if it is not text or was not read."""
    if item is None:
        return []
    content = code.contents.get(item.sha256) if isinstance(item, File) else None
    try:
        return None if content is None or b"\0" in content else content.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        return None


def _diff(path: str, before: list[str] | None, after: list[str] | None) -> Iterator[str]:
    if before is None or after is None:
        return iter([f"{path}: differs (no text, or too large to show)"])
    return difflib.unified_diff(before, after, f"a/{path}", f"b/{path}", lineterm="")
