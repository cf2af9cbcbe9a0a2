"""`logs`: the output of the workers of a job, each line after the name of its worker; `wait`: until jobs end."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.log_lines import print_log_lines
from elasticctl.cli.framework.options import Labels, described, flag
from elasticctl.cli.framework.place import Where, reach
from elasticctl.operations.logs import LogFilter, in_turn, merged, read_logs
from elasticctl.operations.selection import chosen_names

_LINES: Mapping[str, Any] = {
    "follow": flag("Follow the output until the job ends, including that of new workers.", "-f", "--follow"),
    "worker": options.worker("Only this worker: its name or number."),
    "rank": described("Only the output of rank N, on the worker that runs it.", "N"),
    "tail": described("Only the last N lines of each worker.", "N"),
    "since": described("Only lines that are at most this old: 90s, 10m, 2h.", "TIME"),
    "grep": typer.Option("--grep", metavar="REGEX", help="Only lines that match this regular expression."),
    "previous": flag("The output of workers that have been replaced.", "--previous"),
    "everything": flag("The output of all workers, replaced ones included.", "--all"),
}

app = new_app()


@verb(app, "logs")
def logs(
    *,
    jobs: options.Jobs = (),
    label: Labels = (),
    lines: Annotated[LogFilter, _LINES],
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Put the time, in UTC, before each line.")] = False,
    where: Where,
) -> int:
    """Print the output of a job's workers, including those that are gone.

    With -f, the exit code is 1 if the job fails. With several jobs, each line also begins with its job's name.

    \b
      elasticctl logs -f train
      elasticctl logs train --since 10m --grep 'loss|nan'
      elasticctl logs train --all --rank 0
      elasticctl logs -f --label sweep=lr
    """
    target = reach(where)
    found = [target.find(name) for name in chosen_names(target, jobs, label)]
    if len(found) == 1:
        (manifest,) = found
        print_log_lines(read_logs(target, manifest, lines), manifest["metadata"]["name"], timestamps=timestamps)
    else:
        sources = [partial(read_logs, reach(where), manifest, lines) for manifest in found]
        print_log_lines(merged(sources) if lines.follow else in_turn(sources), "", timestamps=timestamps)
    if not lines.follow:
        return 0
    from elasticctl.cli.views.follow import code_of_followed

    return max(code_of_followed(target, manifest) for manifest in found)


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
    from elasticctl.cli.views.follow import await_all

    target = reach(where)
    found = [target.find(name) for name in chosen_names(target, jobs, label)]
    return await_all(target, found, timeout_s=timeout, running=until == "running")
