"""Signals that a process sends to itself at a moment that a test chooses.

`interrupt_soon` raises an exception out of the handler, as SIGTERM does in a launcher that waits. `die_at_change` kills
the process.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Interrupted(Exception):
    """The signal has arrived."""


@contextmanager
def interrupt_soon(after_s: float) -> Iterator[None]:
    """Raise Interrupted in the main thread, `after_s` seconds from now, by SIGUSR1."""

    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(after_s, os.kill, [os.getpid(), signal.SIGUSR1])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def die_at_change(at: int) -> None:
    """SIGKILL this process just before its `at`-th change of the file system."""
    changes = 0

    def deadly(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal changes
            changes += 1
            if changes == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return wrapped

    for name in ("fsync", "link", "replace", "unlink", "rmdir", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))
