"""`describe`: everything about one job; `explain`: why it is pending, restarting or failed, or that it is fine."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.output import emit, hint, on_terminal, print_data
from elasticctl.cli.framework.place import Where, reach
from elasticctl.terminal import with_place

if TYPE_CHECKING:
    from elasticctl.diagnosis import Case, Finding

_WIDEST = 100
_NO_LIMIT = 100_000
_MARKS = {"error": "!", "warning": "!", "info": "-"}

app = new_app()


@verb(app, "describe")
def describe(
    *,
    job: options.Job,
    output: Annotated[
        Literal["text", "json", "yaml"], typer.Option("-o", "--output", help="Output format: a page, or whole objects.")
    ] = "text",
    where: Where,
) -> None:
    """Show everything about a job: what it runs, its policy, workers, groups, interruptions and conditions.

    \b
      elasticctl describe digits
    """
    from elasticctl.api.spec import ElasticJob
    from elasticctl.diagnosis import diagnose

    target = reach(where)
    manifest = target.find(job)
    name = manifest["metadata"]["name"]
    if output != "text":
        found = ElasticJob.from_manifest(manifest)
        pods, happened = target.cluster.pods_of([found])[found.uid], target.cluster.list_events
        data = {"job": name, "object": manifest, "pods": pods, "events": happened(target.namespace, name)}
        print_data("Description", data, output)
        return
    from elasticctl.cli.views.description import describe_job, format_sections
    from elasticctl.operations.explain import read_case

    case = read_case(target, manifest)
    width = shutil.get_terminal_size().columns if on_terminal() else None
    emit("\n".join(format_sections(describe_job(case, diagnose(case)), width)))
    hint(f"\nNext: see what happened when: elasticctl events {name}")


@verb(app, "explain")
def explain(
    *,
    job: options.Job,
    output: Annotated[
        Literal["text", "json", "yaml"], typer.Option("-o", "--output", help="Output format: sentences, or findings.")
    ] = "text",
    where: Where,
) -> None:
    """Explain why a job waits, restarts or failed, or that it is fine, and what to run next.

    The decisive cause comes first, with the commands that help; other problems follow.

    \b
      elasticctl explain digits
      elasticctl explain digits -o json
    """
    from elasticctl.diagnosis import diagnose
    from elasticctl.operations.explain import read_case

    target = reach(where)
    case = read_case(target, target.find(job))
    findings = tuple(_placed(finding) for finding in diagnose(case))
    if output == "text":
        emit(
            "\n".join(
                explanation_lines(case, findings, shutil.get_terminal_size().columns if on_terminal() else _NO_LIMIT)
            )
        )
        return
    from elasticctl.api.codec import to_json

    found = [{**to_json(finding), "severity": finding.severity.value} for finding in findings]
    print_data("Explanation", {"job": case.name, "phase": case.status.phase.value, "findings": found}, output)


def _placed(finding: Finding) -> Finding:
    """The finding, whose commands name the place of this command line."""
    return replace(finding, mends=tuple(replace(mend, command=with_place(mend.command)) for mend in finding.mends))


def explanation_lines(case: Case, findings: tuple[Finding, ...], width: int) -> Iterator[str]:
    """The findings as lines of at most `width` columns, except for commands and quoted lines. Pure."""
    first, *others = findings
    yield f"{case.name} is {case.status.phase.value}."
    yield from _paragraph(first, "", width)
    if others:
        yield ""
        yield "Also:"
    for finding in others:
        yield from _paragraph(finding, f"{_MARKS[finding.severity]} ", width)


def _paragraph(finding: Finding, mark: str, width: int) -> Iterator[str]:
    indent = " " * len(mark)
    yield from textwrap.wrap(
        finding.text,
        min(width, _WIDEST) if width < _NO_LIMIT else width,
        initial_indent=mark,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from (f"{indent}  | {line}" for line in finding.details)
    yield from (f"{indent}  {mend.advice}:  {mend.command}" for mend in finding.mends)
