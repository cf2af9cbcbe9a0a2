"""A storage is unavailable: training continues if it can, waits if it must, and nothing fails."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import outages
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import Run, SavePolicy
from tests.support import servers
from tests.support.clouds import Cloud
from tests.support.gate import Fault, Seen
from tests.support.ports import free_port
from tests.support.train import programs, ranks
from tests.support.train.launcher import Launcher
from tests.support.waiting import wait_until

HOUR_S = 3600.0
FOREVER = {"epochs": 200, "samples": 1000, "global_batch": 8, "every_steps": 100_000}
AWAY = Fault(status=503, code="ServiceUnavailable")


class Clock:
    """A clock that only pauses between tries advance; `over` is called after an hour."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, over: Callable[[], object] = int) -> None:
        self.now_s, self._over, self._lock = 0.0, over, threading.Lock()
        monkeypatch.setattr(outages, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            before_s, self.now_s = self.now_s, self.now_s + seconds
            if before_s < HOUR_S <= self.now_s:
                self._over()
        time.sleep(0.0001)


class FileServer(Clock):
    """A file server that is unavailable until its clock has advanced so far."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.until_s, self.number, self._plain = 0.0, errno.EIO, os.fsync
        monkeypatch.setattr(os, "fsync", self.fsync)

    def go_away(self, for_s: float, number: int = errno.EIO) -> None:
        self.until_s, self.number = self.now_s + for_s, number

    def fsync(self, descriptor: int) -> None:
        if self.now_s < self.until_s:
            raise OSError(self.number, os.strerror(self.number))
        self._plain(descriptor)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FileServer:
    return FileServer(monkeypatch)


def steps_in(folder: Path) -> list[int]:
    return [commit.step for commit in read_commits(LocalStorage(folder))]


def begin(folder: Path, **policy: Any) -> Run:
    return begin_at(str(folder), **policy)


def begin_at(url: str, **policy: Any) -> Run:
    return Run(url, model=torch.nn.Linear(1, 1), save=SavePolicy(**policy))


def test_a_run_that_starts_during_an_outage_waits_for_its_end(
    server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.go_away(HOUR_S)
    run = begin(tmp_path, every_s=1e6)
    assert HOUR_S <= server.now_s < HOUR_S + 30
    run.step()
    run.finish()
    assert steps_in(tmp_path) == [1]
    said = [message for message in caplog.messages if "input/output error" in message]
    assert said[0].endswith("input/output error; trying again until it answers")
    assert said[-1].endswith("input/output error: over after 1h00m")
    assert len(said) < 12


def test_the_last_save_waits_for_its_storage(server: FileServer, tmp_path: Path) -> None:
    run = begin(tmp_path, every_s=1e6)
    run.step()
    server.go_away(HOUR_S, errno.ESTALE)
    run.finish()
    assert server.now_s >= HOUR_S
    assert steps_in(tmp_path) == [1]


def test_training_continues_while_a_save_waits(
    server: FileServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = begin(tmp_path, every_s=1e-6)
    caplog.set_level("INFO")
    server.go_away(float("inf"))
    for _ in range(50):
        run.step()
    assert steps_in(tmp_path) == []
    assert any("skipped a save, because the last one is still being written" in said for said in caplog.messages)
    server.until_s = 0.0
    wait_until(lambda: not run._session.busy)
    assert len(steps_in(tmp_path)) == 1
    run.step()
    wait_until(lambda: not run._session.busy)
    assert steps_in(tmp_path)[0] == 51
    run.finish()


def test_a_skipped_save_is_made_up_for_soon(server: FileServer, tmp_path: Path) -> None:
    """It does not wait for another interval, because all steps during the outage are at risk."""
    run = begin(tmp_path, every_s=0.3)
    server.go_away(float("inf"))
    while not (run._session.storage.checkpoints and run._session.storage.checkpoints.skipped):
        run.step()
        time.sleep(0.01)
    server.until_s = 0.0
    wait_until(lambda: not run._session.busy)
    steps = run.steps_done
    run._session.meetings._cadence._every_s = 1e6
    wait_until(lambda: run.step() or steps_in(tmp_path)[0] >= steps)  # type: ignore[func-returns-value]
    run.finish()


def test_a_full_disk_fails_immediately(server: FileServer, tmp_path: Path) -> None:
    server.go_away(HOUR_S, errno.ENOSPC)
    with pytest.raises(StorageError, match="the disk is full"):
        begin(tmp_path)
    assert server.now_s == 0.0


@pytest.fixture
def versity(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts versitygw, a real S3 server, repeatedly with the same folder and port, which its `args` name."""
    address, folder, started = f"127.0.0.1:{free_port()}", tmp_path / "server", list[subprocess.Popen[bytes]]()
    (folder / servers.BUCKET).mkdir(parents=True)
    keys = {
        "ROOT_ACCESS_KEY": servers.KEYS["AWS_ACCESS_KEY_ID"],
        "ROOT_SECRET_KEY": servers.KEYS["AWS_SECRET_ACCESS_KEY"],
    }

    def start() -> subprocess.Popen[bytes]:
        command = ["versitygw", "--port", address, "posix", str(folder)]
        started.append(subprocess.Popen(command, env=os.environ | keys, stdout=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_run_outlasts_an_outage_of_an_hour(
    aws_keys: None, monkeypatch: pytest.MonkeyPatch, versity: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    """A real server, killed during a run and restarted an hour later by the clock of the pauses."""
    process = versity()
    address = process.args[2]  # type: ignore[index]
    url = f"s3://{servers.BUCKET}/job?endpoint=http://{address}&region=us-east-1"
    run = begin_at(url, every_s=1e6)
    run.step()
    process.kill()
    process.wait()
    clock = Clock(monkeypatch, over=versity)
    run.finish()
    assert clock.now_s >= HOUR_S
    assert begin_at(url).steps_done == 1


# Ranks of their own, and a storage behind a gate.


def start(s3: Cloud, launcher: Launcher, folder: Path, world_size: int, end: dict[str, Any]) -> list[Any]:
    arguments = (s3.url, str(folder), end, str(launcher.folder), dict(servers.KEYS))
    return ranks.start(programs.train_in_the_cloud, world_size, *arguments)


def stop(processes: list[Any]) -> None:
    for process in processes:
        process.kill()
        process.join()


def away(seen: Seen) -> Fault | None:
    return AWAY


def test_waiting_ranks_report_it_and_respond_to_notice(s3: Cloud, launcher: Launcher, tmp_path: Path) -> None:
    s3.gate.faults = away
    processes = start(s3, launcher, tmp_path, 2, FOREVER)
    reason = launcher.hear_report("waiting")["reason"]
    assert reason.startswith(f"storage s3://bucket/{s3.url.split('/')[3]}/")
    assert "503 ServiceUnavailable for " in reason
    for rank in range(2):
        launcher.give_notice(rank)
    assert launcher.hear("drained", 2) == {0: 0, 1: 0}
    assert all(process.is_alive() for process in processes)
    stop(processes)


def test_ranks_at_their_last_save_respond_to_notice(s3: Cloud, launcher: Launcher, tmp_path: Path) -> None:
    s3.gate.faults = lambda seen: AWAY if seen.method == "PUT" and "-step" in seen.target else None
    processes = start(s3, launcher, tmp_path, 2, {**FOREVER, "epochs": 1})
    waiting: set[int] = set()
    while waiting != {0, 1}:
        waiting.add(launcher.hear_report("waiting")["rank"])
    launcher.give_notice(0)
    assert set(launcher.hear("drained", 2).values()) == {125}
    stop(processes)


def test_a_waiting_rank_handles_sigterm(s3: Cloud, launcher: Launcher, tmp_path: Path) -> None:
    s3.gate.faults = away
    processes = start(s3, launcher, tmp_path, 2, FOREVER)
    launcher.hear_report("waiting")
    for process in processes:
        process.terminate()
    for process in processes:
        process.join()
        assert process.exitcode == -signal.SIGTERM


def test_training_is_distinguished_from_waiting(s3: Cloud, launcher: Launcher, tmp_path: Path) -> None:
    s3.gate.faults = lambda seen: AWAY if seen.method == "PUT" and "-step" in seen.target else None
    processes = start(s3, launcher, tmp_path, 1, {**FOREVER, "every_steps": 1})
    assert "503 ServiceUnavailable" in launcher.hear_report("unsaved")["reason"]
    launcher.hear("progress", 1)
    s3.gate.faults = lambda seen: None
    assert launcher.hear_report("unsaved", reason="")["reason"] == ""
    launcher.hear("committed", 1)
    stop(processes)


@pytest.mark.timeout(900)
def test_ranks_wait_for_a_waiting_rank_without_limit(s3: Cloud, launcher: Launcher, tmp_path: Path) -> None:
    """Longer than the usual timeout between ranks; three jobs: during the opening, a restore, and a save."""
    parts = {"opening": "journal", "restore": ".safetensors", "save": "-step"}
    end, keys = {**FOREVER, "epochs": 1}, dict(servers.KEYS)
    urls = {at: s3.url.replace("?", f"-{at}?") for at in parts}
    assert ranks.run(programs.train_in_the_cloud, 1, urls["restore"], str(tmp_path), end, "", keys) == [0]

    def fault(seen: Seen) -> Fault | None:
        return AWAY if any(f"-{at}" in seen.target and part in seen.target for at, part in parts.items()) else None

    s3.gate.faults = fault
    end, processes = {**end, "epochs": 2, "message_s": 10.0}, []
    with ExitStack() as stack:
        for at, url in urls.items():
            folder = launcher.folder / at
            folder.mkdir()
            heard = Launcher(folder)
            stack.callback(heard.socket.close)
            processes += ranks.start(programs.train_in_the_cloud, 2, url, str(tmp_path), end, str(folder), keys)
            heard.hear_report("waiting")
        time.sleep(12)
        s3.gate.faults = lambda seen: None
        for process in processes:
            process.join()
            assert process.exitcode == 0
