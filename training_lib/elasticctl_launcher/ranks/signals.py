"""The signals that the ranks' Python has handled, to notice a SIGTERM that the launcher has not sent.

A script that handles SIGTERM may save and end with exit code 0, as if it had finished. `bootstrap.tell_signals` is the
other end. Ranks that are not Python, or were started without a spare, report nothing.
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
        """Prepare for the start of a rank: discard the signals of the previous one.

        If the pipe cannot be created, for example on a full disk, the rank reports nothing.
        """
        if local_rank in self._pipes:
            self.read(local_rank)
            return
        with suppress(OSError):
            path = self._folder / f"signals.{local_rank}"
            os.mkfifo(path, 0o600)
            self._pipes[local_rank] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, local_rank: int) -> frozenset[int]:
        """Return the numbers of the signals that the rank has handled since the last call."""
        found: set[int] = set()
        with suppress(KeyError, OSError):  # for example BlockingIOError: the pipe is empty
            while chunk := os.read(self._pipes[local_rank], READ_BYTES):
                found.update(chunk)
        return frozenset(found)

    def close(self) -> None:
        """Close the pipes."""
        while self._pipes:
            os.close(self._pipes.popitem()[1])
