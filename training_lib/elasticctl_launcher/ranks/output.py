"""What one rank prints, read line by line.

The pipe outlives the rank where a process that the rank started holds its other side. Nobody waits for that: once the
rank has ended, what is in the pipe is read, the rest is read for as long as the generation lasts, and then the pipe is
closed.
"""

from __future__ import annotations

import codecs
import fcntl
import os
import select
import sys
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import IO

MAX_LINE_BYTES = 16_000
"""Longer lines are broken up here: container runtimes and our own shim would do so at 16 KiB, unseen by us."""
READ_BYTES = 1 << 16
PRINT_S = 1.0
"""How long the end of a rank waits for its last lines to be printed, which somebody may not be reading."""


class RankOutput:
    """Passes on each line of `pipe` to `on_line`, from a thread of its own, until the pipe ends or `close`."""

    def __init__(self, pipe: IO[bytes], on_line: Callable[[str], None]) -> None:
        self._pipe, self._on_line = pipe, on_line
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = b""
        self._asked, self._ask = os.pipe()
        self._drained = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        os.set_blocking(pipe.fileno(), False)
        threading.Thread(target=self._run, name="rank-output", daemon=True).start()

    def drain(self) -> None:
        """The rank has ended: wait until its last lines have been passed on."""
        self._wake()
        self._drained.wait(PRINT_S)

    def close(self) -> None:
        """Pass on what is in the pipe, and read no more; returns at once."""
        self._closing = True
        self._wake()

    def _wake(self) -> None:
        with self._lock, suppress(OSError):  # the thread has ended
            if self._ask >= 0:
                os.write(self._ask, b".")

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._pipe.fileno(), self._asked):
            poll.register(descriptor, select.POLLIN)
        try:
            while True:
                ready = [descriptor for descriptor, _ in poll.poll()]
                if self._asked in ready:
                    os.read(self._asked, READ_BYTES)
                    ended = self._read(self._held_bytes())
                    self._add(b"", final=True)
                    self._drained.set()
                    if self._closing:
                        return
                else:
                    ended = self._read(READ_BYTES)
                if ended:
                    return
        finally:
            self._add(b"", final=True)
            self._drained.set()
            with self._lock:
                os.close(self._asked)
                os.close(self._ask)
                self._ask = -1
            self._pipe.close()

    def _held_bytes(self) -> int:
        """What the pipe holds now, with everything that the rank wrote before it ended; others may go on writing."""
        held = bytearray(4)
        fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, held)
        return int.from_bytes(held, sys.byteorder) + 1  # one more, to see the end of the pipe

    def _read(self, limit_bytes: int) -> bool:
        """Pass on what there is, `limit_bytes` at most; True at the end of the pipe."""
        while limit_bytes > 0:
            try:
                chunk = os.read(self._pipe.fileno(), READ_BYTES)
            except BlockingIOError:
                return False
            if not chunk:
                return True
            self._add(chunk)
            limit_bytes -= len(chunk)
        return False

    def _add(self, chunk: bytes, *, final: bool = False) -> None:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._pass_on(line, ends=True)
        while len(self._rest) > MAX_LINE_BYTES:
            piece, self._rest = self._rest[:MAX_LINE_BYTES], self._rest[MAX_LINE_BYTES:]
            self._pass_on(piece, ends=False)
        if final and self._rest:
            rest, self._rest = self._rest, b""
            self._pass_on(rest, ends=True)

    def _pass_on(self, line: bytes, *, ends: bool) -> None:
        """A character in which a long line is broken is passed on whole, with the next piece."""
        while len(line) > MAX_LINE_BYTES:
            piece, line = line[:MAX_LINE_BYTES], line[MAX_LINE_BYTES:]
            self._on_line(self._decoder.decode(piece))
        self._on_line(self._decoder.decode(line, final=ends))
