"""The collective that a rank is in, as torch's flight recorder has it."""

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
    told = {"profiling_name": name, "collective_seq_id": number, "process_group": ["0", group], "retired": False}
    return {**told, "is_p2p": False, **further}


def dump(*entries: object) -> bytes:
    return json.dumps({"version": "2.10", "entries": entries}).encode()


def test_it_is_the_first_that_has_not_ended() -> None:
    ended, sent = entry("gloo:all_reduce", 6, retired=True), entry("gloo:send", 1, is_p2p=True)
    entries = (ended, sent, entry("nccl:all_reduce", 7), entry("nccl:broadcast", 8))
    assert parse([dump(), dump(*entries)]) == Collective("all_reduce", 7)
    assert parse([dump(entry("gloo:all_gather", 3, "mesh_dp"))]) == Collective("all_gather", 3, "mesh_dp")
    assert parse([dump(entry("gloo:all_gather", 3, "undefined"))]) == Collective("all_gather", 3, "0"), "by its name"
    assert parse([dump(ended)]) is None


@pytest.mark.parametrize("odd", [b"[]", b"{}", b'{"entries": 1}', dump(1, None, {}, entry("x", "7"), entry("", None))])
def test_a_format_that_is_not_known_tells_nothing(odd: bytes) -> None:
    assert parse([odd]) is None


def test_who_waits_for_the_device_is_said_to_be_in_it_too() -> None:
    found = Collective("all_reduce", 7, "dp")
    assert found.at(StackPlace(Kind.COLLECTIVE, "barrier")).where == "barrier no. 7 of group dp"
    assert (
        found.at(StackPlace(Kind.DEVICE, "train (a.py:3)")).where == "train (a.py:3), in all_reduce no. 7 of group dp"
    )
    assert found.at(StackPlace(Kind.CODE, "load (a.py:9)")).where == "load (a.py:9)"


def test_a_rank_that_is_in_none_or_has_gone_tells_nothing(tmp_path: Path) -> None:
    path = tmp_path / "c10d.0"
    assert read_collective(path) is None
    path.write_text("left by the rank before")
    report_collectives(str(path))
    assert read_collective(path) is None


def test_a_script_may_wait_for_a_signal_that_it_blocks(tmp_path: Path) -> None:
    """The thread that tells is not there for the script, whose own threads all block it."""
    lines = (
        f"import os, signal, sys; sys.path.insert(0, {os.path.dirname(bootstrap.__file__)!r})",
        f"import bootstrap; bootstrap.report_collectives({str(tmp_path / 'c10d.0')!r})",
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}) and sys.exit(1)  # this thread blocked something",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "sys.exit(3 if signal.sigwait({signal.SIGTERM}) == signal.SIGTERM else 1)",
    )
    assert subprocess.run([sys.executable, "-I", "-c", "\n".join(lines)]).returncode == 3


def test_a_rank_that_was_out_of_descriptors_tells_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_is_no_json_tells_nothing(tmp_path: Path) -> None:
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
