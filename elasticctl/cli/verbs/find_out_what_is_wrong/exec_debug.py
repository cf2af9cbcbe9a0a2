"""`exec` and `shell`: commands in a worker that runs; `debug`: a shell in a new worker like those of a failed job."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.text import span
from elasticctl.cli.framework import options
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import WHICH_WORKER
from elasticctl.cli.framework.place import Where, reach
from elasticctl.cluster import worker_access_of
from elasticctl.operations.option_values import duration
from elasticctl.operations.target import Target
from elasticctl.operations.workers import WhichWorker, find_worker
from elasticctl.terminal import say

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob
    from elasticctl.cluster.base import Manifest

app = new_app()

HOUR_S = 3600
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


@verb(app, "debug")
def debug(
    *,
    job: options.Job,
    command: Annotated[tuple[str, ...], typer.Argument(metavar="-- COMMAND...")] = (),
    limit: Annotated[
        int,
        typer.Option(
            "--for",
            parser=duration,
            metavar="TIME",
            show_default=False,
            help="End the worker after this time at the latest; 1h by default.",
        ),
    ] = HOUR_S,
    where: Where,
) -> int:
    """Open a shell in a new worker like those of a job that failed.

    This creates a job with one worker that has the same image, code, environment, secrets, volumes and kind of
    machine. The worker runs nothing by itself and has no checkpoints to write to; the original job is not affected.
    It ends with the shell, or when its time is over. Until then, it costs what a worker of the job costs.

    \b
      elasticctl debug train
      elasticctl debug train --for 10m -- python -m pip list
    """
    from elasticctl.api.spec import ElasticJob
    from elasticctl.operations.debug import await_worker, create_debug_job, end_debug_job

    target = reach(where)
    old = target.find(job)
    made = create_debug_job(target, old, limit)
    try:
        _say_plan(ElasticJob.from_manifest(old), ElasticJob.from_manifest(made), limit)
        pod = await_worker(target, made)
        code = run_inside(target, pod, command or SHELL, stdin=True, tty=on_a_terminal())
        status = ElasticJob.from_manifest(target.reread(made)).status
        if status.phase.terminal:
            say(f"{made['metadata']['name']} has ended: {status.message}")
        return code
    finally:
        end_debug_job(target, made)


def _say_plan(old: ElasticJob, new: ElasticJob, limit_s: float) -> None:
    from elasticctl.api.observed.cost import rate_of
    from elasticctl.api.podtemplate import hardware
    from elasticctl.diagnosis.not_training import describe_failure
    from elasticctl.operations.prices import plan_line, with_live_spot

    failure = old.status.newest_failure
    if failure is not None:
        say(f"{old.name}: {describe_failure(failure, old.name)}")
    say(f"{new.name}: a worker like those of {old.name}, for {span(limit_s)} at most; it ends with its shell")
    one = with_live_spot(rate_of(new))
    if one is not None:
        say(plan_line(one, 1))
    words = hardware(old).command
    say(f"the job's command: {shlex.join(words[words.index('--') + 1 :] if '--' in words else words)}")
