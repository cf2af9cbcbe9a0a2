"""Follows a job to its end: prints its logs and how it ended, and returns the exit code."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Literal

import typer

from elasticctl.api.errors import NotFoundError
from elasticctl.api.observed.workers import count_workers
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Phase
from elasticctl.api.text import span
from elasticctl.cli.framework.log_lines import print_log_lines
from elasticctl.cli.framework.output import hint
from elasticctl.cluster.base import LogQuery, Manifest
from elasticctl.operations import lifecycle
from elasticctl.operations.target import Target
from elasticctl.terminal import say

SUCCEEDED, FAILED, CANCELLED, TIMED_OUT = 0, 1, 4, 124


def await_end(target: Target, followed: Manifest, *, timeout_s: float | None = None, running: bool = False) -> int:
    """Wait until a job ends (`running`: or trains), print how, and return the exit code; raises as `wait` does."""
    job = lifecycle.wait(target, followed, timeout_s=timeout_s, running=running)
    if job.status.phase.terminal:
        return _report(job)
    if running and job.status.phase is Phase.RUNNING:
        number = count_workers(job.status).running
        say(f"{job.name} is running with {number} of {job.desired} workers")
        return SUCCEEDED
    goes_on = "; it keeps running" if job.status.phase is Phase.RUNNING else ""
    say(f"{job.name} is still {job.status.phase.value}, and the time is up{goes_on}")
    return TIMED_OUT


def await_all(
    target: Target, followed: Sequence[Manifest], *, timeout_s: float | None = None, running: bool = False
) -> int:
    """`await_end` for several jobs; returns the worst exit code.

    A job that is deleted meanwhile is reported, and the others are still waited for.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    codes = []
    for manifest in followed:
        left_s = None if timeout_s is None else max(0.0, deadline - time.monotonic())
        try:
            codes.append(await_end(target, manifest, timeout_s=left_s, running=running))
        except NotFoundError as e:
            if len(followed) == 1:
                raise
            say(f"error: {e}")
            codes.append(e.exit_code)
    return next((code for code in (FAILED, NotFoundError.exit_code, TIMED_OUT, CANCELLED) if code in codes), SUCCEEDED)


def code_of_followed(target: Target, followed: Manifest) -> int:
    """The exit code of a verb that has shown a job to its end: 1 if it failed, else 0, even if it is gone."""
    try:
        job = ElasticJob.from_manifest(target.reread(followed))
    except NotFoundError:
        return SUCCEEDED
    return FAILED if job.status.phase is Phase.FAILED else SUCCEEDED


def _report(job: ElasticJob) -> int:
    """Print how a job ended; returns the exit code."""
    status = job.status
    took = ""
    if status.start_time is not None and status.completion_time is not None:
        took = f" after {span(status.completion_time - status.start_time)}"
    if status.phase is Phase.SUCCEEDED:
        say(f"{job.name} succeeded{took}")
        return SUCCEEDED
    if status.phase is Phase.CANCELLED:
        say(f"{job.name} was cancelled{took}")
        return CANCELLED
    why = ": ".join(part for part in (status.reason, status.message) if part)
    say(f"{job.name} failed{took}{f': {why}' if why else ''}")
    from elasticctl.cli.views.history import failure_lines  # not for --help

    for line in failure_lines(status):
        say(line)
    hint(f"Next: find out why: elasticctl explain {job.name}")
    return FAILED


INTERRUPTED = 130
_ANSWERS: dict[str, Literal["detach", "cancel"]] = {"": "detach", "d": "detach", "detach": "detach"}
_ANSWERS |= {"c": "cancel", "cancel": "cancel"}


def attach(target: Target, followed: Manifest) -> int:
    """Print a job's logs as they come, then how it ended; returns the exit code of `wait`.

    Ctrl-C asks on a terminal whether to detach or to cancel the job. Without an answer, or on a second Ctrl-C, the job
    keeps running, and the code is 130.
    """
    name = followed["metadata"]["name"]
    try:
        print_log_lines(target.cluster.logs(target.namespace, name, LogQuery(follow=True)), name)
        return await_end(target, followed)
    except KeyboardInterrupt:
        if _choice(name) == "detach":
            say(f"detached: {name} keeps running. Next: elasticctl logs -f {name}, or elasticctl cancel {name}")
            return INTERRUPTED
    lifecycle.cancel(target, followed)
    return await_end(target, followed)


def _choice(name: str) -> Literal["detach", "cancel"]:
    say("")  # the terminal has printed ^C
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "detach"
    question = f"Detach and let {name} keep running, or cancel it? [D]etach, [c]ancel"
    try:
        while True:
            typed: str = typer.prompt(question, default="", show_default=False, err=True)
            if typed.strip().lower() in _ANSWERS:
                return _ANSWERS[typed.strip().lower()]
    except typer.Abort:  # a second Ctrl-C, or the end of stdin
        say("")
        return "detach"
