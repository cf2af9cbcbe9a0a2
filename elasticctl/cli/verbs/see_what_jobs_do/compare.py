"""`compare`: two jobs side by side."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elasticctl.api.observed.cost import cost
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.completion import complete_job
from elasticctl.cli.framework.output import Table, emit, print_data, print_table
from elasticctl.cli.framework.place import Where, reach
from elasticctl.terminal import say

if TYPE_CHECKING:
    from elasticctl.operations.compare import CodeChanges, JobComparison
    from elasticctl.operations.metrics import Results

MAX_LINES = 200

app = new_app()


@verb(app, "compare")
def compare(
    job: options.Job,
    other: Annotated[str, typer.Argument(metavar="OTHER", autocompletion=complete_job)],
    *,
    output: Annotated[
        Literal["table", "json", "yaml"],
        typer.Option("-o", "--output", help="Output format: a table with a diff of the code, or data."),
    ] = "table",
    no_code: Annotated[bool, typer.Option("--no-code", help="Omit how the code differs.")] = False,
    all_lines: Annotated[
        bool, typer.Option("--all-lines", help=f"Print all lines of the diff, not at most {MAX_LINES}.")
    ] = False,
    where: Where,
) -> None:
    """Show how OTHER differs from JOB: arguments, code, last and best values of the metrics, cost.

    \b
      elasticctl compare train train-2
      elasticctl compare train train-2 --no-code
    """
    from elasticctl.operations.compare import compare as compare_jobs
    from elasticctl.operations.metrics import RunMetrics

    target = reach(where)
    before, after = (ElasticJob.from_manifest(target.find(name)) for name in (job, other))
    now = time.time()
    found = compare_jobs((before, after), RunMetrics(), now, with_code=not no_code)
    for name, trouble in found.troubles:
        say(f"{name}: lowest and highest of what its status keeps: {trouble}")
    if output != "table":
        print_data("Comparison", _as_data(found, now), output)
        return
    print_table(Table(("", before.name, after.name), found.rows, wraps=True))
    if found.code is not None:
        _print_diff(found.code, len(found.code.lines) if all_lines else MAX_LINES)


def _print_diff(code: CodeChanges, most: int) -> None:
    """Print how the code differs, in at most so many lines."""
    emit(f"\ncode: {code.words}")
    lines = code.lines[:most]
    if lines:
        emit("\n".join(lines))
    if len(lines) < len(code.lines):
        say(f"{plural(len(code.lines) - len(lines), 'more line')}: --all-lines")


def _as_data(found: JobComparison, now: float) -> dict[str, Any]:
    from elasticctl.operations.compare import differences, settings

    before, after = map(settings, found.jobs)
    data: dict[str, Any] = {
        "jobs": [
            {"name": job.name, "namespace": job.namespace, "phase": job.status.phase.value, "metrics": _numbers(values)}
            | _optional("step", job.status.progress.step)
            | _optional("costUsd", _spent(job, now))
            for job, values in zip(found.jobs, found.results, strict=True)
        ],
        "settings": [{"name": name, "values": list(pair)} for name, pair in differences(before, after).items()],
    }
    code = found.code
    if code is not None:
        paths = {"changed": list(code.changed), "new": list(code.new), "gone": list(code.gone)}
        data["code"] = {**paths, "diff": list(code.lines), **({"unknown": code.unknown} if code.unknown else {})}
    return data


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
