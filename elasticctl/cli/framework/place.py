"""Commands that are printed for the reader to type: they name the place that the command line has named."""

from __future__ import annotations

import re
import shlex
from contextvars import ContextVar

_PLACED = (
    "cancel", "checkpoints [a-z]+", "delete", "describe", "events", "explain", "history", "list", "logs", "move",
    "preempt", "rerun", "resume", "scale", "status", "submit", "suspend", "wait",
)  # fmt: skip
"""Verbs that take a namespace and a context."""
_JOB = r"(?: [a-z0-9](?:[-a-z0-9]*[a-z0-9])?(?=$|[`,;\n]| {2}))?"
_COMMAND = re.compile(rf"elasticctl (?:{'|'.join(_PLACED)})(?![-\w]){_JOB}")
_END = re.compile(r"[`,;\n]| {2}")

_flags: ContextVar[tuple[tuple[str, str], ...]] = ContextVar("flags", default=())


def name_place(context: str, namespace: str) -> None:
    """Note what the command line says about the place of the jobs; "" where it says nothing."""
    _flags.set(tuple((flag, value) for flag, value in (("--context", context), ("-n", namespace)) if value))


def with_place(text: str) -> str:
    """The text, in which each command names the place; a flag that a command gives itself is left alone.

    They follow the name of the job where a command ends with it, else the verb's.
    """
    if not _flags.get() or "elasticctl " not in text:
        return text
    return _COMMAND.sub(lambda found: found[0] + _missing(_END.split(text[found.start() :], maxsplit=1)[0]), text)


def _missing(command: str) -> str:
    """The flags that a command lacks."""
    words = command.split()
    return "".join(f" {flag} {shlex.quote(value)}" for flag, value in _flags.get() if flag not in words)
