"""The training processes of one worker: start, watch and stop them, and read their output.

Each rank runs in its own session. The kernel kills it when the launcher dies, so a launcher that is killed with SIGKILL
leaves no ranks behind.
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

from elasticctl_launcher.ranks.output import LastTraceback, RankOutput
from elasticctl_launcher.ranks.warm_spares import RankStarter
from elasticctl_launcher.system import MemoryKills, code_of_ended, start_thread

LAST_LINES = 400
"""How many lines of a rank's output are kept to find out why it ended: C++ prints dozens of frames after the error."""
KILL_WAIT_S = 10.0
"""How long to wait for a process after SIGKILL. A process in uninterruptible sleep (a hung disk, a driver that waits
for its GPU) ends only when the kernel releases it; the next generation does not wait for that.
"""
STOPPED_S = 0.5
"""How long a stopped rank has to stay stopped to count as suspended: a profiler such as py-spy stops it for a few
milliseconds, a hundred times a second."""
LOOK_S = 0.02

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Rank:
    """One training process.

    `code` is the return code of `Popen`: negative for a signal, None while the process runs. `ended_at` is a time of
    `time.monotonic`. `signals` are the signals that the launcher has sent. `exhausted_memory`: the kernel killed a
    process of this worker for lack of memory while the rank ran. `terminated`: it ended with exit code 0 after a
    SIGTERM that the launcher had not sent.
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

    def renumber(self, rank: int) -> None:
        """Continue as another rank in the next generation. Output of the last one explains no failure of the next."""
        self.rank, self.signals = rank, ()
        self.last_lines.clear()

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, which may have ended."""
        self.signals += (number,)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def record_exit(self, code: int | None, *, exhausted_memory: bool) -> None:
        """Record the end of the process, once its last lines have been read."""
        self.exhausted_memory, self.code = exhausted_memory, code

    def record_termination(self) -> None:
        """Record that a SIGTERM from outside made the process end with exit code 0."""
        self.terminated = True

    @property
    def ended_unasked(self) -> bool:
        """True if the process ended before the launcher sent it any signal."""
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
        """Start one process for each (global rank, environment), from the main thread. Raises OSError."""
        self._killed_before = self._memory.count()
        for local_rank, (global_rank, environment) in enumerate(environments):
            rank = Rank(local_rank, global_rank, self._starter.start(environment))
            try:
                if rank.process.stdout is not None:
                    rank.output = RankOutput(rank.process.stdout, self._reader(rank, len(environments) > 1))
                rank.waiter = start_thread(self._wait_for_exit, rank, name="rank-exit")
            except OSError:
                rank.process.kill()
                if rank.output is not None:
                    rank.output.close()
                raise
            self.ranks.append(rank)

    def renumber(self, global_ranks: Sequence[int]) -> None:
        """Give the running processes their global ranks in the next generation, in order of local rank."""
        for rank, number in zip(self.ranks, global_ranks, strict=True):
            rank.renumber(number)

    def suspended(self) -> list[Rank]:
        """Return the ranks that were stopped from outside (SIGSTOP, a debugger) and will not continue by themselves.

        Takes up to `STOPPED_S` seconds if there seem to be any.
        """
        found = [(rank, _stop_of(rank.process.pid)) for rank in self.ranks if rank.code is None]
        stopped = [(rank, stop) for rank, stop in found if stop]
        until = time.monotonic() + STOPPED_S
        while stopped and time.monotonic() < until:
            time.sleep(LOOK_S)
            stopped = [(rank, stop) for rank, stop in stopped if _stop_of(rank.process.pid) == stop]
        return [rank for rank, _ in stopped]

    def stop(
        self, grace_s: float, *, peers_ended: bool = False, more_s: Callable[[], float] = lambda: 0.0
    ) -> list[Rank]:
        """Send SIGTERM to every rank, and SIGKILL to their sessions after `grace_s`; return once all have ended.

        `more_s()`, asked after that time, is how many more seconds the ranks may take before SIGKILL.
        Returns the ranks in the order in which they ended. A rank that does not end within `KILL_WAIT_S` of SIGKILL is
        left behind with a warning, and its `code` stays None. If `peers_ended` is set, an error about broken
        connections is logged in one line instead of a traceback.
        """
        suspended = bool(self.suspended())  # a stopped process does not handle SIGTERM
        self._signal(signal.SIGTERM)
        if not suspended and not self._wait_for_all(grace_s):
            self._wait_for_all(more_s())
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        for rank in self.ranks:
            if not _wait(rank, deadline - time.monotonic()):
                log.warning(
                    "rank %d (pid %d) is still there after SIGKILL, held by the kernel: continuing without it",
                    rank.rank,
                    rank.process.pid,
                )
            if rank.output is not None:
                rank.output.close(peers_ended=peers_ended and rank.code not in (None, 0))
        for rank in self.ranks:
            if rank.output is not None:
                rank.output.wait_for_last_words()
            rank.process.poll()  # reaps it, now that nothing in its session is to be signalled any more
        stopped, self.ranks = self.ranks, []
        return sorted(stopped, key=lambda rank: float("inf") if rank.ended_at is None else rank.ended_at)

    def _wait_for_all(self, timeout_s: float) -> bool:
        """Wait for the ranks to end; True once they have."""
        deadline = time.monotonic() + timeout_s
        return all(_wait(rank, deadline - time.monotonic()) for rank in self.ranks)

    def own_pids(self) -> set[int]:
        """Return the process ids of the ranks."""
        return {rank.process.pid for rank in self.ranks}

    def _signal(self, number: int) -> None:
        """Send a signal to every running rank; SIGKILL also goes to everything else in the ranks' sessions."""
        for rank in self.ranks:
            if code_of_ended(rank.process) is None:
                rank.send_signal(number)
            if number == signal.SIGKILL:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(rank.process.pid, signal.SIGKILL)

    def _reader(self, rank: Rank, is_one_of_several: bool) -> LastTraceback:
        def print_line(line: str) -> None:
            self._on_line(rank.rank, f"[rank{rank.rank}] {line}" if is_one_of_several else line)

        def note_line(line: str) -> None:
            if not line.endswith("\r"):  # an intermediate state of a progress bar
                rank.last_lines.append(line)

        return LastTraceback(note_line, print_line, reword=self._reword)

    def _wait_for_exit(self, rank: Rank) -> None:
        code = code_of_ended(rank.process, wait=True)
        rank.ended_at = time.monotonic()
        if rank.output is not None:
            rank.output.drain()  # its last lines are part of the failure
        was_killed = code == -signal.SIGKILL
        rank.record_exit(code, exhausted_memory=was_killed and self._memory.count() > self._killed_before)
        self._on_exit(rank)


def _wait(rank: Rank, timeout_s: float) -> bool:
    """Wait until the rank has ended and its last lines have been read; return False after `timeout_s`."""
    if rank.waiter is not None:
        rank.waiter.join(max(0.0, timeout_s))
    return rank.code is not None


def _stop_of(pid: int) -> tuple[str, ...]:
    """Counters of a process in state T or t, which stay the same while it does not run.

    Empty for a process in another state, and where there is no /proc.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return ()
    state = next((line.split()[1] for line in lines if line.startswith("State:")), "")
    return tuple(line for line in lines if "ctxt_switches:" in line) or (state,) if state in ("T", "t") else ()
