"""The shim: output with times, exits with their reasons, and no loss of either for want of a disk."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticctl.api.codec import from_rfc3339
from elasticctl.cluster.base import LogQuery
from elasticctl.cluster.local.logs import GAP, LogFile, Tail
from elasticctl_controller.local import shim
from tests.support.processes import has_ended
from tests.support.waiting import wait_until


@pytest.fixture
def pod_dir(tmp_path: Path) -> Path:
    return tmp_path


def start(pod_dir: Path, *argv: str, cwd: str = "/") -> subprocess.Popen[bytes]:
    order = {"argv": argv, "cwd": cwd, "terminationLog": str(pod_dir / "termination-log")}
    (pod_dir / "start.json").write_text(json.dumps(order))
    with tempfile.TemporaryFile() as environment:
        environment.write(json.dumps(dict(os.environ)).encode())
        environment.seek(0)
        return subprocess.Popen([sys.executable, "-I", shim.__file__, str(pod_dir)], stdin=environment)


def run(pod_dir: Path, script: str) -> dict[str, Any]:
    assert start(pod_dir, "sh", "-c", script).wait() == 0
    return exit_of(pod_dir)


def exit_of(pod_dir: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((pod_dir / "exit.json").read_text())
    return report


def lines(pod_dir: Path) -> list[str]:
    log = Tail(LogFile("w", "uid", ended=False), pod_dir / "log", LogQuery(), stored=None)
    return [line.text for line in log.read()]


def test_output_is_kept_in_order_line_by_line_with_times(pod_dir: Path) -> None:
    run(pod_dir, "echo out; echo err >&2; echo; printf 'no newline'")
    assert lines(pod_dir) == ["out", "err", "", "no newline"]
    stamps = [from_rfc3339(line.split(" ")[0]) for line in (pod_dir / "log").read_text().splitlines()]
    assert stamps == sorted(stamps)  # type: ignore[type-var]
    assert (pod_dir / "log").stat().st_mode & 0o777 == 0o600


def test_much_output_arrives_whole(pod_dir: Path) -> None:
    run(pod_dir, "seq 50000")
    assert lines(pod_dir) == [str(number) for number in range(1, 50001)]


def test_bytes_that_are_no_text_and_endless_lines_do_no_harm(pod_dir: Path) -> None:
    run(pod_dir, r"printf '\377\376\n'; head -c 100000 /dev/zero | tr '\0' x")
    first, *rest = lines(pod_dir)
    assert first == "\ufffd\ufffd"
    assert "".join(rest) == "x" * 100000


@pytest.mark.parametrize(
    ("script", "exit_code", "number"),
    [("exit 0", 0, None), ("exit 3", 3, None), ("kill -9 $$", 137, 9), ("kill -SEGV $$", 139, 11)],
)
def test_exit_codes_are_those_of_a_container(pod_dir: Path, script: str, exit_code: int, number: int | None) -> None:
    report = run(pod_dir, script)
    assert (report["exitCode"], report["signal"]) == (exit_code, number)


def test_a_termination_message_is_passed_on_up_to_its_limit(pod_dir: Path) -> None:
    report = run(pod_dir, f"head -c 9000 /dev/zero | tr '\\0' m > '{pod_dir}/termination-log'; exit 1")
    assert report["message"] == "m" * shim.MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    ("argv", "cwd", "said"),
    [
        (["no-such-program"], "/", "cannot start 'no-such-program': there is no such program on the PATH"),
        (["/no/such/program"], "/", "cannot start '/no/such/program': No such file or directory"),
        (["/etc/passwd"], "/", "cannot start '/etc/passwd': Permission denied"),
        (["true"], "/no/such/folder", "cannot start 'true': the working directory /no/such/folder does not exist"),
    ],
)
def test_a_worker_that_cannot_be_started_reports_why(pod_dir: Path, argv: list[str], cwd: str, said: str) -> None:
    start(pod_dir, *argv, cwd=cwd).wait()
    report = exit_of(pod_dir)
    assert (report["exitCode"], report["reason"], report["message"]) == (127, "StartError", said)
    assert lines(pod_dir) == [said]
    assert not (pod_dir / "started.json").exists()


def test_sigterm_reaches_the_worker_alone(pod_dir: Path) -> None:
    """As in a container: the worker decides about its children, which may hold what it is about to save."""
    process = start(
        pod_dir, "sh", "-c", "sleep 1000 & trap 'kill -0 $! && echo child lives; exit 5' TERM; echo up; wait"
    )
    wait_until(lambda: lines(pod_dir) == ["up"])
    process.send_signal(signal.SIGTERM)
    process.wait()
    assert lines(pod_dir) == ["up", "child lives"]
    assert exit_of(pod_dir)["exitCode"] == 5


def test_the_worker_starts_with_the_usual_signal_handlers(pod_dir: Path) -> None:
    run(pod_dir, "grep -E 'Sig(Ign|Blk)' /proc/self/status")
    standard = (1 << 31) - 1  # 32 and above belong to the C library and to the process that started the tests
    assert {int(line.split()[1], 16) & standard for line in lines(pod_dir)} == {0}


def test_the_worker_dies_with_the_shim(pod_dir: Path) -> None:
    process = start(pod_dir, "sleep", "1000")
    wait_until((pod_dir / "started.json").exists)
    worker = psutil.Process(json.loads((pod_dir / "started.json").read_text())["pid"])
    process.kill()
    process.wait()
    wait_until(lambda: has_ended(worker))
    assert not (pod_dir / "exit.json").exists()


def test_an_output_that_another_process_holds_open_does_not_delay_the_end(pod_dir: Path) -> None:
    process = start(pod_dir, "sh", "-c", f"until [ -e '{pod_dir}/go' ]; do sleep 0.05; done")
    wait_until((pod_dir / "started.json").exists)
    worker = json.loads((pod_dir / "started.json").read_text())["pid"]
    with open(f"/proc/{worker}/fd/1", "wb"):  # the pipe's other end, outside of the worker's tree
        (pod_dir / "go").touch()
        assert process.wait() == 0
    assert exit_of(pod_dir)["exitCode"] == 0


def test_a_full_disk_costs_log_lines_and_nothing_else(pod_dir: Path) -> None:
    (pod_dir / "log").symlink_to("/dev/full")
    report = run(pod_dir, "seq 1000; exit 0")
    assert report["exitCode"] == 0


class FullThenFree:
    """A log file whose disk is full for the first writes, the first of them half done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = [5, 0]
        self._write = os.write
        monkeypatch.setattr(os, "write", self.write)

    def write(self, file: int, text: bytes) -> int:
        if not self.room:
            return self._write(file, text)
        room = self.room.pop(0)
        if not room:
            raise OSError(28, "No space left on device")
        return self._write(file, text[:room])


