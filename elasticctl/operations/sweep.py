"""Sweeps: one labelled job for each point of a grid, some of which run at a time, and which may be stopped early.

The state of a sweep is in its jobs: the label `SWEEP_LABEL` names it, `ANNOTATION_POINT` is a job's point, and
`ANNOTATION_WAITS` marks those that wait, suspended, for their turn. So its driver can be interrupted, and continued
from any machine.
"""

from __future__ import annotations

import bisect
import copy
import itertools
import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.api.objects import as_mapping, as_text, at
from elasticctl.api.podtemplate import worker_container
from elasticctl.api.spec import GROUP, ElasticJob
from elasticctl.api.text import plural, quote
from elasticctl.cluster.base import Manifest
from elasticctl.operations.job_names import check_name, name_from, taken_names
from elasticctl.operations.option_values import whole
from elasticctl.operations.selection import fits, selector
from elasticctl.operations.storage_urls import child_url, storage_url
from elasticctl.operations.target import PATIENCE_S, Poller, Target, phase_of
from elasticctl_protocol import variables

if TYPE_CHECKING:
    from elasticctl.operations.submit.create import CommandDraft
    from elasticctl.operations.submit.job_flags import JobFlags
    from elasticctl.operations.submit.training_command import TrainingCommand

SWEEP_LABEL = f"{GROUP}/sweep"
ANNOTATION_POINT = f"{GROUP}/sweep-point"
ANNOTATION_WAITS = f"{GROUP}/sweep-waits"
MAX_JOBS = 1000
POLL_EVERY_S = 1.0
LEAST_PEERS = 3
"""The median of fewer jobs says nothing."""
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
        raise ValueError(f"{quote(text)} is not of the form NAME=V1,V2 or NAME=1..10.")
    found: list[str] = []
    for value in values.split(","):
        spanned = _RANGE.fullmatch(value)
        if spanned is None:
            found.append(value)
            continue
        numbers = range(int(spanned[1]), int(spanned[2]) + 1, int(spanned[3] or 1))
        if not 0 < len(numbers) <= MAX_JOBS:
            raise ValueError(f"{quote(value)} is no range of 1 to {MAX_JOBS} whole numbers.")
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
    from elasticctl.templates import escape_expansion

    escaped = {name: escape_expansion(value) for name, value in point.items()}
    container["args"] = arguments(container.get("args") or [], escaped)
    for variable in container.get("env") or []:
        if variable.get("name") == variables.STORAGE:
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
    """The jobs to start now if `parallel` may run at a time. Cancelled jobs no longer wait."""
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


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """The grid, how many jobs run at a time, and the metric to compare them by.

    From step `early_stop` on, jobs are cancelled whose best metric is worse than the others' median at their step.
    """

    grid: Annotated[tuple[Axis, ...], axis] = ()
    parallel: Annotated[int, whole(1)] = 1
    metric: str = ""
    mode: Literal["min", "max"] = "min"
    early_stop: Annotated[int | None, whole(1)] = None

    def __post_init__(self) -> None:
        if self.early_stop is not None and not self.metric:
            raise UsageError("--early-stop needs a metric to compare jobs by. FIX: add --metric loss, for example")


def create(target: Target, command: TrainingCommand, flags: JobFlags, sweep: SweepPlan) -> str:
    """Create the jobs of a sweep, most of them suspended; returns its name. Raises UsageError, ConflictError."""
    from elasticctl.operations.manifest_changes import NO_NOTIFICATIONS
    from elasticctl.operations.submit.create import ManifestChanges, plan_command

    found = points(sweep.grid)
    if flags.queue:
        raise UsageError("--queue cannot be used with a sweep, whose jobs wait for each other. FIX: leave it out")
    name = flags.name or name_from(command.named_after)
    check_name(f"{name}-{MAX_JOBS}")
    _refuse_taken(target, name, len(found))
    changes = ManifestChanges(notify=NO_NOTIFICATIONS)
    draft = plan_command(command, replace(flags, name=name), target.context, changes, observer=target.observer)
    base = draft.manifest()
    for line in draft.plan(base):
        target.observer.report(line)
    target.observer.report(f"{name}: {plural(len(found), 'job')}, {sweep.parallel} at a time")
    draft.send_workspace(base, target.observer)
    for number, point in enumerate(found, 1):
        storage = _storage_of(draft, flags, f"{name}-{number}")
        waiting = number > sweep.parallel
        target.cluster.create_job(job_of_point(base, name, number, point, storage, waits=waiting))
    return name


