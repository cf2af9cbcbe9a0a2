"""Which signals the ranks' Python has handled: a SIGTERM that their launcher has not sent came from outside.

A script that handles SIGTERM may well save and end with exit code 0, as if its work were done. `bootstrap.tell_signals`
is the other end. What is not Python, or has been started without a spare, tells nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

READ_BYTES = 1 << 16


class HandledSignals:
    """One pipe for each local rank, in `folder`, until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipes: dict[int, int] = {}

    def expect(self, local_rank: int) -> None:
        """A rank is about to start: forget what the one before has handled. It tells nothing if there is no room."""
        if local_rank in self._pipes:
            self.read(local_rank)
            return
        with suppress(OSError):
            path = self._folder / f"signals.{local_rank}"
            os.mkfifo(path, 0o600)
            self._pipes[local_rank] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, local_rank: int) -> frozenset[int]:
        """The numbers of the signals that it has handled since the last call."""
        found: set[int] = set()
        with suppress(KeyError, OSError):  # such as BlockingIOError: there is no more
            while chunk := os.read(self._pipes[local_rank], READ_BYTES):
                found.update(chunk)
        return frozenset(found)

    def close(self) -> None:
        """Listen no more."""
        while self._pipes:
            os.close(self._pipes.popitem()[1])
