"""Ranks are stopped without waiting for processes that they have started, or that the kernel does not end."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from elasticctl_launcher import rank_processes
from elasticctl_launcher.rank_processes import Rank, RankGroup
from elasticctl_launcher.ranks.warm_spares import RankStarter
from elasticctl_launcher.system import MemoryKills
from tests.support.waiting import wait_until


class Printed:
    """The lines of the ranks, and the ranks that have ended."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.exits: queue.Queue[Rank] = queue.Queue()

    def group(self, *command: str, starter: object = None, memory: MemoryKills | None = None) -> RankGroup:
        """Start one rank that runs `command`."""
        made = starter or RankStarter(command, dict(os.environ), [])
        group = RankGroup(made, lambda _, line: self.lines.append(line), self.exits.put, memory)  # type: ignore[arg-type]
        group.start([(0, dict(os.environ))])
        return group

    def end(self) -> Rank:
        return self.exits.get(timeout=240)


@pytest.fixture
def printed() -> Printed:
    return Printed()


def test_the_last_lines_are_read_before_the_exit_is_reported(printed: Printed) -> None:
    group = printed.group("sh", "-c", "seq 3000; printf 'no newline'; exit 3")
    rank = printed.end()
    assert rank.code == 3
    assert (rank.last_lines[-2], rank.last_lines[-1]) == ("3000", "no newline")
    assert printed.lines[:3000] == [str(n) for n in range(1, 3001)]
    assert [rank.code for rank in group.stop(0.0)] == [3]


@pytest.mark.parametrize("noise", ["sleep 1000", "while :; do echo still here; done"], ids=["silent", "chatty"])
def test_a_grandchild_that_holds_the_pipe_causes_no_delay(printed: Printed, noise: str, tmp_path: Path) -> None:
    """It is in a session of its own, so that it is not killed with the rank."""
    own = f"import os; os.setsid(); os.execlp('sh', 'sh', '-c', 'echo $$ > pid; mv pid known; {noise}')"
    script = f'cd "{tmp_path}"; "{sys.executable}" -c "{own}" & while [ ! -s known ]; do sleep 0.05; done; exit 4'
    try:
        group = printed.group("sh", "-c", script.replace("$$", "\\$\\$"))
        assert printed.end().code == 4
        group.stop(36_000.0)  # longer than any test takes
        seen = len(printed.lines)
        wait_until(lambda: threading_names("rank-output") == 0)
        assert len(printed.lines) < seen + 50_000, "no more than the pipe held"
    finally:
        with suppress(ProcessLookupError):  # it may have got SIGPIPE
            os.kill(int((tmp_path / "known").read_text()), signal.SIGKILL)


def threading_names(prefix: str) -> int:
    return sum(thread.name.startswith(prefix) for thread in threading.enumerate())


def test_output_of_orphans_is_read_until_the_generation_ends(printed: Printed, tmp_path: Path) -> None:
    late = f"(while [ ! -e '{tmp_path}/go' ]; do sleep 0.01; done; echo late) & exit 0"
    group = printed.group("sh", "-c", late)
    printed.end()
    (tmp_path / "go").touch()
    wait_until(lambda: printed.lines == ["late"])
    group.stop(0.0)


class HeldProcess:
    """A process that no signal ends: it is in uninterruptible sleep until `release`."""

    stdout = None
    pid = 2**22 + 1
    """No process has this pid."""

    def __init__(self) -> None:
        self.released, self.signals = threading.Event(), list[int]()

    def start(self, environment: Mapping[str, str]) -> HeldProcess:
        return self

    def code_of_ended(self, *, wait: bool = False) -> int | None:
        return -signal.SIGKILL if wait and self.released.wait(60) else None

    def poll(self) -> None:
        return None


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldProcess]:
    monkeypatch.setattr(rank_processes, "KILL_WAIT_S", 0.2)
    monkeypatch.setattr(rank_processes, "code_of_ended", HeldProcess.code_of_ended)
    process = HeldProcess()
    monkeypatch.setattr(os, "kill", lambda pid, number: process.signals.append(number))
    yield process
    process.released.set()


def test_a_rank_that_sigkill_does_not_end_is_given_up_with_a_warning(
    printed: Printed, held: HeldProcess, caplog: pytest.LogCaptureFixture
) -> None:
    group = printed.group(starter=held)
    with caplog.at_level(logging.WARNING):
        (rank,) = group.stop(0.1)
    assert held.signals == [signal.SIGTERM, signal.SIGKILL]
    assert (rank.code, group.ranks) == (None, [])
    assert "is still there after SIGKILL" in caplog.text


