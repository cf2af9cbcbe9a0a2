"""`wait`: until a job has ended, as an exit code."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.target import reach

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
    from elasticctl.cli.submit.follow import await_end

    target = reach(where)
    name = target.find(job)["metadata"]["name"]
    return await_end(target, name, timeout_s=timeout, running=until == "running")
