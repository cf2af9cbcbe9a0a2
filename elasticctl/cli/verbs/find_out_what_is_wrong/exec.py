"""`exec` and `shell`: commands in a worker that runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import WHICH_WORKER
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cluster import worker_access_of
from elasticctl.operations.target import Target
from elasticctl.operations.workers import WhichWorker, find_worker
from elasticctl.terminal import say

if TYPE_CHECKING:
    from elasticctl.cluster.base import Manifest

app = new_app()

SHELL = ("sh", "-c", "if command -v bash >/dev/null; then exec bash; else exec sh; fi")


@verb(app, "exec")
def exec_in_worker(
    *,
    job: options.Job,
    command: Annotated[tuple[str, ...], typer.Argument(metavar="-- COMMAND...")],
    which: Annotated[WhichWorker, WHICH_WORKER],
    stdin: Annotated[bool, typer.Option("-i", "--stdin", help="Pass stdin to the command.")] = False,
    tty: Annotated[bool, typer.Option("-t", "--tty", help="Run it on this terminal; implies -i.")] = False,
    where: Where,
) -> int:
    """Run a command in a worker, with its environment and in its working directory.

    The exit code is the command's own, or 127 if there is no such program. What you start ends with the worker at the
    latest.

    \b
      elasticctl exec train -- nvidia-smi
      elasticctl exec train --rank 3 -t -- python
    """
    target = reach(where)
    pod = find_worker(target, job, which)
    if tty and not on_a_terminal():
        say("stdin and stdout are not both a terminal: the command runs without one")
        stdin, tty = True, False
    return run_inside(target, pod, command, stdin=stdin or tty, tty=tty)


@verb(app, "shell")
def shell(*, job: options.Job, which: Annotated[WhichWorker, WHICH_WORKER], where: Where) -> int:
    """Open a shell in a worker; `exit` leaves it.

    \b
      elasticctl shell train --worker 2
    """
    target = reach(where)
    pod = find_worker(target, job, which)
    tty = on_a_terminal()
    if tty:
        say(f"a shell in {pod['metadata']['name']}; `exit` leaves it")
    return run_inside(target, pod, SHELL, stdin=True, tty=tty)


def on_a_terminal() -> bool:
    """True if both stdin and stdout are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def run_inside(target: Target, pod: Manifest, argv: Sequence[str], *, stdin: bool, tty: bool) -> int:
    """Run a command in a worker with this process's streams; returns its exit code."""
    from elasticctl.cluster.worker_access import Streams

    sys.stdout.flush()
    return worker_access_of(target.context).run(pod, argv, Streams(stdin=0 if stdin else None, terminal=tty))