def test_a_rank_is_reaped_only_after_its_session_was_killed(printed: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    group = printed.group("sh", "-c", "exit 3")
    rank = printed.end()
    killed: list[tuple[int, str]] = []

    def note(number: int, signal_number: int) -> None:
        killed.append((signal_number, psutil.Process(number).status()))

    monkeypatch.setattr(os, "killpg", note)
    assert [rank.code for rank in group.stop(0.0)] == [3]
    assert (killed, rank.signals) == ([(signal.SIGKILL, psutil.STATUS_ZOMBIE)], ())
    assert not psutil.pid_exists(rank.process.pid), "it is reaped afterwards"


@pytest.mark.parametrize("thread", ["rank-output", "rank-exit"])
def test_a_lack_of_threads_is_a_clear_error(printed: Printed, thread: str, monkeypatch: pytest.MonkeyPatch) -> None:
    start, made = threading.Thread.start, list[subprocess.Popen[bytes]]()

    def refuse(starting: threading.Thread) -> None:
        if starting.name == thread:
            raise RuntimeError("can't start new thread")
        start(starting)

    class Starter(RankStarter):
        def start(self, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
            made.append(super().start(environment))
            return made[-1]

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(OSError, match=r"can't start new thread.*FIX"):
        printed.group(starter=Starter(["sleep", "1000"], dict(os.environ), []))
    assert made[0].wait(60) == -signal.SIGKILL
    for reader in (each for each in threading.enumerate() if each.name == "rank-output"):
        reader.join(60)
    assert made[0].stdout is not None
    made[0].stdout.close()


def test_a_rank_that_a_profiler_stops_repeatedly_is_not_suspended(
    printed: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = printed.group("sh", "-c", "echo up; while :; do sleep 0.001; done")
    wait_until(lambda: printed.lines == ["up"])
    (rank,) = group.ranks
    over = threading.Event()

    def profile() -> None:
        while not over.wait(0.002):
            rank.process.send_signal(signal.SIGSTOP)
            time.sleep(0.02)
            rank.process.send_signal(signal.SIGCONT)

    profiler = threading.Thread(target=profile)
    profiler.start()
    with monkeypatch.context() as patient:  # the profiler may have to wait for a CPU between its two signals
        patient.setattr(rank_processes, "STOPPED_S", 240.0)
        assert [group.suspended() for _ in range(20)] == [[]] * 20
    over.set()
    profiler.join()
    rank.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: group.suspended() == [rank])
    assert [rank.code for rank in group.stop(60.0)] == [-signal.SIGKILL]


def test_an_out_of_memory_kill_is_distinguished_from_other_kills(printed: Printed, tmp_path: Path) -> None:
    (tmp_path / "memory.events").write_text("oom_kill 1\n")
    (tmp_path / "cgroup").write_text("0::/")
    memory = MemoryKills(tmp_path, tmp_path / "cgroup")
    killed = printed.group("sh", "-c", "kill -KILL $$", memory=memory)
    assert not printed.end().exhausted_memory
    script = f"echo oom_kill 2 > '{tmp_path}/memory.events'; kill -KILL $$"
    exhausted = printed.group("sh", "-c", script, memory=memory)
    assert printed.end().exhausted_memory
    for group in (killed, exhausted):
        group.stop(0.0)


def test_many_generations_leak_no_descriptors() -> None:
    code = """
import os, queue, sys
from elasticctl_launcher.rank_processes import RankGroup
from elasticctl_launcher.ranks.warm_spares import RankStarter
from tests.support.waiting import wait_until
starter = RankStarter([sys.executable, "-m", "this"], dict(os.environ), ["json"])
ended = queue.Queue()
group = RankGroup(starter, lambda rank, line: None, ended.put)
def descriptors():
    return len(os.listdir("/proc/self/fd"))
for generation in range(7):
    starter.warm(2)
    if generation % 2:
        starter.wait_until_warm(240)
    group.start([(rank, dict(os.environ)) for rank in range(2)])
    if generation % 3:
        ended.get(timeout=240)
    group.stop(1.0)
    if generation == 0:
        before = descriptors()
wait_until(lambda: descriptors() <= before)
starter.close()
print("none lost")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "none lost\n", done.stderr
