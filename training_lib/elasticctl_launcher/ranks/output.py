"""What one rank prints, read line by line.

The pipe outlives the rank where a process that the rank started holds its other side. Nobody waits for that: once the
rank has ended, what is in the pipe is read, the rest is read for as long as the generation lasts, and then the pipe is
closed.
"""

from __future__ import annotations

import codecs
import fcntl
import math
import os
import select
import sys
import termios
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO

from elasticctl_launcher.ranks.last_words import LastWords

MAX_LINE_BYTES = 16_000
"""Longer lines are broken up here: container runtimes and our own shim would do so at 16 KiB, unseen by us."""
READ_BYTES = 1 << 16
PROGRESS_S = 3.0
"""How often a progress bar, which returns the carriage, becomes a line; its last state always does."""
PRINT_S = 1.0
"""How long the end of a rank waits for its last lines to be printed, which somebody may not be reading."""


def _seen(line: bytes) -> bytes:
    """What a terminal shows in the end of a line in which the carriage was returned."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


class RankOutput:
    """Passes on each line of `pipe` to `words`, from a thread of its own, until the pipe ends or `close`.

    A line that ends with a carriage return is the state of a progress bar: the next one takes its place.
    """

    def __init__(self, pipe: IO[bytes], words: LastWords, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe, self._words, self._clock = pipe, words, clock
        self._bar, self._bar_due = b"", -math.inf
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = b""
        self._asked, self._ask = os.pipe()
        self._drained = threading.Event()
        self._closing = self._peers_ended = self._holds = False
        self._lock = threading.Lock()
        os.set_blocking(pipe.fileno(), False)
        self._thread = threading.Thread(target=self._run, name="rank-output", daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """The rank has ended: wait until its last lines have been passed on."""
        self._wake()
        self._drained.wait(PRINT_S)

    def close(self, *, peers_ended: bool = False) -> None:
        """Pass on what is in the pipe, and read no more; returns at once. `peers_ended` as in `LastWords.settle`."""
        self._peers_ended, self._holds = peers_ended, self._words.is_holding
        self._closing = True
        self._wake()

    def wait_for_last_words(self) -> None:
        """After `close`: wait until a traceback that was held back has been passed on."""
        if self._holds:
            self._thread.join(PRINT_S)

    def _wake(self) -> None:
        with self._lock, suppress(OSError):  # the thread has ended
            if self._ask >= 0:
                os.write(self._ask, b".")

    def _run(self) -> None:
        poll = select.poll()
        for descriptor in (self._pipe.fileno(), self._asked):
            poll.register(descriptor, select.POLLIN)
        ended = closed = False
        try:
            while not (closed or (ended and not self._words.is_holding)):
                left_s = self._words.left_s()
                ready = [descriptor for descriptor, _ in poll.poll(None if left_s is None else math.ceil(left_s * 1e3))]
                if not ready:
                    self._words.release()
                if self._asked in ready:
                    os.read(self._asked, READ_BYTES)
                    closed = self._closing
                    ended = ended or self._read(self._held_bytes())
                    self._add(b"", final=True)
                    self._words.rank_ended()
                    self._drained.set()
                elif ready and self._read(READ_BYTES):
                    ended = True
                    self._add(b"", final=True)
                    poll.unregister(self._pipe.fileno())
        finally:
            self._add(b"", final=True)
            self._words.settle(peers_ended=self._peers_ended)
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
            self._pass_on_line(line)
        if b"\r" in self._rest:
            self._rest = self._redraw(self._rest)
        while len(self._rest) > MAX_LINE_BYTES:
            piece, self._rest = self._rest[:MAX_LINE_BYTES], self._rest[MAX_LINE_BYTES:]
            self._pass_on(piece, ends=False)
        if final and self._rest:
            rest, self._rest = self._rest, b""
            self._pass_on_line(rest)

    def _pass_on_line(self, line: bytes) -> None:
        """What is to be seen of a line when it ends, unless it has been passed on as it was drawn."""
        bar, self._bar = self._bar, b""
        seen = _seen(line)
        if seen or not bar:
            self._pass_on(seen, ends=True)

    def _redraw(self, line: bytes) -> bytes:
        """Pass on a line that is drawn again and again, if it is time; returns what has to be kept of it."""
        drawn, _, rest = line.rpartition(b"\r")
        if not rest and b"\r" not in drawn:
            return line  # perhaps the first half of a line's end as on Windows
        seen = _seen(drawn)
        if seen and seen != self._bar and self._clock() >= self._bar_due:
            self._bar, self._bar_due = seen, self._clock() + PROGRESS_S
            self._pass_on(seen + b"\r", ends=True)
        return seen + b"\r" + rest

    def _pass_on(self, line: bytes, *, ends: bool) -> None:
        """A character in which a long line is broken is passed on whole, with the next piece."""
        while len(line) > MAX_LINE_BYTES:
            piece, line = line[:MAX_LINE_BYTES], line[MAX_LINE_BYTES:]
            self._words.add(self._decoder.decode(piece))
        self._words.add(self._decoder.decode(line, final=ends))
