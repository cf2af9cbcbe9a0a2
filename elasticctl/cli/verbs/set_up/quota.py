"""`quota`: what each project is guaranteed, what it holds, and which jobs wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from elasticctl.api.errors import ForbiddenError, UsageError
from elasticctl.api.quota import JobSlots, PoolUsage, ProjectUsage
from elasticctl.api.text import plural, quote
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import add_group, new_app, verb
from elasticctl.cli.framework.output import Table, emit, hint, print_data, print_table
from elasticctl.cli.framework.place import Where, reach
from elasticctl.operations.option_values import Assignment
from elasticctl.operations.target import Target
from elasticctl.terminal import say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticctl.api.limits import AllowedJobs
    from elasticctl.api.quota import Quota
    from elasticctl.api.spec import ElasticJob

app = new_app()
quota = add_group(app, "quota", "Manage the quotas of projects that share a cluster; a project is a namespace.")

ANY = "any"
Form = Annotated[Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format.")]
Project = Annotated[str, typer.Argument(metavar="PROJECT")]


@dataclass(frozen=True, slots=True)
class QuotaTerms:
    """The changes to a quota; empty or None: none."""

    guaranteed: Annotated[
        tuple[Assignment, ...],
        options.assignments("--guaranteed", "KIND=N", "N slots of a kind, whenever the project asks for them."),
    ] = ()
    limit: Annotated[
        tuple[Assignment, ...],
        options.assignments("--limit", "KIND=N", "At most N slots of a kind; `KIND=none`: no limit."),
    ] = ()
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="W", help="Its share of unused slots; 1 by default.")
    ] = None


@dataclass(frozen=True, slots=True)
class AllowedTerms:
    """The changes to the limits of a project's jobs; empty: none."""

    max_priority: Annotated[
        str, typer.Option("--max-priority", metavar="N", help="The highest --priority of a job; `any`: no limit.")
    ] = ""
    usd_per_day: Annotated[
        str,
        typer.Option(
            "--usd-per-day", metavar="USD", help="The most that all its jobs may cost per day; `any`: no limit."
        ),
    ] = ""
    allow_image: Annotated[
        tuple[str, ...],
        typer.Option("--allow-image", metavar="NAME", help="Allow only these images, or NAME*; `any`: all."),
    ] = ()
    allow_service_account: Annotated[
        tuple[str, ...],
        typer.Option("--allow-service-account", metavar="NAME", help="Allow only these service accounts."),
    ] = ()
    allow_storage: Annotated[
        tuple[str, ...],
        typer.Option("--allow-storage", metavar="URL", help="Allow only storage at and below these URLs."),
    ] = ()
    allow_node_type: Annotated[
        tuple[str, ...],
        typer.Option("--allow-node-type", metavar="TYPE", help="Allow workers only on these node types."),
    ] = ()
    allow_priority_class: Annotated[
        tuple[str, ...],
        typer.Option("--allow-priority-class", metavar="NAME", help="Allow only these priority classes."),
    ] = ()


@verb(quota, "list")
def list_quotas(*, output: Form = "table", where: Where) -> None:
    """Show what each project holds and is guaranteed, and which jobs wait for what."""
    from elasticctl.api.codec import to_json
    from elasticctl.api.quota import Quota, spent_today, usage_by_job, usage_by_pool, usage_by_project

    target = reach(where)
    jobs, all_seen = _jobs(target)
    held = usage_by_job(jobs)
    quotas = target.cluster.list_quotas()
    rows, known = usage_by_project(quotas, held), list(map(Quota.from_manifest, quotas))
    spent = spent_today(quotas, time.time())
    pools = usage_by_pool(rows, held, all_seen=all_seen)
    if output != "table":
        allowed = [_allowed_data(item, spent) for item in known if item.allowed.to_spec()]
        listed = {"pools": to_json(pools), "holdings": to_json(rows), "jobs": to_json(held), "allowed": allowed}
        print_data("QuotaList", listed, output)
        return
    if rows:
        print_table(holdings_table(rows, sys.stdout.encoding))
    elif not known:
        say(
            "no project has a quota, and no jobs share the cluster. Next: see docs/sharing.md on how to turn sharing on"
        )
    for line in (
        *free_lines(pools),
        *allowed_lines(known, spent),
        *job_sentences(item for item in held if not item.workers),
    ):
        say(line)
    hint("Next: give a project its quota: elasticctl quota set PROJECT --guaranteed KIND=N")


