"""`explain`: why a job is pending, restarting or failed, or that it is fine."""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.api.errors import ClusterError
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import emit, on_terminal, print_data
from elasticctl.cli.framework.suggested_commands import with_place
from elasticctl.cli.framework.target import Target, reach
from elasticctl.cli.views.job import look_around

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest
    from elasticctl.diagnosis import Case, Finding

_WIDEST = 100
_NO_LIMIT = 100_000
_MARKS = {"error": "!", "warning": "!", "info": "-"}

app = new_app()


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


def read_case(target: Target, manifest: Manifest) -> Case:
    """Query everything about a job: itself, its pods, events about waiting ones, and the jobs that hold their GPUs."""
    from elasticctl.api.spec import ElasticJob
    from elasticctl.diagnosis import Case

    job = ElasticJob.from_manifest(manifest)
    pods = tuple(target.cluster.pods_of([job])[job.uid])
    seen = replace(look_around(target, job, pods), budgets=tuple(target.cluster.list_budgets(job.namespace)))
    case = Case(job, pods, time.time(), seen=seen)
    if case.hardware.gpus_per_worker and any(case.pod_waits()):
        return replace(case, holders=_holders(target, job))
    return case


def _holders(target: Target, waiting: ElasticJob) -> dict[str, int]:
    """Other jobs -> GPUs that their workers hold; only of this namespace if the others may not be read."""
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob, PodPhase

    try:
        manifests = target.cluster.list_jobs(None)
    except ClusterError:
        manifests = target.cluster.list_jobs(target.namespace)
    held: dict[str, int] = {}
    for job in map(ElasticJob.from_manifest, manifests):
        running = sum(worker.cause is None and worker.phase == PodPhase.RUNNING for worker in job.status.workers)
        if job.uid != waiting.uid and running * hardware(job).gpus_per_worker:
            held[job.name if job.namespace == waiting.namespace else job.key] = running * hardware(job).gpus_per_worker
    return held


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
