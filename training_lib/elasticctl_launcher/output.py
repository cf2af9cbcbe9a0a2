"""All that a worker prints goes through here: its ranks' lines and the launcher's own, each at once and whole.

Who `keep`s a copy gets each line before it is printed, in the order in which lines are printed, so that a stored log
has the same lines in the same order as the one that the cluster keeps.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

PATIENCE_S = 1.0
"""How long the launcher waits for its turn: where nobody reads what ranks print, it has to go on all the same."""

Keep = Callable[[float, int | None, str], None]
"""`keep(at, rank, text)`: `at` in seconds since the epoch, `rank` None for the launcher itself."""


class Output:
    """The worker's stdout and stderr; `keep` may be set once it is known who wants a copy."""

    def __init__(self) -> None:
        self.keep: Keep | None = None
        self._lock = threading.Lock()

    def rank_says(self, rank: int, text: str) -> None:
        """Print a line of a rank's."""
        self._print(sys.stdout, rank, text, -1)

    def say(self, text: str) -> None:
        """Print what the launcher has to say itself."""
        for line in text.splitlines():
            self._print(sys.stderr, None, f"[launcher] {line}", PATIENCE_S)

    def handler(self) -> logging.Handler:
        """A handler by which log records are said."""
        return _Handler(self)

    def _print(self, stream: TextIO, rank: int | None, text: str, patience_s: float) -> None:
        in_turn = self._lock.acquire(timeout=patience_s)
        try:
            if self.keep is not None:
                self.keep(time.time(), rank, text)
            with suppress(OSError):  # nobody reads it any more
                stream.write(f"{text}\n")
                stream.flush()
        finally:
            if in_turn:
                self._lock.release()


class _Handler(logging.Handler):
    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Say a record; one that cannot be put into words is logging's to complain about."""
        try:
            text = self.format(record)
        except Exception:  # noqa: BLE001 - as every handler does: a wrong record is no reason to end
            self.handleError(record)
            return
        self._output.say(text)
