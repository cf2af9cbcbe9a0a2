"""How a job ended: the line to say and the exit code."""

from __future__ import annotations

import math
import time

from elasticctl.cli.asking import PATIENCE_S, Answers
from elasticctl.cli.output import hint, say
from elasticctl.cli.target import Target
from elasticctl.spec import ElasticJob
from elasticctl.status import Phase
from elasticctl.wording import span

SUCCEEDED, FAILED, CANCELLED, TIMED_OUT = 0, 1, 4, 124
POLL_EVERY_S = 0.25


def await_end(target: Target, name: str, *, timeout_s: float | None = None, running: bool = False) -> int:
    """Wait until a job has ended (`running`: or trains), say how, and return the exit code.

    Raises NotFoundError when the job is deleted meanwhile, UnreachableError when nobody has answered for long.
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    answers = Answers(lambda: target.cluster.get_job(target.namespace, name), POLL_EVERY_S, deadline, PATIENCE_S, say)
    for manifest in answers.each():
        job = ElasticJob.from_manifest(manifest)
        if job.status.phase.terminal:
            return _report(job)
        if running and job.status.phase is Phase.RUNNING:
            say(f"{name} is running with {job.status.active} of {job.desired} workers")
            return SUCCEEDED
        if time.monotonic() >= deadline:
            say(f"{name} is still {job.status.phase.value} after {timeout_s:g} s; it goes on")
            return TIMED_OUT
    raise AssertionError("unreachable")


def _report(job: ElasticJob) -> int:
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
    from elasticctl.cli.views import failure_lines  # not for --help

    for line in failure_lines(status):
        say(line)
    hint(f"what to do about it: elasticctl explain {job.name}")
    return FAILED
