"""Follows a job to its end: prints its logs, reports how it ended, and returns the exit code."""

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
from elasticctl.cli.framework.output import hint, say
from elasticctl.cli.framework.target import PATIENCE_S, Poller, Target
from elasticctl.cluster.base import LogQuery, Manifest

SUCCEEDED, FAILED, CANCELLED, TIMED_OUT = 0, 1, 4, 124
POLL_EVERY_S = 0.25


def await_end(target: Target, followed: Manifest, *, timeout_s: float | None = None, running: bool = False) -> int:
    """Wait until a job ends (`running`: or trains), report how, and return the exit code.

    Raises NotFoundError if the job is deleted meanwhile, even if another one has its name by now, and UnreachableError
    if the cluster does not answer for a long time.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    answers = Poller(lambda: target.reread(followed), POLL_EVERY_S, deadline, PATIENCE_S, say)
    for manifest in answers.each():
        job = ElasticJob.from_manifest(manifest)
        if job.status.phase.terminal:
            return _report(job)
        if running and job.status.phase is Phase.RUNNING:
            number = count_workers(job.status).running
            say(f"{job.name} is running with {number} of {job.desired} workers")
            return SUCCEEDED
        if time.monotonic() >= deadline:
            goes_on = "; it keeps running" if job.status.phase is Phase.RUNNING else ""
            say(f"{job.name} is still {job.status.phase.value}, and the time is up{goes_on}")
            return TIMED_OUT
    raise AssertionError("unreachable")


def await_all(
    target: Target, followed: Sequence[Manifest], *, timeout_s: float | None = None, running: bool = False
) -> int:
    """`await_end` for several jobs at once; returns the worst exit code.

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
    target.reread(followed)  # another job may have the name by now
    target.cluster.patch_job(target.namespace, name, {"spec": {"cancel": True}})
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
    except typer.Abort:  # a second Ctrl-C, or nobody there any more
        say("")
        return "detach"
