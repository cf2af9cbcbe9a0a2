"""The training processes of one worker: start, watch, read and stop them.

Each rank runs in a session of its own, and the kernel kills it when the launcher dies, so that a launcher that is
killed outright leaves no process behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elasticctl_launcher.ranks.last_words import LastWords
from elasticctl_launcher.ranks.output import RankOutput
from elasticctl_launcher.ranks.starter import RankStarter
from elasticctl_launcher.system import MemoryKills

LAST_LINES = 400
"""What is kept of a rank's output to find out why it ended: C++ prints dozens of frames after the error itself."""
KILL_WAIT_S = 10.0
"""How long the next generation waits for a process that has been killed: one in uninterruptible sleep (a hung disk, a
driver that waits for its GPU) ends when the kernel lets it, and holds up nobody until then."""
STOPPED_S = 0.5
"""How long a rank that is found stopped has to stay so to count as suspended: a profiler such as py-spy stops it for a
few milliseconds, a hundred times a second."""
LOOK_S = 0.02

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rank:
    """One training process. `code` is Popen's return code: negative for a signal, None while it runs.

    `ended_at` is of time.monotonic. `signals` are those that the launcher has sent it, `exhausted_memory` says that the
    kernel killed a process of this worker for memory while it ran, `terminated` that it ended with exit code 0 after a
    SIGTERM from somebody else.
    """

    local_rank: int
    rank: int
    process: subprocess.Popen[bytes]
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    code: int | None = None
    ended_at: float | None = None
    signals: tuple[int, ...] = ()
    exhausted_memory: bool = False
    terminated: bool = False
    output: RankOutput | None = None
    waiter: threading.Thread | None = None

    @property
    def ended_unasked(self) -> bool:
        """True if it ended before the launcher sent it any signal."""
        return self.code is not None and not self.signals


class RankGroup:
    """The ranks of one generation on this worker.

    Calls `on_line(rank, text)` for each line that a rank prints, and `on_exit(rank)` when one ends; both from threads.
    Lines go through `reword` first.
    """

    def __init__(
        self,
        starter: RankStarter,
        on_line: Callable[[int, str], None],
        on_exit: Callable[[Rank], None],
        memory: MemoryKills | None = None,
        reword: Callable[[str], str] = str,
    ) -> None:
        self._starter, self._on_line, self._on_exit, self._reword = starter, on_line, on_exit, reword
        self._memory = memory or MemoryKills()
        self._killed_before = 0
        self.ranks: list[Rank] = []

    def start(self, environments: Sequence[tuple[int, Mapping[str, str]]]) -> None:
        """Start one process per (global rank, environment), from the main thread."""
        self._killed_before = self._memory.count()
        for local_rank, (global_rank, environment) in enumerate(environments):
            rank = Rank(local_rank, global_rank, self._starter.start(environment))
            self.ranks.append(rank)
            if rank.process.stdout is not None:
                rank.output = RankOutput(rank.process.stdout, self._reader(rank, len(environments) > 1))
            rank.waiter = threading.Thread(target=self._wait_for_exit, args=(rank,), name="rank-exit", daemon=True)
            rank.waiter.start()

    def renumber(self, global_ranks: Sequence[int]) -> None:
        """The same processes are other ranks, of the next generation."""
        for rank, number in zip(self.ranks, global_ranks, strict=True):
            rank.rank = number
            rank.last_lines.clear()  # what they said of the last one explains nothing in the next
            rank.signals = ()

    def suspended(self) -> list[Rank]:
        """Ranks that were stopped from outside (SIGSTOP, a debugger): alive, but they will not move by themselves.

        Takes up to `STOPPED_S` if there seem to be any.
        """
        found = [(rank, _stop_of(rank.process.pid)) for rank in self.ranks if rank.code is None]
        stopped = [(rank, stop) for rank, stop in found if stop]
        until = time.monotonic() + STOPPED_S
        while stopped and time.monotonic() < until:
            time.sleep(LOOK_S)
            stopped = [(rank, stop) for rank, stop in stopped if _stop_of(rank.process.pid) == stop]
        return [rank for rank, _ in stopped]

    def stop(self, grace_s: float, *, peers_ended: bool = False) -> list[Rank]:
        """Send SIGTERM to every rank, and SIGKILL to what is left of them after `grace_s`; returns when all are gone.

        Returns the ranks in the order in which they ended, those first that had ended before. A rank that does not end
        within `KILL_WAIT_S` of SIGKILL is left behind, with a word in the log; its `code` stays None. Where
        `peers_ended`, what broken connections have ended is told of in one line.
        """
        if self.suspended():
            grace_s = 0.0  # they would not notice
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for rank in self.ranks:
            _wait(rank, deadline - time.monotonic())
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        for rank in self.ranks:
            if not _wait(rank, deadline - time.monotonic()):
                log.warning(
                    "rank %d (pid %d) does not end though it was killed: the kernel holds it. Going on without it",
                    rank.rank,
                    rank.process.pid,
                )
            if rank.output is not None:
                rank.output.close(peers_ended=peers_ended and rank.code not in (None, 0))
        for rank in self.ranks:
            if rank.output is not None:
                rank.output.wait_for_last_words()
        stopped, self.ranks = self.ranks, []
        return sorted(stopped, key=lambda rank: float("inf") if rank.ended_at is None else rank.ended_at)

    def own_pids(self) -> set[int]:
        """The processes of the ranks."""
        return {rank.process.pid for rank in self.ranks}

    def _signal(self, number: int) -> None:
        """Send a signal to every rank that runs, SIGKILL to all that a rank has started in its session too."""
        for rank in self.ranks:
            if rank.process.poll() is None:
                rank.signals += (number,)
                with contextlib.suppress(ProcessLookupError):
                    rank.process.send_signal(number)
            if number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)

    def _reader(self, rank: Rank, is_one_of_several: bool) -> LastWords:
        def print_line(line: str) -> None:
            self._on_line(rank.rank, f"[rank{rank.rank}] {line}" if is_one_of_several else line)

        def note_line(line: str) -> None:
            if not line.endswith("\r"):  # a progress bar on its way
                rank.last_lines.append(line)

        return LastWords(note_line, print_line, reword=self._reword)

    def _wait_for_exit(self, rank: Rank) -> None:
        code = rank.process.wait()
        rank.ended_at = time.monotonic()
        if rank.output is not None:
            rank.output.drain()  # its last lines belong in the failure
        if code == -signal.SIGKILL:
            rank.exhausted_memory = self._memory.count() > self._killed_before
        rank.code = code
        self._on_exit(rank)


def _wait(rank: Rank, timeout_s: float) -> bool:
    """Wait until the rank has ended and its last lines are read; False if it has not ended within `timeout_s`."""
    if rank.waiter is not None:
        rank.waiter.join(max(0.0, timeout_s))
    return rank.code is not None


def _stop_of(pid: int) -> tuple[str, ...]:
    """Of a process in state T or t, what is the same for as long as it does not move; empty for others, and where /proc
    does not tell."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ()
    state = next((line.split()[1] for line in lines if line.startswith("State:")), "")
    return tuple(line for line in lines if "ctxt_switches:" in line) or (state,) if state in ("T", "t") else ()
