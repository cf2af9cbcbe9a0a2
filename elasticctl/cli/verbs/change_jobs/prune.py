"""`prune`: delete jobs that ended long ago, and their stored state where it is on this machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import typer

from elasticctl.api.errors import UsageError
from elasticctl.api.text import plural, span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import described, phase_option
from elasticctl.cli.framework.output import Table, print_data, print_table
from elasticctl.cli.framework.place import Where, reach
from elasticctl.operations import prune as pruning
from elasticctl.operations.prune import PrunedJob, PruneFilter
from elasticctl.terminal import say

_WHICH: Mapping[str, Any] = {
    "older_than": described("Jobs that ended longer ago than this: 12h, 7d.", "TIME"),
    "phase": phase_option("Only jobs that ended in this phase."),
}

app = new_app()


@verb(app, "prune")
def prune(
    *,
    which: Annotated[PruneFilter, _WHICH],
    state: Annotated[
        bool,
        typer.Option("--state", help="Also delete their checkpoints and workspaces in the local cluster's own folder."),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    output: Annotated[
        Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="Output format of the list.")
    ] = "table",
    yes: options.Yes = False,
    where: Where,
) -> None:
    """Delete jobs that have ended, with their logs; lists them and asks for confirmation first.

    \b
      elasticctl prune --older-than 7d --dry-run
      elasticctl prune --older-than 1d --phase failed --state -y
    """
    if which.older_than is None:
        raise UsageError("no age given. FIX: add --older-than 7d, for example")
    target, now = reach(where), time.time()
    chosen = pruning.jobs_to_prune(target, which, now, state=state)
    if output != "table":
        print_data("Pruned", {"dryRun": dry_run, "jobs": [_as_data(item) for item in chosen]}, output)
    elif chosen:
        print_table(_table(chosen, now))
    if not chosen:
        say(f"no job in namespace {target.namespace} ended longer than {span(which.older_than)} ago")
    elif dry_run:
        say(f"{plural(len(chosen), 'job')} would be deleted (dry run: nothing changes)")
    elif yes or _confirm(len(chosen)):
        pruning.prune(target, chosen, now, state=state)
    else:
        say("nothing deleted")


def _table(chosen: Sequence[PrunedJob], now: float) -> Table:
    rows = [
        (item.job.name, item.job.status.phase.value, f"{span(now - item.ended_at)} ago", item.state, item.storage)
        for item in chosen
    ]
    return Table(("NAME", "PHASE", "ENDED", "CHECKPOINTS", "STORAGE"), rows, spare=("STORAGE",))


def _as_data(item: PrunedJob) -> dict[str, str]:
    from elasticctl.api.codec import to_rfc3339

    return {
        "name": item.job.name,
        "phase": item.job.status.phase.value,
        "endedAt": to_rfc3339(item.ended_at),
        "storage": item.storage,
        "state": item.state,
    }


def _confirm(count: int) -> bool:
    what = f"{plural(count, 'job')} and their logs" if count > 1 else "this job and its logs"
    if not sys.stdin.isatty():
        raise UsageError(f"this deletes {what}. FIX: add --yes to confirm")
    return typer.confirm(f"Delete {what}?", err=True)
