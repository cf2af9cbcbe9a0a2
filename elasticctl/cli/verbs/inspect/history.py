"""`history`: what disturbed a job, and what that cost."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import hint, print_data, print_table, say
from elasticctl.cli.framework.target import reach

app = new_app()


@verb(app, "history")
def history(
    *,
    job: options.Job,
    output: Annotated[Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="How to print.")] = "table",
    where: Where,
) -> None:
    """Show a job's interruptions and scalings in order of time, and what they cost in all."""
    from elasticctl.api.codec import to_json
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cli.views.job import history_table
    from elasticctl.cli.views.totals import totals, totals_lines

    found = ElasticJob.from_manifest(reach(where).find(job))
    now = time.time()
    if output != "table":
        entries = {"interruptions": found.status.interruptions, "scalings": found.status.scalings}
        kept = {name: to_json(items) for name, items in entries.items()}
        print_data("History", {"job": found.name, **kept, "totals": to_json(totals(found, now))}, output)
        return
    table = history_table(found)
    if table.rows:
        print_table(table)
    for line in totals_lines(found, now):
        say(line)
    hint(f"what else happened: elasticctl events {found.name}")
