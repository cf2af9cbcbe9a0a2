"""What the command line and the Python API print on stderr: messages, and the progress of transfers.

Commands in messages name the context and the namespace that the caller has named.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, TextIO

from elasticctl.api.text import visible
from elasticctl.operations.observer import Observer

if TYPE_CHECKING:
    from rich.console import Console

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
    """Have commands in messages name this context and namespace, as the caller did; "" if it named none."""
    _flags.set((("--context", context), ("-n", namespace)))


def name_no_place() -> None:
    """Have commands in messages name no place; a process may run several command lines."""
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


def say(line: str) -> None:
    """Print a message on stderr; its commands name the place that the caller has named."""
    sys.stderr.write(encodable(visible(with_place(line)), sys.stderr) + "\n")
    sys.stderr.flush()


def encodable(text: str, stream: TextIO) -> str:
    """The text with characters escaped that the stream's encoding lacks."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def console(stream: TextIO | None = None, width: int | None = None) -> Console:
    """A console on stdout that respects NO_COLOR and escapes characters that its encoding lacks."""
    import io

    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return _safe_console()(file=stream, width=width, highlight=False, markup=False, soft_wrap=False)


@cache
def _safe_console() -> type[Console]:
    """rich's console for untrusted text; rich takes long to import, and only terminals need it."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class SafeConsole(Console):
        """Shows control characters instead of sending them to the terminal; rich lets most of them pass."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control or segment.text.isprintable():
                    yield segment
                else:
                    yield Segment(visible(segment.text), segment.style)

    return SafeConsole


class Terminal(Observer):
    """Prints what operations report on stderr."""

    def report(self, line: str) -> None:
        say(line)

    @contextmanager
    def transfer(self, doing: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
        """Show a progress bar if stderr is a terminal."""
        if not sys.stderr.isatty():
            yield lambda count: None
            return
        import threading

        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, TimeRemainingColumn(), console=console(sys.stderr), transient=True) as progress:
            task, lock = progress.add_task(doing, total=total_bytes), threading.Lock()

            def advance(count: int) -> None:
                with lock:
                    progress.advance(task, count)

            yield advance
