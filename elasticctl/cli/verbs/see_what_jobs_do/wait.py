"""`wait`: until jobs end, or train."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Labels
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cli.views.follow import await_all
from elasticctl.operations.selection import chosen_names

app = new_app()


@verb(app, "wait")
def wait(
    *,
    jobs: options.Jobs = (),
    label: Labels = (),
    until: Annotated[Literal["done", "running"], typer.Option("--for", help="What to wait for.")] = "done",
    timeout: options.Timeout = None,
    where: Where,
) -> int:
    """Wait until jobs end.

    The exit code says how they ended: 0 succeeded, 1 failed, 3 not found or unreachable, 4 cancelled, 124 timed out.
    With several jobs, it is the first of 1, 3, 124 and 4 that applies to any of them.

    With --for running, it returns once enough workers run; the first step follows a few seconds later.

    \b
      elasticctl wait train --timeout 2h
      elasticctl wait --label sweep=lr
    """
    target = reach(where)
    found = [target.find(name) for name in chosen_names(target, jobs, label)]
    return await_all(target, found, timeout_s=timeout, running=until == "running")
