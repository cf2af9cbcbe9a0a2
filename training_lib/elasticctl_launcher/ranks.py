"""The training processes of one worker: run, watch, read, stop.

Each rank runs in a session of its own, with the kernel told to kill it when the launcher dies, so that a launcher
that is killed outright leaves nobody behind. Its output is read line by line: passed on (with the rank's number when a
worker has several), and the last lines kept for the report of a failure.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticctl_launcher.spares import Starter

LAST_LINES = 20
MAX_LINE_BYTES = 16_000
"""Longer lines are broken up here: container runtimes, and our own shim, would do it at 16 KiB, out of our sight."""
KILL_WAIT_S = 10.0


@dataclass(slots=True)
class Rank:
    """One running training process. `code` is Popen's return code: negative for a signal, None while it runs."""

    local_rank: int
    rank: int
    process: subprocess.Popen[bytes]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    code: int | None = None
    threads: tuple[threading.Thread, ...] = ()


class RankGroup:
    """The ranks of one generation on this worker.

    From threads, `on_line(rank, text)` is called with each line that one of them prints, and `on_exit(rank)` when one
    ends.
    """

    def __init__(self, starter: Starter, on_line: Callable[[int, str], None], on_exit: Callable[[Rank], None]) -> None:
        self._starter, self._on_line, self._on_exit = starter, on_line, on_exit
        self.ranks: list[Rank] = []

    def start(self, environments: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        """Start one process per (global rank, environment), from the main thread."""
        prefixed = len(environments) > 1
        for local_rank, (rank, env) in enumerate(environments):
            process = self._starter.start(env)
            entry = Rank(local_rank, rank, process)
            self.ranks.append(entry)
            prefix = f"[rank{rank}] " if prefixed else ""
            reader = threading.Thread(target=self._read, args=(entry, prefix), daemon=True)
            waiter = threading.Thread(target=self._wait, args=(entry, reader), daemon=True)
            entry.threads = (reader, waiter)
            reader.start()
            waiter.start()

    def suspended(self) -> list[Rank]:
        """Ranks that somebody has stopped (SIGSTOP, a debugger): they live, but will not move by themselves."""
        return [entry for entry in self.ranks if entry.code is None and _is_stopped(entry.process.pid)]

    def stop(self, grace_s: float) -> None:
        """SIGTERM to every rank, SIGKILL to what is left of them after `grace_s`; returns when all are gone."""
        if self.suspended():
            grace_s = 0.0  # they would not notice
        for entry in self.ranks:
            if entry.code is None:
                with contextlib.suppress(ProcessLookupError):
                    entry.process.terminate()
        deadline = time.monotonic() + grace_s
        for entry in self.ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                entry.process.wait(max(0.0, deadline - time.monotonic()))
        for entry in self.ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(entry.process.pid, signal.SIGKILL)
        for entry in self.ranks:
            entry.process.wait(KILL_WAIT_S)
            for thread in entry.threads:
                thread.join(KILL_WAIT_S)
        self.ranks.clear()

    def _read(self, entry: Rank, prefix: str) -> None:
        """Pass a rank's output on, line by line."""
        pipe = entry.process.stdout
        if pipe is None:
            return
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        with pipe:
            while line := pipe.readline(MAX_LINE_BYTES):
                # A character that a long line is broken within comes whole with the next piece.
                text = decoder.decode(line, final=line.endswith(b"\n")).rstrip("\n")
                entry.last_lines.append(text)
                self._on_line(entry.rank, f"{prefix}{text}")

    def _wait(self, entry: Rank, reader: threading.Thread) -> None:
        code = entry.process.wait()
        reader.join(1.0)  # what it said last belongs to the report; a grandchild may hold the pipe open for longer
        entry.code = code
        self._on_exit(entry)


def _is_stopped(pid: int) -> bool:
    """True for a process in state T or t; False where /proc does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")
