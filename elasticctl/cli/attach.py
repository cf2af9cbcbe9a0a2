"""Follow a job's logs until it has ended; Ctrl-C asks whether the job is to go on."""

from __future__ import annotations

import sys
from typing import Literal

import typer

from elasticctl.cli.logs import print_lines
from elasticctl.cli.outcome import await_end
from elasticctl.cli.output import say
from elasticctl.cli.target import Target
from elasticctl.cluster.base import LogQuery

INTERRUPTED = 130
_ANSWERS: dict[str, Literal["detach", "cancel"]] = {"": "detach", "d": "detach", "detach": "detach"}
_ANSWERS |= {"c": "cancel", "cancel": "cancel"}


def attach(target: Target, name: str) -> int:
    """Print a job's logs as they come, then how it ended; returns the exit code of `wait`.

    Ctrl-C asks, where there is somebody to ask, whether to detach or to cancel the job. Without an answer, and on a
    second Ctrl-C, the job goes on: 130.
    """
    try:
        print_lines(target.cluster.logs(target.namespace, name, LogQuery(follow=True)), name)
        return await_end(target, name)
    except KeyboardInterrupt:
        if _choice(name) == "detach":
            say(f"detached: {name} goes on. Come back: elasticctl logs -f {name}   Stop it: elasticctl cancel {name}")
            return INTERRUPTED
    target.cluster.patch_job(target.namespace, name, {"spec": {"cancel": True}})
    return await_end(target, name)


def _choice(name: str) -> Literal["detach", "cancel"]:
    say("")  # the terminal has printed ^C
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return "detach"
    question = f"Detach and let {name} go on, or cancel it? [D]etach, [c]ancel"
    try:
        while True:
            typed: str = typer.prompt(question, default="", show_default=False, err=True)
            if typed.strip().lower() in _ANSWERS:
                return _ANSWERS[typed.strip().lower()]
    except typer.Abort:  # a second Ctrl-C, or nobody there any more
        say("")
        return "detach"
