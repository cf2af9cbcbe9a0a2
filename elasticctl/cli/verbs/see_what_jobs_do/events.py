"""`events` and `history`: what happened to a job, and what its interruptions cost."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.text import plural
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.output import (
    emit,
    format_aligned,
    format_tabs,
    hint,
    on_terminal,
    print_data,
    print_table,
)
from elasticctl.cli.framework.place import Where, reach
from elasticctl.operations.target import Target
from elasticctl.terminal import console, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from elasticctl.api.codec import Manifest
    from elasticctl.api.observed.timeline import TimelineEntry
    from elasticctl.api.spec import ElasticJob

POLL_EVERY_S = 0.5

app = new_app()


@verb(app, "events")
def events(
    *,
    job: options.Job,
    output: Annotated[
        Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format.")
    ] = "table",
    watch: options.Watch = False,
    where: Where,
) -> int:
    """Show what happened to a job in order of time: groups, interruptions, scalings, checkpoints, pods.

    With -w, the exit code is 1 if the job fails.

    \b
      elasticctl events digits
      elasticctl events digits -w
    """
    target = reach(where)
    manifest = target.find(job)
    name = manifest["metadata"]["name"]
    if watch:
        if output != "table":
            raise UsageError(f"--watch shows tables and cannot be used with --output {output}")
        _watch(target, manifest)
        from elasticctl.cli.views.follow import code_of_followed

        return code_of_followed(target, manifest)
    found, _ = _read(target, manifest, lambda job: target.cluster.list_events(target.namespace, job.name), counted=True)
    if output == "table":
        from elasticctl.cli.views.history import events_table

        print_table(events_table(found))
        hint(f"Next: find out what they mean: elasticctl explain {name}")
        return 0
    from elasticctl.api.codec import to_rfc3339

    entries = [{"at": to_rfc3339(e.at), "what": e.what, "about": e.about, "details": e.details} for e in found]
    print_data("EventList", {"job": name, "events": entries}, output)
    return 0


def _read(
    target: Target, manifest: Manifest, events_of: Callable[[ElasticJob], list[Manifest]], *, counted: bool = False
) -> tuple[list[TimelineEntry], bool]:
    """The events up to now, and whether the job has ended; `counted`: with the number of equal warnings."""
    from elasticctl.api.observed.changes import changes_of
    from elasticctl.api.observed.timeline import fold_repeated, timeline
    from elasticctl.api.spec import ElasticJob

    found = target.reread(manifest)
    job = ElasticJob.from_manifest(found)
    said = events_of(job)
    entries = timeline(job, said, changes_of(found))
    return fold_repeated(entries, said, counted=counted), job.status.phase.terminal


def _watch(target: Target, manifest: Manifest) -> None:
    """Print each entry once, as it comes, until the job has ended."""
    from elasticctl.cli.views.history import events_table
    from elasticctl.operations.target import Poller

    name = manifest["metadata"]["name"]
    printed: set[TimelineEntry] = set()
    widths = [0, len("group formed"), len(f"{name}-worker-10")]  # so that later lines align with earlier ones
    with target.cluster.watch_events(target.namespace) as events_of:
        for found, ended in Poller(
            lambda: _read(target, manifest, events_of), POLL_EVERY_S, observer=target.observer
        ).each():
            new = [entry for entry in found if entry not in printed]
            table = events_table(new)
            if on_terminal():
                lines, widths = format_aligned(table, widths, console().width)
            else:
                lines = format_tabs(table).split("\n")
            for line in lines[1 if printed else 0 :] if new else []:
                emit(line)
            sys.stdout.flush()
            printed.update(new)
            if ended:
                return


@verb(app, "history")
def history(
    *,
    job: options.MaybeJob = None,
    output: Annotated[
        Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format.")
    ] = "table",
    where: Where,
) -> None:
    """Show a job's interruptions, scalings and changes in order of time, who made them, and their total cost.

    RECOVERED IN is the time from the event to the next step, REDONE the number of repeated steps. Goodput is the share
    of wall time in which training moved forward.

    Without JOB, show all changes that you have made from this machine, in any context.

    \b
      elasticctl history digits
      elasticctl history
    """
    if job is None:
        _print_audit(output)
        return
    from elasticctl.api.codec import to_json
    from elasticctl.api.observed.changes import changes_of
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.history import history_table, totals, totals_lines

    manifest = reach(where).find(job)
    found, changes = ElasticJob.from_manifest(manifest), changes_of(manifest)
    now = time.time()
    if output != "table":
        entries = {"interruptions": found.status.interruptions, "scalings": found.status.scalings, "changes": changes}
        kept = {name: to_json(items) for name, items in entries.items()}
        print_data("History", {"job": found.name, **kept, "totals": to_json(totals(found, now))}, output)
        return
    table = history_table(found, changes)
    if table.rows:
        print_table(table)
    for line in totals_lines(found, now):
        say(line)
    hint(f"Next: see what else happened: elasticctl events {found.name}")


def _print_audit(output: str) -> None:
    """Print the changes that this user has made from this machine."""
    from elasticctl.cluster.audit_log import audit_file, read_audit

    path = audit_file()
    found = read_audit(path)
    if output != "table":
        print_data("ChangeList", {"changes": found}, output)
        return
    if found:
        from elasticctl.cli.views.history import audit_table

        print_table(audit_table(found))
    say(f"{plural(len(found), 'change')} made from this machine, in {path}")
