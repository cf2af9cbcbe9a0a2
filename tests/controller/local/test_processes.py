"""Watching processes end, with the kernel's help and without."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticctl.cluster.local.worker_processes import any_left
from elasticctl_controller.local.command import pinned_environment
from elasticctl_controller.local.processes import ExitWatcher, kill_strays, read_exit

NEVER_S = 100_000.0


@pytest.fixture
def watcher() -> Iterator[ExitWatcher]:
    watcher = ExitWatcher()
    yield watcher
    watcher.close()


def waited_s(watcher: ExitWatcher, timeout_s: float) -> float:
    began = time.monotonic()
    watcher.wait(timeout_s)
    return time.monotonic() - began


@pytest.mark.parametrize("pidfd", [True, False])
def test_an_end_is_noticed(watcher: ExitWatcher, pidfd: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen(["sleep", "1000"])
    watcher.add(process.pid)
    process.kill()
    while process.poll() is None:  # a watched process that has ended ends each wait immediately
        watcher.wait(NEVER_S)
    watcher.remove(process.pid)
    assert waited_s(watcher, 0.05) >= 0.04


def test_a_call_from_another_thread_wakes_it(watcher: ExitWatcher) -> None:
    for _ in range(70_000):  # more than the pipe holds
        watcher.wake()
    watcher.wait(0.0)
    while waited_s(watcher, 0.01) < 0.01:
        pass
    caller = threading.Timer(0.05, watcher.wake)
    caller.start()
    watcher.wait(NEVER_S)
    caller.join()


def test_strays_are_found_by_the_pods_uid_and_no_other_process_is_killed(tmp_path: Path) -> None:
    pods = tmp_path / "pods"
    mine, other = (
        subprocess.Popen(
            ["sleep", "1000"],
            env=pinned_environment(pods / uid, {"metadata": {"uid": uid}, "spec": {}}, ()),
            start_new_session=True,
        )
        for uid in ("uid-1", "uid-2")
    )
    kill_strays("uid-1")
    mine.wait()
    assert other.poll() is None
    assert any_left(pods)
    kill_strays("uid-2")
    other.wait()
    assert not any_left(pods)


def test_without_a_report_it_was_killed(tmp_path: Path) -> None:
    how = read_exit(tmp_path, now=5.0)
    assert (how.exit_code, how.signal, how.finished_at) == (137, 9, 5.0)
