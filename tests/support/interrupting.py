"""An exception out of a signal's handler, as SIGTERM raises in a launcher that waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