@verb(quota, "set")
def set_quota(*, project: Project, terms: QuotaTerms, allowed: AllowedTerms, where: Where) -> None:
    """Set a project's guaranteed slots, limits and weight; fields that you do not give stay unchanged.

    A list of allowed values replaces the previous one; `any` removes a limit.

    \b
      elasticctl quota set vision --guaranteed t4=8 --limit t4=16
      elasticctl quota set speech --guaranteed a100=4 --weight 2
      elasticctl quota set vision --allow-image 'r.example/*' --usd-per-day 200
    """
    from elasticctl.api.quota import Quota, check_quota

    if terms == QuotaTerms() and allowed == AllowedTerms():
        raise UsageError("nothing to set. FIX: add --guaranteed KIND=N, --limit KIND=N or --weight W")
    target = reach(where)
    before = _find(target, project) or Quota(project)
    wanted = Quota(
        project=project,
        weight=before.weight if terms.weight is None else terms.weight,
        guaranteed=_apply_terms(before.guaranteed, terms.guaranteed, "--guaranteed"),
        limit=_apply_terms(before.limit, terms.limit, "--limit"),
        allowed=_apply_allowed(before.allowed, allowed),
    )
    stored = Quota.from_manifest(target.cluster.put_quota(check_quota(wanted.to_manifest()).to_manifest()))
    say(f"{project}: {_quota_line(stored)}")
    for line in allowed_lines([stored], {}):
        say(line)
    hint("Next: see who uses what: elasticctl quota list")


@verb(quota, "rm")
def remove_quota(*, project: Project, where: Where) -> None:
    """Remove a project's quota: it then has no guarantee and no limit."""
    reach(where).cluster.delete_quota(project)
    say(f"{project}: its quota is removed")


@verb(quota, "explain")
def explain_quota(*, project: Annotated[str | None, typer.Argument(metavar="PROJECT")] = None, where: Where) -> None:
    """Explain for each job, or for each job of one project, what it has and why it has no more."""
    from elasticctl.api.quota import usage_by_job

    held = [item for item in usage_by_job(_jobs(reach(where))[0]) if project in (None, item.project)]
    if not held:
        say("no jobs share the cluster" + (f" in project {project}" if project else ""))
    for line in job_sentences(held):
        emit(line)


def _jobs(target: Target) -> tuple[list[ElasticJob], bool]:
    """All jobs, and True; or those of this namespace, and False, if the others may not be read."""
    from elasticctl.api.spec import ElasticJob

    try:
        found, all_seen = target.cluster.list_jobs(None), True
    except ForbiddenError:
        say(f"you may not list the jobs of other namespaces: only those of {target.namespace} are shown")
        found, all_seen = target.cluster.list_jobs(target.namespace), False
    return [ElasticJob.from_manifest(job) for job in found], all_seen


def _find(target: Target, project: str) -> Quota | None:
    from elasticctl.api.quota import Quota

    found = map(Quota.from_manifest, target.cluster.list_quotas())
    return next((item for item in found if item.project == project), None)


def _apply_terms(before: Mapping[str, int], given: tuple[Assignment, ...], flag: str) -> dict[str, int]:
    after = dict(before)
    for kind, text in given:
        if text == "none":
            after.pop(kind, None)
        elif text.isascii() and text.isdigit():
            after[kind] = int(text)
        else:
            raise UsageError(f"{flag} {kind}={text}: {quote(text)} is not a whole number, or `none`")
    return after


def _apply_allowed(before: AllowedJobs, given: AllowedTerms) -> AllowedJobs:
    """The limits with the given changes. Raises UsageError for an invalid number."""
    lists = {
        "images": given.allow_image,
        "service_accounts": given.allow_service_account,
        "storage": given.allow_storage,
        "node_types": given.allow_node_type,
        "priority_classes": given.allow_priority_class,
    }
    changed: dict[str, Any] = {name: () if value == (ANY,) else value for name, value in lists.items() if value}
    for name, flag, text, number in (
        ("priority", "--max-priority", given.max_priority, int),
        ("usd_per_day", "--usd-per-day", given.usd_per_day, float),
    ):
        if text:
            try:
                changed[name] = None if text == ANY else number(text)
            except ValueError:
                raise UsageError(f"{flag} {text}: {quote(text)} is not a number, or `{ANY}`") from None
    return replace(before, **changed)


