"""`wait`: until a job has ended, as an exit code."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from elasticctl.cli import options
from elasticctl.cli.command import new_app, verb
from elasticctl.cli.options import Where
from elasticctl.cli.target import reach

app = new_app()


@verb(app, "wait")
def wait(
    *,
    job: options.Job,
    until: Annotated[Literal["done", "running"], typer.Option("--for", help="What to wait for.")] = "done",
    timeout: options.Timeout = None,
    where: Where,
) -> int:
    """Wait until a job has ended.

    The exit code tells how: 0 succeeded, 1 failed, 3 not found or unreachable, 4 cancelled, 124 timed out.
    """
    from elasticctl.cli.outcome import await_end

    target = reach(where)
    name = target.find(job)["metadata"]["name"]
    return await_end(target, name, timeout_s=timeout, running=until == "running")