def test_lost_lines_are_counted_once_there_is_room_again(pod_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = shim.Log(str(pod_dir / "log"))
    FullThenFree(monkeypatch)
    log.add(b"one\ntwo\n")
    log.add(b"three\n")
    log.add(b"four\n")
    log.add(b"five\n")
    assert lines(pod_dir) == ["elasticctl: 3 lines were lost because the disk was full", "four", "five"]


@pytest.fixture
def chatty(pod_dir: Path, monkeypatch: pytest.MonkeyPatch) -> shim.Log:
    """A log whose files have four lines each."""
    monkeypatch.setattr(shim, "MAX_LOG_BYTES", 4 * len("2026-01-01T00:00:00.000000Z 1000\n"))
    return shim.Log(str(pod_dir / "log"))


def test_a_long_log_keeps_its_beginning_and_its_end(pod_dir: Path, chatty: shim.Log) -> None:
    tail = Tail(LogFile("w", "u", True), pod_dir / "log", LogQuery(), None)
    for number in range(1000, 1041):
        chatty.add(b"%d\n" % number)
    kept = [str(number) for number in (*range(1000, 1004), *range(1028, 1041))]
    assert [line.text for line in tail.read()] == [*kept[:4], GAP, *kept[4:]]
    assert sorted(path.name for path in pod_dir.glob("log*")) == ["log", "log.10", "log.7", "log.8", "log.9"]


@pytest.mark.parametrize("every", [1, 3, 7, 40])
def test_a_reader_follows_from_file_to_file(pod_dir: Path, chatty: shim.Log, every: int) -> None:
    """It loses lines only if it is slower than five files, and says so."""
    tail, seen = Tail(LogFile("w", "u", False), pod_dir / "log", LogQuery(), None), list[str]()
    for number in range(1000, 1041):
        chatty.add(b"%d\n" % number)
        if number % every == 0:
            seen += [line.text for line in tail.read()]
    seen += [line.text for line in tail.read()]
    assert (GAP in seen) == (every == 40)
    assert seen[-13:] == [str(number) for number in range(1028, 1041)]
    if every < 40:
        assert seen == [str(number) for number in range(1000, 1041)]


@pytest.mark.parametrize("tail", [0, 1, 2, 5, 12, 13, 15, 100])
def test_the_last_lines_are_in_several_files(pod_dir: Path, chatty: shim.Log, tail: int) -> None:
    for number in range(1000, 1041):
        chatty.add(b"%d\n" % number)
    kept = [str(number) for number in (*range(1000, 1004), *range(1028, 1041))]
    found = [line.text for line in Tail(LogFile("w", "u", True), pod_dir / "log", LogQuery(tail=tail), None).read()]
    assert [text for text in found if text != GAP] == kept[len(kept) - min(tail, len(kept)) :]
    assert (GAP in found) == (tail > 13)


def test_a_moment_is_found_in_several_files(pod_dir: Path, chatty: shim.Log, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for number in range(1000, 1041):
            patch.setattr(time, "time", lambda at=number: float(at))
            chatty.add(b"%d\n" % number)
    for since in (990.0, 1002.0, 1020.0, 1030.0, 1040.0, 2000.0):
        query = LogQuery(since=since)
        found = [line.text for line in Tail(LogFile("w", "u", True), pod_dir / "log", query, None).read()]
        kept = [str(number) for number in (*range(1000, 1004), *range(1028, 1041)) if number >= since]
        assert [text for text in found if text != GAP] == kept
        assert (GAP in found) == (since < 1028)


@pytest.fixture(autouse=True)
def no_children_left() -> Iterator[None]:
    """A test leaves no process that was not there before it: servers that tests share are."""
    before = psutil.Process().children()
    yield
    after = [child for child in psutil.Process().children() if child not in before]
    assert [child for child in after if not has_ended(child)] == []
