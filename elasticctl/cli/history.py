"""`history`: what disturbed a job, and what that cost."""

from __future__ import annotations

import click

from elasticctl.cli import options, views
from elasticctl.cli.output import print_objects, print_table, say
from elasticctl.cli.target import Where, reach


@click.command()
@options.JOB
@options.OUTPUT
@options.target
def history(where: Where, job: str, form: str) -> None:
    """Show a job's interruptions and scalings in order of time: cause, seconds to recover, steps done again."""
    manifest = reach(where).find(job)
    if form in ("json", "yaml", "name"):
        print_objects([manifest], form, one=True)
        return
    table = views.history_table(manifest)
    if not table.rows:
        say(f"{manifest['metadata']['name']}: no interruptions, no scalings")
        return
    print_table(table)
