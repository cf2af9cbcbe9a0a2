"""`compare`: two jobs side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import plural
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import emit, print_data, print_table, say
from elasticctl.cli.framework.target import reach

if TYPE_CHECKING:
    from elasticctl.cli.submit.upload.code_changes import CodeChanges
    from elasticctl.dashboard.run_metrics import Results

MAX_LINES = 200
MAX_LINES_OF_PAGE, MAX_TEXT = 2_000, 500

app = new_app()

Form = Literal["table", "json", "yaml"]


@verb(app, "compare")
def compare(
    job: options.Job,
    other: Annotated[str, typer.Argument(metavar="OTHER", autocompletion=options.complete_job)],
    *,
    output: Annotated[
        Form, typer.Option("-o", "--output", help="Output format: a table with a diff of the code, or data.")
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
    from elasticctl.cli.submit.upload.code_changes import CodeChanges, code_changes
    from elasticctl.cli.views.comparison import comparison_data, comparison_table

    target = reach(where)
    jobs = [ElasticJob.from_manifest(target.find(name)) for name in (job, other)]
    results, now = _read_results(jobs), time.time()
    code = CodeChanges() if no_code else code_changes(*jobs)
    if output != "table":
        shown = {"unknown": code.unknown} if code.unknown else {}
        paths = {"changed": list(code.changed), "new": list(code.new), "gone": list(code.gone)}
        told = {} if no_code else {"code": {**paths, "diff": list(code.lines), **shown}}
        print_data("Comparison", {**comparison_data(jobs, results, now), **told}, output)
        return
    print_table(comparison_table(jobs, results, now))
    if not no_code:
        _print_diff(code, len(code.lines) if all_lines else MAX_LINES)


def _read_results(jobs: Sequence[ElasticJob]) -> list[Results]:
    """The last, lowest and highest values of the jobs' metrics; says where they are not all known."""
    from elasticctl.dashboard.run_metrics import RunMetrics

    metrics, results = RunMetrics(), []
    for job in jobs:
        found, trouble = metrics.results(job)
        results.append(found)
        if trouble:
            say(f"{job.name}: lowest and highest of what its status keeps: {trouble}")
    return results


def _print_diff(code: CodeChanges, most: int) -> None:
    """Print how the code differs, in at most so many lines."""
    emit(f"\ncode: {_in_words(code)}")
    lines = code.lines[:most]
    if lines:
        emit("\n".join(lines))
    if len(lines) < len(code.lines):
        say(f"{plural(len(code.lines) - len(lines), 'more line')}: --all-lines")


def compared(jobs: Sequence[ElasticJob], results: Sequence[Results]) -> dict[str, Any]:
    """Compare two jobs whose metrics are known, for the dashboard. Blocks."""
    from elasticctl.cli.submit.upload.code_changes import code_changes
    from elasticctl.cli.views.comparison import comparison_table

    rows, code = comparison_table(jobs, results, time.time()).rows, code_changes(*jobs)
    lines = [line[:MAX_TEXT] for line in code.lines[:MAX_LINES_OF_PAGE]]
    return {"rows": rows, "code": _in_words(code), "lines": lines, "more": len(code.lines) - len(lines)}


def _in_words(code: CodeChanges) -> str:
    if code.unknown:
        return f"not known: {code.unknown}"
    if code.same:
        return "the same"
    parts = (("changed", code.changed), ("new", code.new), ("gone", code.gone))
    return ", ".join(f"{plural(len(paths), 'file')} {word}" for word, paths in parts if paths)
