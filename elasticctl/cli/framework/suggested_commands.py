"""Suggested commands name the context and namespace of the command line that prints them."""

from __future__ import annotations

import re
import shlex
from contextvars import ContextVar

_OF_A_NAMESPACE = (
    "cancel", "checkpoints [a-z]+", "compare", "cp", "dashboard", "debug", "delete", "describe", "events", "exec",
    "explain", "history", "list", "logs", "move", "port-forward", "preempt", "prune", "rerun", "resume", "scale",
    "secret [a-z]+", "shell", "simulate", "stacks", "status", "submit", "suspend", "sweep", "top", "wait",
)  # fmt: skip
"""Verbs that take a context and a namespace."""
_OF_A_CONTEXT = ("doctor", "install", "quota [a-z]+")
"""Verbs that take a context; their namespace, if any, is not that of jobs."""
_JOB = r"(?: [a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?=$|[`,;\n]| {2}))?"
_COMMAND = re.compile(
    rf"elasticctl (?:{'|'.join(_OF_A_NAMESPACE)}|(?P<context_only>{'|'.join(_OF_A_CONTEXT)}))(?![-\w]){_JOB}"
)
_END = re.compile(r"[`,;\n]| {2}")

_flags: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("flags", default=())


def name_place(context: str, namespace: str) -> None:
    """Note the context and namespace that the command line names; "" if it names none."""
    _flags.set((("--context", context), ("-n", namespace)))


def forget_place() -> None:
    """A command line begins, in a process that may have run another."""
    _flags.set(())


def with_place(text: str) -> str:
    """Add the place's flags to each command in the text, unless it has them already.

    They follow the name of the job if the command ends with it, or else the verb.
    """
    if not _flags.get() or "elasticctl " not in text:
        return text
    return _COMMAND.sub(lambda found: found[0] + _missing(found, text), text)


def _missing(found: re.Match[str], text: str) -> str:
    """The flags that a command lacks."""
    words = _END.split(text[found.start() :], maxsplit=1)[0].split()
    flags = _flags.get()[:1] if found["context_only"] else _flags.get()
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in flags if value and flag not in words)
