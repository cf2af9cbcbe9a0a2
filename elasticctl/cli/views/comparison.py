"""Two jobs side by side: their settings and their results. `now` is in seconds since the epoch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from elasticctl.api.observed.cost import cost
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import dollars, plural, span
from elasticctl.cli.framework.output import Table
from elasticctl.cli.views.description import public
from elasticctl.cli.views.job import part_of, rate

if TYPE_CHECKING:
    from elasticctl.dashboard.run_metrics import Results

_NUMBER = re.compile(r"-\.?[0-9]")
_OURS = "ELASTICCTL_"
ARGUMENT = "argument {}"


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


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Name -> both values, if they differ; "" for a missing one. Values of secret variables are hidden."""
    found = {}
    for name in dict.fromkeys((*before, *after)):
        one, two = before.get(name, ""), after.get(name, "")
        if one != two:
            found[name] = (one and public(name, one), two and public(name, two)) if name.startswith("$") else (one, two)
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
        "rate": rate(status, now, long=True),
        "interruptions": str(len(status.interruptions)),
        "steps redone": "" if status.steps_redone is None else str(status.steps_redone),
        "cost": "" if spent is None else dollars(spent.spent),
    }


def comparison_table(jobs: Sequence[ElasticJob], results: Sequence[Results], now: float) -> Table:
    """The settings that differ, and all results; the header has the jobs' names."""
    rows = [(name, *pair) for name, pair in differences(*map(settings, jobs)).items()]
    ends = [outcome(job, now) for job in jobs]
    rows += [(name, ends[0][name], ends[1][name]) for name in ends[0] if any(end[name] for end in ends)]
    for metric in dict.fromkeys(name for found in results for name in found):
        for word, key in (("last", "last"), ("lowest", "min"), ("highest", "max")):
            one, two = (_value(found.get(metric, {}), key) for found in results)
            rows.append((f"{metric} {word}", one, two))
    return Table(("", *(job.name for job in jobs)), rows, wraps=True)


def _value(found: Mapping[str, Any], key: str) -> str:
    lost, value = found.get("lost"), found.get(key)
    if key == "last" and lost is not None:
        return f"{lost[1]} since step {lost[0]:.0f}"
    return "" if value is None else f"{value:.6g}"


def comparison_data(jobs: Sequence[ElasticJob], results: Sequence[Results], now: float) -> dict[str, Any]:
    """The same as data, without the code."""
    return {
        "jobs": [
            {"name": job.name, "namespace": job.namespace, "phase": job.status.phase.value, "metrics": _numbers(found)}
            | _optional("step", job.status.progress.step)
            | _optional("costUsd", _spent(job, now))
            for job, found in zip(jobs, results, strict=True)
        ],
        "settings": [{"name": name, "values": list(pair)} for name, pair in differences(*map(settings, jobs)).items()],
    }


def _spent(job: ElasticJob, now: float) -> float | None:
    spent = cost(job, now)
    return None if spent is None else spent.spent


def _optional(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None else {name: value}


def _numbers(found: Results) -> dict[str, dict[str, Any]]:
    keys = ("last", "min", "max")
    return {
        name: {key: each[key] for key in keys if each.get(key) is not None}
        | ({"notFinite": {"value": each["lost"][1], "step": int(each["lost"][0])}} if each.get("lost") else {})
        for name, each in found.items()
    }