def allowed_lines(quotas: Iterable[Quota], spent: Mapping[str, float]) -> Iterator[str]:
    """A line for each project with limits on its jobs; `spent` is US dollars today."""
    for item in quotas:
        limits, parts = item.allowed, []
        if limits.priority is not None:
            parts.append(f"priority {limits.priority} at most")
        for name, values in (
            ("priority classes", limits.priority_classes),
            ("images", limits.images),
            ("service accounts", limits.service_accounts),
            ("storage", limits.storage),
            ("node types", limits.node_types),
        ):
            if values:
                parts.append(f"{name} {', '.join(values)}")
        if limits.usd_per_day is not None:
            today = f" (today {spent[item.project]:.2f})" if item.project in spent else ""
            parts.append(f"{limits.usd_per_day:.2f} USD per day{today}")
        if parts:
            yield f"{item.project}: jobs are limited to {'; '.join(parts)}"


def _allowed_data(item: Quota, spent: Mapping[str, float]) -> dict[str, Any]:
    """The limits of a project's jobs, and what it has spent today if that is counted."""
    today = {"usdToday": spent[item.project]} if item.project in spent else {}
    return {"project": item.project, **item.allowed.to_spec(), **today}


def _quota_line(found: Quota) -> str:
    given = ", ".join(f"{slots} {kind}" for kind, slots in sorted(found.guaranteed.items())) or "nothing"
    limit = ", ".join(f"{slots} {kind}" for kind, slots in sorted(found.limit.items())) or "none"
    return f"guaranteed {given}; limit {limit}; weight {found.weight:g}"


_BAR_WIDTH = 20
_BLOCKS, _PLAIN = ("█", "▓", "░"), ("#", "+", ".")
_COLUMNS = ("PROJECT", "KIND", "HELD", "GUARANTEED", "LIMIT", "BORROWED", "WAITING", "HELD OF GUARANTEED")
_SPARE = ("LIMIT", "HELD OF GUARANTEED")


def holdings_table(rows: Sequence[ProjectUsage], encoding: str | None) -> Table:
    """The rows, each with a bar, all to one scale, in characters that the encoding has."""
    scale = max((max(row.held, row.guaranteed) for row in rows), default=0)
    cells = [
        (
            row.project,
            row.pool,
            str(row.held),
            str(row.guaranteed),
            "" if row.limit is None else str(row.limit),
            str(row.borrowed),
            str(row.waiting),
            bar(row, scale, encoding),
        )
        for row in rows
    ]
    return Table(_COLUMNS, cells, spare=_SPARE)


def bar(row: ProjectUsage, scale: int, encoding: str | None) -> str:
    """A bar of a width of `scale` slots; full: held within the guarantee, shaded: borrowed, light: unused guarantee."""
    own, lent, idle = _BLOCKS if (encoding or "").lower().replace("-", "").startswith("utf") else _PLAIN
    if not scale:
        return ""
    ends = [round(slots * _BAR_WIDTH / scale) for slots in (row.held - row.borrowed, row.held, row.guaranteed)]
    return own * ends[0] + lent * (ends[1] - ends[0]) + idle * max(0, ends[2] - ends[1])


def free_lines(found: Iterable[PoolUsage]) -> Iterator[str]:
    """A sentence for each pool whose number of free slots is known."""
    for item in found:
        if item.slots is not None and item.free is not None:
            yield f"{item.pool}: {item.free} of {plural(item.slots, item.unit)} free"


def job_sentences(held: Iterable[JobSlots]) -> Iterator[str]:
    """A sentence for each job: what it has, and why it has no more."""
    for item in held:
        last = f" Last change: {item.change}." if item.change else ""
        yield f"{item.project}/{item.job} {item.message}.{last}"
