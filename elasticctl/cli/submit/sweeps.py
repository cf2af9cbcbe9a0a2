"""Sweeps: one labelled job for each point of a grid; which run next, and which stop early. Pure.

The state of a sweep is in its jobs: the label `SWEEP_LABEL` names it, `ANNOTATION_POINT` is a job's point, and
`ANNOTATION_WAITS` marks those that wait, suspended, for their turn. So its driver can be interrupted, and continued
from any machine.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.objects import as_mapping, as_text, at
from elasticctl.api.podtemplate import STORAGE_VARIABLE, worker_container
from elasticctl.api.spec import GROUP, ElasticJob
from elasticctl.api.text import plural, quote
from elasticctl.cluster.base import Manifest
from elasticctl.templates import escape_expansion

SWEEP_LABEL = f"{GROUP}/sweep"
ANNOTATION_POINT = f"{GROUP}/sweep-point"
ANNOTATION_WAITS = f"{GROUP}/sweep-waits"
MAX_JOBS = 1000
LEAST_PEERS = 3
"""Of fewer, a median says nothing."""
_NAME = re.compile(r"[A-Za-z_][-A-Za-z0-9_.]*")
_RANGE = re.compile(r"(-?[0-9]{1,9})\.\.(-?[0-9]{1,9})(?::([1-9][0-9]{0,8}))?")


class Axis(NamedTuple):
    """A parameter and its values."""

    name: str
    values: tuple[str, ...]


def axis(text: str) -> Axis:
    """NAME=V1,V2 or NAME=1..10 or NAME=0..100:25, both ends included."""
    name, mark, values = text.partition("=")
    if not mark or not _NAME.fullmatch(name) or not values:
        raise typer.BadParameter(f"{quote(text)} is not of the form NAME=V1,V2 or NAME=1..10.")
    found: list[str] = []
    for value in values.split(","):
        spanned = _RANGE.fullmatch(value)
        if spanned is None:
            found.append(value)
            continue
        numbers = range(int(spanned[1]), int(spanned[2]) + 1, int(spanned[3] or 1))
        if not 0 < len(numbers) <= MAX_JOBS:
            raise typer.BadParameter(f"{quote(value)} is no range of 1 to {MAX_JOBS} whole numbers.")
        found += map(str, numbers)
    return Axis(name, tuple(dict.fromkeys(found)))


def points(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """All combinations, with the last parameter changing fastest. Raises UsageError for none or too many."""
    names = [one.name for one in axes]
    twice = next((name for name in names if names.count(name) > 1), None)
    if not axes or twice is not None:
        needed = "--grid is needed. FIX: give a parameter and its values: --grid lr=0.1,0.01"
        raise UsageError(f"--grid: {quote(twice)} is given twice" if twice else needed)
    number = 1
    for one in axes:
        number *= len(one.values)
    if number > MAX_JOBS:
        raise UsageError(f"--grid: {plural(number, 'job')} are more than {MAX_JOBS}. FIX: sweep in parts")
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(one.values for one in axes))]


def arguments(words: Sequence[str], point: Mapping[str, str]) -> list[str]:
    """The script's arguments at a point: `{name}` becomes its value; other parameters are appended as --name."""
    named = {name for name in point if any(f"{{{name}}}" in word for word in words)}
    filled = []
    for word in words:
        for name in named:
            word = word.replace(f"{{{name}}}", point[name])
        filled.append(word)
    for name, value in point.items():
        if name not in named:
            filled += [f"--{name}={value}"] if value.startswith("-") else [f"--{name}", value]
    return filled


