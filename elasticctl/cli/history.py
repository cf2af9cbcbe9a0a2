"""`history`: what disturbed a job, and what that cost."""

from __future__ import annotations

from elasticctl.cli import options
from elasticctl.cli.command import new_app, verb
from elasticctl.cli.options import Where
from elasticctl.cli.output import print_objects, print_table, say
from elasticctl.cli.target import reach

app = new_app()


@verb(app, "history")
def history(*, job: options.Job, output: options.Output = "table", where: Where) -> None:
    """Show a job's interruptions and scalings in order of time: cause, seconds to recover, steps done again."""
    manifest = reach(where).find(job)
    if output in ("json", "yaml", "name"):
        print_objects([manifest], output, one=True)
        return
    from elasticctl.cli import views

    table = views.history_table(manifest)
    if not table.rows:
        say(f"{manifest['metadata']['name']}: no interruptions, no scalings")
        return
    print_table(table)
