"""The collective that a rank is in, read from torch's flight recorder."""

from __future__ import annotations

import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from elasticctl_launcher import bootstrap
from elasticctl_launcher.bootstrap import report_collectives
from elasticctl_launcher.hangs.collectives import Collective, parse, read_collective
from elasticctl_launcher.hangs.rank_location import Kind, StackPlace


def entry(name: str, number: object, group: str = "default_pg", **further: Any) -> dict[str, Any]:
    fields = {"profiling_name": name, "collective_seq_id": number, "process_group": ["0", group], "retired": False}
    return {**fields, "is_p2p": False, **further}


def dump(*entries: object) -> bytes:
    return json.dumps({"version": "2.10", "entries": entries}).encode()


def test_the_first_collective_that_has_not_ended_is_found() -> None:
    ended, sent = entry("gloo:all_reduce", 6, retired=True), entry("gloo:send", 1, is_p2p=True)
    entries = (ended, sent, entry("nccl:all_reduce", 7), entry("nccl:broadcast", 8))
    assert parse([dump(), dump(*entries)]) == Collective("all_reduce", 7)
    assert parse([dump(entry("gloo:all_gather", 3, "mesh_dp"))]) == Collective("all_gather", 3, "mesh_dp")
    assert parse([dump(entry("gloo:all_gather", 3, "undefined"))]) == Collective("all_gather", 3, "0"), "by its number"
    assert parse([dump(ended)]) is None


@pytest.mark.parametrize("odd", [b"[]", b"{}", b'{"entries": 1}', dump(1, None, {}, entry("x", "7"), entry("", None))])
def test_an_unknown_format_is_ignored(odd: bytes) -> None:
    assert parse([odd]) is None


def test_a_collective_extends_the_place_of_a_rank_that_waits() -> None:
    found = Collective("all_reduce", 7, "dp")
    assert found.at(StackPlace(Kind.COLLECTIVE, "barrier")).where == "barrier no. 7 of group dp"
    assert (
        found.at(StackPlace(Kind.DEVICE, "train (a.py:3)")).where == "train (a.py:3), in all_reduce no. 7 of group dp"
    )
    assert found.at(StackPlace(Kind.CODE, "load (a.py:9)")).where == "load (a.py:9)"


def test_a_rank_without_a_collective_or_a_listener_reports_none(tmp_path: Path) -> None:
    path = tmp_path / "c10d.0"
    assert read_collective(path) is None
    path.write_text("left by the rank before")
    report_collectives(str(path))
    assert read_collective(path) is None


def test_the_reporting_thread_takes_no_signals_from_the_script(tmp_path: Path) -> None:
    """The script blocks the signal in all of its own threads, so it must not be delivered to this one."""
    lines = (
        f"import os, signal, sys; sys.path.insert(0, {os.path.dirname(bootstrap.__file__)!r})",
        f"import bootstrap; bootstrap.report_collectives({str(tmp_path / 'c10d.0')!r})",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) and sys.exit(1)  # this thread blocked something",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "sys.exit(3 if signal.sigwait({signal.SIGTERM}) == signal.SIGTERM else 1)",
    )
    assert subprocess.run([sys.executable, "-I", "-c", "\n".join(lines)]).returncode == 3


def test_a_lack_of_descriptors_only_delays_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [errno.EMFILE, errno.ENFILE]
    accept = socket.socket.accept

    def fail(listening: socket.socket) -> object:
        if short:
            raise OSError(short.pop(), "too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail)
    monkeypatch.setattr(bootstrap, "ACCEPT_AGAIN_S", 0.01)
    report_collectives(str(tmp_path / "c10d.0"))
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(60)
        asking.connect(str(tmp_path / "c10d.0"))
        while asking.recv(1 << 16):
            pass  # to the end of the answer
    assert not short


def test_an_answer_that_is_not_json_is_ignored(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "c10d.0"))
        listening.listen()

        def answer() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.sendall(b"{\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert read_collective(tmp_path / "c10d.0") is None
        answering.join()