def job_of_point(
    base: Manifest, sweep: str, number: int, point: Mapping[str, str], storage: str, *, waits: bool
) -> Manifest:
    """The job of one point, derived from that of the sweep's command, with its state at `storage`."""
    made = copy.deepcopy(base)
    metadata = made["metadata"]
    metadata["name"] = f"{sweep}-{number}"
    metadata["labels"] = {**as_mapping(metadata.get("labels")), SWEEP_LABEL: sweep}
    notes = {ANNOTATION_POINT: json.dumps(dict(point)), **({ANNOTATION_WAITS: "true"} if waits else {})}
    metadata["annotations"] = {**as_mapping(metadata.get("annotations")), **notes}
    if waits:
        made["spec"]["suspend"] = True
    container: Any = worker_container(made["spec"]["replicaSpecs"]["Worker"]["template"])
    escaped = {name: escape_expansion(value) for name, value in point.items()}
    container["args"] = arguments(container.get("args") or [], escaped)
    for variable in container.get("env") or []:
        if variable.get("name") == STORAGE_VARIABLE:
            variable["value"] = escape_expansion(storage)
    return made


def point_of(job: Manifest) -> dict[str, str]:
    """The point of a job; {} for one that is in no sweep."""
    try:
        found = json.loads(as_text(at(job, "metadata", "annotations", ANNOTATION_POINT)) or "{}")
    except (ValueError, RecursionError):
        return {}
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}


def waits(job: Manifest) -> bool:
    """True if it is suspended until its turn comes."""
    return at(job, "metadata", "annotations", ANNOTATION_WAITS) == "true" and at(job, "spec", "suspend") is True


def has_ended(job: Manifest) -> bool:
    """True if it has succeeded, failed or been cancelled."""
    return ElasticJob.from_manifest(job).status.phase.terminal


def next_to_start(jobs: Sequence[Manifest], parallel: int) -> list[str]:
    """The jobs to start now if `parallel` may run at once. Cancelled jobs no longer wait."""
    ended = [has_ended(job) or at(job, "spec", "cancel") is True for job in jobs]
    waiting = [job["metadata"]["name"] for job, over in zip(jobs, ended, strict=True) if waits(job) and not over]
    running = len(jobs) - sum(ended) - len(waiting)
    return waiting[: max(0, parallel - running)]


def metric_of(job: Manifest, metric: str) -> float | None:
    """The last value of a metric that a job reported."""
    return ElasticJob.from_manifest(job).status.progress.metrics.get(metric)


def to_stop(jobs: Sequence[Manifest], metric: str, *, lowest: bool, after_step: int) -> list[str]:
    """The median rule: running jobs whose best value so far is worse than the others' median at that step.

    It applies from `after_step` on, and with at least `LEAST_PEERS` others that have come as far. After Golovin et
    al., Google Vizier (2017).
    """
    curves = {job["metadata"]["name"]: _best_so_far(job, metric, lowest=lowest) for job in jobs}
    stopped = []
    for job in jobs:
        name = job["metadata"]["name"]
        own = curves[name]
        if has_ended(job) or waits(job) or not own or own[-1][0] < after_step:
            continue
        step, value = own[-1]
        others = [found for other, curve in curves.items() if other != name and (found := _at(curve, step)) is not None]
        if len(others) < LEAST_PEERS:
            continue
        median = statistics.median(others)
        if value > median if lowest else value < median:
            stopped.append(name)
    return stopped


def _best_so_far(job: Manifest, metric: str, *, lowest: bool) -> list[tuple[int, float]]:
    """(step, best value up to it) of each point of the job's curve that has the metric, in order."""
    status = ElasticJob.from_manifest(job).status
    values = status.curve.metrics.get(metric, ())
    found: list[tuple[int, float]] = []
    for step, value in zip(status.curve.step[len(status.curve.step) - len(values) :], values, strict=False):
        if value is not None:
            before = found[-1][1] if found else value
            found.append((step, min(before, value) if lowest else max(before, value)))
    return found


def _at(curve: Sequence[tuple[int, float]], step: int) -> float | None:
    """The best value by that step; None for a curve that does not reach it."""
    if not curve or curve[-1][0] < step:
        return None
    index = bisect.bisect_right([point[0] for point in curve], step) - 1
    return curve[index][1] if index >= 0 else None
