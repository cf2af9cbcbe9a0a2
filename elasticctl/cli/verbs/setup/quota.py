"""`quota`: what projects are guaranteed, who holds what, and who waits for whom."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.api.errors import ForbiddenError, UsageError
from elasticctl.api.text import shown
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import family, verb
from elasticctl.cli.framework.options import Assignment, Where
from elasticctl.cli.framework.output import emit, hint, print_data, print_table, say
from elasticctl.cli.framework.target import Target, reach

if TYPE_CHECKING:
    from collections.abc import Mapping

    from elasticctl.api.quota import Quota
    from elasticctl.api.spec import ElasticJob

app, quota = family("quota", "What projects are guaranteed of a shared cluster; a project is a namespace.")

Form = Annotated[Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="How to print.")]
Project = Annotated[str, typer.Argument(metavar="PROJECT")]


@dataclass(frozen=True, slots=True)
class Terms:
    """What is to change of a quota; empty or None: nothing."""

    guaranteed: Annotated[
        tuple[Assignment, ...], options.assignments("--guaranteed", "KIND=N", "N slots of a kind, whenever wanted.")
    ] = ()
    limit: Annotated[
        tuple[Assignment, ...], options.assignments("--limit", "KIND=N", "Never more than N; `KIND=none`: no limit.")
    ] = ()
    weight: Annotated[
        float | None, typer.Option("--weight", metavar="W", help="Its share of what others leave; 1 by default.")
    ] = None


@verb(quota, "list")
def list_quotas(*, output: Form = "table", where: Where) -> None:
    """Show what each project holds, of how much that it is guaranteed, and which jobs wait for what."""
    from elasticctl.api.codec import to_json
    from elasticctl.api.quota import usage_by_job, usage_by_pool, usage_by_project
    from elasticctl.cli.views.quota import left, table, told

    target = reach(where)
    jobs, all_seen = _jobs(target)
    held = usage_by_job(jobs)
    rows = usage_by_project(target.cluster.list_quotas(), held)
    pools = usage_by_pool(rows, held, all_seen=all_seen)
    if output != "table":
        print_data("QuotaList", {"pools": to_json(pools), "holdings": to_json(rows), "jobs": to_json(held)}, output)
        return
    if rows:
        print_table(table(rows, sys.stdout.encoding))
    else:
        say("no project has a quota, and no job shares; docs/sharing.md says how to switch sharing on")
    for line in (*left(pools), *told(item for item in held if not item.workers)):
        say(line)
    hint("give a project its part: elasticctl quota set PROJECT --guaranteed KIND=N")


@verb(quota, "set")
def set_quota(*, project: Project, terms: Terms, where: Where) -> None:
    """Guarantee a project slots, limit it, or weigh its part of what others leave; the rest stays as it is.

    \b
      elasticctl quota set vision --guaranteed t4=8 --limit t4=16
      elasticctl quota set speech --guaranteed a100=4 --weight 2
    """
    from elasticctl.api.quota import Quota, check_quota

    if not (terms.guaranteed or terms.limit or terms.weight is not None):
        raise UsageError("say what: --guaranteed KIND=N, --limit KIND=N or --weight W")
    target = reach(where)
    before = _find(target, project) or Quota(project)
    wanted = Quota(
        project=project,
        weight=before.weight if terms.weight is None else terms.weight,
        guaranteed=_changed(before.guaranteed, terms.guaranteed, "--guaranteed"),
        limit=_changed(before.limit, terms.limit, "--limit"),
    )
    stored = Quota.from_manifest(target.cluster.put_quota(check_quota(wanted.to_manifest()).to_manifest()))
    say(f"{project}: {_words(stored)}")
    hint("who holds what: elasticctl quota list")


@verb(quota, "rm")
def remove_quota(*, project: Project, where: Where) -> None:
    """Remove a project's quota: nothing is guaranteed to it any more, and nothing limits it."""
    reach(where).cluster.delete_quota(project)
    say(f"{project}: its quota is removed")


@verb(quota, "explain")
def explain_quota(*, project: Annotated[str | None, typer.Argument(metavar="PROJECT")] = None, where: Where) -> None:
    """Say of each job, or of each of one project, what it has and why it has no more."""
    from elasticctl.api.quota import usage_by_job
    from elasticctl.cli.views.quota import told

    held = [item for item in usage_by_job(_jobs(reach(where))[0]) if project in (None, item.project)]
    if not held:
        say("no job shares" + (f" in {project}" if project else ""))
    for line in told(held):
        emit(line)


def _jobs(target: Target) -> tuple[list[ElasticJob], bool]:
    """All jobs, and True; those of this namespace where the others' must not be seen."""
    from elasticctl.api.spec import ElasticJob

    try:
        found, all_seen = target.cluster.list_jobs(None), True
    except ForbiddenError:
        say(f"the jobs of other namespaces must not be seen: only those of {target.namespace} are shown")
        found, all_seen = target.cluster.list_jobs(target.namespace), False
    return [ElasticJob.from_manifest(job) for job in found], all_seen


def _find(target: Target, project: str) -> Quota | None:
    from elasticctl.api.quota import Quota

    found = map(Quota.from_manifest, target.cluster.list_quotas())
    return next((item for item in found if item.project == project), None)


def _changed(before: Mapping[str, int], given: tuple[Assignment, ...], flag: str) -> dict[str, int]:
    after = dict(before)
    for kind, text in given:
        if text == "none":
            after.pop(kind, None)
        elif text.isascii() and text.isdigit():
            after[kind] = int(text)
        else:
            raise UsageError(f"{flag} {kind}={text}: {shown(text)} is not a whole number, or `none`")
    return after


def _words(found: Quota) -> str:
    given = ", ".join(f"{slots} {kind}" for kind, slots in sorted(found.guaranteed.items())) or "nothing"
    limit = ", ".join(f"{slots} {kind}" for kind, slots in sorted(found.limit.items())) or "none"
    return f"guaranteed {given}; limit {limit}; weight {found.weight:g}"