def _storage_of(draft: CommandDraft, flags: JobFlags, name: str) -> str:
    """Where one of the jobs keeps its state: below the given place, or in a new place."""
    if flags.storage:
        return storage_url(child_url(flags.storage, name), os.getcwd())
    return draft.request.storage.url_for(name)


def _refuse_taken(target: Target, name: str, number: int) -> None:
    names = taken_names(target)
    taken = next((made for at in range(number) if (made := f"{name}-{at + 1}") in names), None)
    if taken is not None:
        raise ConflictError(
            f"job {target.namespace}/{taken} already exists. FIX: choose another --name, continue that sweep"
            f" (elasticctl sweep --continue {name}), or delete it (elasticctl delete --label sweep={name})"
        )


def check_exists(target: Target, name: str) -> None:
    """Raise NotFoundError if there is no sweep of this name."""
    if not jobs_of(target, name):
        raise NotFoundError(f"no jobs of a sweep {quote(name)}. FIX: see `elasticctl list --label sweep`")


def jobs_of(target: Target, name: str) -> list[Manifest]:
    """The jobs of a sweep, in the order of its points."""
    chosen = (selector(f"{SWEEP_LABEL}={name}"),)
    jobs = [job for job in target.cluster.list_jobs(target.namespace) if fits(job, chosen)]
    return sorted(jobs, key=lambda job: (len(job["metadata"]["name"]), job["metadata"]["name"]))


def run(target: Target, name: str, sweep: SweepPlan) -> list[Manifest]:
    """Start jobs as others end, and stop unpromising ones; returns all jobs once they have ended.

    Reports what becomes of each. A job that is deleted meanwhile no longer counts.
    """
    reported: set[str] = set()
    lowest, observer = sweep.mode == "min", target.observer
    answers = Poller(lambda: jobs_of(target, name), POLL_EVERY_S, patience_s=PATIENCE_S, observer=observer)
    for jobs in answers.each():
        for job in jobs:
            if has_ended(job) and job["metadata"]["name"] not in reported:
                reported.add(job["metadata"]["name"])
                observer.report(_ended_line(job, sweep.metric))
        if all(map(has_ended, jobs)):
            return jobs
        if sweep.early_stop is not None:
            for worse in to_stop(jobs, sweep.metric, lowest=lowest, after_step=sweep.early_stop):
                _patch(target, worse, {"spec": {"cancel": True}})
                observer.report(f"{worse}: stopped early, its {sweep.metric} is worse than the others' at its step")
        for due in next_to_start(jobs, sweep.parallel):
            started = {"metadata": {"annotations": {ANNOTATION_WAITS: None}}, "spec": {"suspend": False}}
            _patch(target, due, started)
            observer.report(f"{due}: started")
    raise AssertionError("unreachable")


def _patch(target: Target, name: str, patch: dict[str, object]) -> None:
    try:
        target.cluster.patch_job(target.namespace, name, patch)
    except (NotFoundError, ConflictError) as e:
        target.observer.report(f"{name}: {e}")  # it is read again in a moment


def _ended_line(job: Manifest, metric: str) -> str:
    value = metric_of(job, metric) if metric else None
    point = " ".join(f"{name}={text}" for name, text in point_of(job).items())
    result = "" if value is None else f": {metric} {value:g}"
    return f"{job['metadata']['name']} ({point}): {phase_of(job).lower()}{result}"
