"""Reads the output of one rank, line by line, and holds back its last traceback.

The pipe may outlive the rank, if a process that the rank has started holds its other end. Nothing waits for that. What
is in the pipe when the rank ends is read immediately; later output is read for as long as the generation lasts, and
then the pipe is closed.

The loss of one worker ends the ranks of all others, each with the same twenty lines about a broken connection. If the
group knows that a peer ended first, one line replaces them. Any other traceback is printed as soon as the rank has
ended, or after `HOLD_S` seconds if the rank continues.
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

from elasticctl_launcher.ranks.failure_evidence import (
    begins_last_words,
    find_final_exception,
    lines_apart_from_exception,
)
from elasticctl_launcher.system import start_thread

HOLD_S = 2.0
"""How long a rank may run after the first line of a traceback before that is printed."""
MAX_HELD_LINES = 400
MAX_ERROR_CHARS = 300


class LastTraceback:
    """Passes on lines, changed by `reword`: to `note` immediately, and to `say` when they are due. Not thread-safe."""

    def __init__(
        self,
        note: Callable[[str], None],
        say: Callable[[str], None],
        reword: Callable[[str], str] = str,
    ) -> None:
        self._note, self._say, self._reword = note, say, reword
        self._held: list[str] = []
        self._due: float | None = None

    @property
    def is_holding(self) -> bool:
        """True if there are lines that have not been passed to `say` yet."""
        return bool(self._held)

    def left_s(self) -> float | None:
        """Return the seconds until `release` is due; None if no time is set."""
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def add(self, line: str) -> None:
        """Add a line of the rank."""
        line = self._reword(line)
        self._note(line)
        if not self._held:
            if not begins_last_words(line):
                self._say(line)
                return
            self._due = time.monotonic() + HOLD_S
        self._held.append(line)
        if len(self._held) >= MAX_HELD_LINES:
            self.release()

    def release(self) -> None:
        """Say the held lines: the rank continues, or its end is its own fault."""
        held, self._held, self._due = self._held, [], None
        for line in held:
            self._say(line)

    def rank_ended(self) -> None:
        """Hold a traceback that a lost peer may explain until `print_held`, and release any other."""
        self._due = None
        final = find_final_exception(self._held)
        if final is None or not final.is_of_peers:
            self.release()

    def print_held(self, *, peers_ended: bool) -> None:
        """Say the held lines, but only one line for a traceback that is explained by a peer that ended first."""
        final = find_final_exception(self._held)
        if not peers_ended or final is None or not final.is_of_peers:
            self.release()
            return
        apart = lines_apart_from_exception(self._held, final)
        left_out = len(self._held) - len(apart)
        self._held, self._due = [], None
        self._say(f"a peer was lost: {final.line[:MAX_ERROR_CHARS]} ({left_out} lines of its traceback left out)")
        for line in apart:
            self._say(line)


MAX_LINE_BYTES = 16_000
"""Longer lines are split here. Otherwise container runtimes, and our own shim, would split them at 16 KiB."""
READ_BYTES = 1 << 16
PROGRESS_S = 3.0
"""How often a progress bar, which uses carriage returns, becomes a line. Its last state always does."""
PRINT_S = 1.0
"""How long the end of a rank waits until its last lines have been printed, because nothing may be reading them."""


def _seen(line: bytes) -> bytes:
    """The part of a line with carriage returns that a terminal shows in the end."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part.strip()), b"")


class RankOutput:
    """Passes each line of `pipe` to `words`, from its own thread, until the end of the pipe or `close`.

    A line that ends with a carriage return is a state of a progress bar, which the next line replaces.
    """

    def __init__(self, pipe: IO[bytes], words: LastTraceback, clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe, self._words, self._clock = pipe, words, clock
        self._bar, self._bar_due = b"", -math.inf
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = b""
        self._asked, self._ask = os.pipe()
        self._drained = threading.Event()
        self._closing = self._peers_ended = self._holds = False
        self._lock = threading.Lock()
        os.set_blocking(pipe.fileno(), False)
        self._thread = start_thread(self._run, name="rank-output")

    def drain(self) -> None:
        """Wait until the last lines of the rank, which has ended, are passed on; for `PRINT_S` seconds at most."""
        self._wake()
        self._drained.wait(PRINT_S)

    def close(self, *, peers_ended: bool = False) -> None:
        """Pass on what is in the pipe and stop reading, immediately. `peers_ended`: see `LastTraceback.print_held`."""
        self._peers_ended, self._holds = peers_ended, self._words.is_holding
        self._closing = True
        self._wake()

    def wait_for_last_words(self) -> None:
        """After `close`, wait until a traceback that was held back has been passed on."""
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
            self._words.print_held(peers_ended=self._peers_ended)
            self._drained.set()
            with self._lock:
                os.close(self._asked)
                os.close(self._ask)
                self._ask = -1
            self._pipe.close()

    def _held_bytes(self) -> int:
        """The number of bytes in the pipe now. This includes all that the rank wrote before it ended."""
        held = bytearray(4)
        fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, held)
        return int.from_bytes(held, sys.byteorder) + 1  # to notice the end of the pipe

    def _read(self, limit_bytes: int) -> bool:
        """Pass on about `limit_bytes` of output; return True at the end of the pipe."""
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
        """Pass on the visible part of a line at its end, unless a state of the progress bar was its last output."""
        bar, self._bar = self._bar, b""
        seen = _seen(line)
        if seen or not bar:
            self._pass_on(seen, ends=True)

    def _redraw(self, line: bytes) -> bytes:
        """Pass on a state of a progress bar, if it is due; return the part of the line to keep."""
        drawn, _, rest = line.rpartition(b"\r")
        if not rest and b"\r" not in drawn:
            return line  # this may be the first half of a Windows line end
        seen = _seen(drawn)
        if seen and seen != self._bar and self._clock() >= self._bar_due:
            self._bar, self._bar_due = seen, self._clock() + PROGRESS_S
            self._pass_on(seen + b"\r", ends=True)
        return seen + b"\r" + rest

    def _pass_on(self, line: bytes, *, ends: bool) -> None:
        """Pass on a line in pieces. A character that is split between two pieces is passed on with the second one."""
        while len(line) > MAX_LINE_BYTES:
            piece, line = line[:MAX_LINE_BYTES], line[MAX_LINE_BYTES:]
            self._words.add(self._decoder.decode(piece))
        self._words.add(self._decoder.decode(line, final=ends))
