"""`history`: what disturbed a job, and what that cost."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from elasticctl.cli import options
from elasticctl.cli.command import new_app, verb
from elasticctl.cli.options import Where
from elasticctl.cli.output import hint, print_data, print_table, say
from elasticctl.cli.target import reach

app = new_app()


@verb(app, "history")
def history(
    *,
    job: options.Job,
    output: Annotated[Literal["table", "json", "yaml"], typer.Option("-o", "--output", help="How to print.")] = "table",
    where: Where,
) -> None:
    """Show a job's interruptions and scalings in order of time, and what they cost in all."""
    from elasticctl.cli.totals import totals, totals_lines
    from elasticctl.cli.views import history_table
    from elasticctl.codec import to_json
    from elasticctl.spec import ElasticJob

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
