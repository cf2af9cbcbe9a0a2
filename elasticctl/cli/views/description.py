"""A complete description of a job, as by `kubectl describe`: facts, then a table for each kind of entry."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elasticctl.api.observed.history import activity_text, goodput
from elasticctl.api.observed.usage import step_times_text, usage_text
from elasticctl.api.podtemplate import Hardware
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, WorkerStatus
from elasticctl.api.text import plural, public_value, span
from elasticctl.cli.framework.output import Table, format_aligned
from elasticctl.cli.views import job as views
from elasticctl.cli.views.history import clock, cost_text, failure_lines, goodput_line, interruptions, scalings
from elasticctl.diagnosis import Case, Finding
from elasticctl_protocol import variables
from elasticctl_protocol.variables import OnNan

_GROUPS_SHOWN = 5
_LAST_SHOWN = 10
_NARROWEST = 40
_SHOWN_APART = (variables.STORAGE, variables.WORKSPACE, variables.WORKSPACE_FROM)


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the description: `facts` are names and values, `table` has rows, `lines` are printed as is."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    lines: tuple[str, ...] = ()


def describe_job(case: Case, findings: Sequence[Finding]) -> list[Section]:
    """All sections about a job that are not empty."""
    job, status = case.job, case.status
    sections = [
        Section("", facts=_filled(_identity(case, findings))),
        Section("Runs", facts=_filled(_runs(job, case.hardware))),
        Section("Policy", facts=_filled(_policy(job))),
        Section("Training", facts=_filled([*views.progress_facts(case.job, case.now), *_goodput_and_cost(case)])),
        Section(
            "Machines",
            facts=_filled([("In use", usage_text(status.usage)), ("Step time", step_times_text(status))]),
        ),
        _workers(case),
        _groups(status, job.name),
        Section("Interruptions", lines=_last(interruptions(status))),
        Section("Scalings", lines=_last(scalings(status))),
        Section("Last failure", lines=tuple(failure_lines(status))),
        _conditions(status),
    ]
    return [section for section in sections if section.facts or section.table or section.lines]


def format_sections(sections: Sequence[Section], width: int | None) -> Iterator[str]:
    """The sections as lines; facts are folded at `width` columns and tables cut there (None: neither)."""
    label = max((len(name) for section in sections for name, _ in section.facts), default=0) + 3
    for section in sections:
        inset = "  " if section.title else ""
        if section.title:
            yield ""
            yield f"{section.title}:"
        for name, value in section.facts:
            yield from _fact(f"{inset}{name}:".ljust(label + 2), value, width)
        if section.table is not None:
            lines, _ = format_aligned(section.table, width=None if width is None else width - len(inset))
            yield from (f"{inset}{line}" for line in lines)
        for line in section.lines:
            yield from _fact(inset, line, width)


def _identity(case: Case, findings: Sequence[Finding]) -> list[tuple[str, str]]:
    job, status = case.job, case.status
    lasting = views.duration_text(job, case.now)
    return [
        ("Name", job.name),
        ("Namespace", job.namespace),
        (
            "Created",
            "" if job.created_at is None else f"{clock(job.created_at)} ({span(case.since(job.created_at))} ago)",
        ),
        ("Phase", f"{status.phase.value} {lasting}".strip()),
        ("Doing", activity_text(status, case.now)),
        ("Why", findings[0].text),
        ("Also", " ".join(finding.text for finding in findings[1:])),
    ]


def _runs(job: ElasticJob, found: Hardware) -> list[tuple[str, str]]:
    each = plural(found.gpus_per_worker, "GPU") if found.gpus_per_worker else "no GPU"
    ranks = plural(found.ranks_per_worker, "rank")
    env = [f"{name}={public_value(name, value)}" for name, value in found.env.items() if name not in _SHOWN_APART]
    return [
        ("Command", shlex.join(found.command)),
        ("Image", found.image),
        ("Workers", f"{job.desired} wanted, {job.bounds} allowed; {each}, {ranks} each"),
        ("Storage", found.storage),
        ("Workspace", _workspace(found)),
        ("Variables", "  ".join(env)),
    ]


def _workspace(found: Hardware) -> str:
    """`1f2e3d4c5b6a of /home/me/digits`: the beginning of its digest, and its folder."""
    digest, source = found.env.get(variables.WORKSPACE, "").rpartition("#")[2], found.env.get(variables.WORKSPACE_FROM)
    return f"{digest[:12]} of {source}" if digest and source else digest[:12]


_ON_NAN = {
    OnNan.WARN: "",
    OnNan.STOP: "the job fails",
    OnNan.ROLLBACK: "back to the checkpoint before it, without the batches in between",
}


def _policy(job: ElasticJob) -> list[tuple[str, str]]:
    policy = job.policy
    pause = f"{span(policy.backoff_seconds)}, doubling up to {span(policy.backoff_max_seconds)}"
    return [
        ("Failures", views.failures_text(job)),
        ("Restarts", f"{job.restart_policy.value}; pause after failures {pause}"),
        ("Hang timeout", _hang_timeout(policy.hang_timeout_seconds)),
        ("If the loss is NaN", _ON_NAN[policy.on_nan]),
        ("Deadline", "" if job.deadline_s is None else span(job.deadline_s)),
        ("Deleted", "" if job.ttl_s is None else f"{span(job.ttl_s)} after its end"),
        ("Rendezvous", job.rdzv_endpoint),
    ]


def _hang_timeout(timeout_s: float | None) -> str:
    return "by its own pace" if timeout_s is None else span(timeout_s) if timeout_s else "never"


def _goodput_and_cost(case: Case) -> list[tuple[str, str]]:
    part = goodput(case.status, case.now)
    return [
        ("Goodput", goodput_line(part) if part else ""),
        ("If a worker is lost", protection(case.status)),
        ("Cost", cost_text(case.job, case.now)),
    ]


def protection(status: JobStatus) -> str:
    """The cost of losing a worker now; empty while it is unknown."""
    newest = status.generations[-1] if status.generations else None
    if status.phase.terminal or newest is None or newest.stays is None:
        return ""
    if newest.stays:
        return "the others go on in their processes, from the step they are in"
    because = f": {newest.restarts_because}" if newest.restarts_because else ""
    lack = newest.copies_lack
    steps_back = views.copied_steps_back(status)
    if steps_back is None:
        missing = f"; no copies in workers' memory: {lack}" if lack else ""
        return f"all ranks start again from the last checkpoint{because}{missing}"
    where = f"from copies in workers' memory, about {plural(steps_back, 'step')} back"
    if lack:
        return f"all ranks start again {where} unless its memory is lost as well ({lack}){because}"
    return f"all ranks start again {where}{because}"


def _workers(case: Case) -> Section:
    rows = [_worker(worker, case) for worker in case.status.workers]
    return Section("Workers", table=Table(("NAME", "PHASE", "FOR", "NODE", "ENDED"), rows) if rows else None)


def _worker(worker: WorkerStatus, case: Case) -> tuple[str, ...]:
    lived = "" if worker.started_at is None else span(max(0.0, (worker.ended_at or case.now) - worker.started_at))
    return worker.name, worker.phase, lived, worker.node, worker.cause or worker.removal


def _groups(status: JobStatus, job: str) -> Section:
    rows = [
        (
            str(item.generation),
            clock(item.formed_at),
            str(len(item.workers)),
            "" if item.resumed_step is None else str(item.resumed_step),
            "" if item.last_step is None else str(item.last_step),
            item.reason.replace(f"{job}-", ""),
        )
        for item in status.generations[-_GROUPS_SHOWN:]
    ]
    header = ("NO", "FORMED", "WORKERS", "FROM STEP", "TO STEP", "REASON")
    return Section("Groups", table=Table(header, rows) if rows else None)


def _conditions(status: JobStatus) -> Section:
    rows = [(c.type, c.status, clock(c.last_transition_time), c.reason) for c in status.conditions]
    return Section("Conditions", table=Table(("TYPE", "STATUS", "SINCE", "REASON"), rows) if rows else None)


def _last(lines: list[str]) -> tuple[str, ...]:
    """The last few, and the number of those before."""
    left_out = len(lines) - _LAST_SHOWN
    return tuple([f"({left_out} before)", *lines[-_LAST_SHOWN:]] if left_out > 0 else lines)


def _fact(label: str, value: str, width: int | None) -> list[str]:
    if width is None:
        return [label + value]
    return textwrap.wrap(
        value,
        max(width, _NARROWEST),
        initial_indent=label,
        subsequent_indent=" " * (len(label) if label.strip() else len(label) + 4),
        break_on_hyphens=False,
        drop_whitespace=True,
    ) or [label.rstrip()]


def _filled(facts: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    return tuple((name, value) for name, value in facts if value)
