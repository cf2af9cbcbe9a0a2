"""The copies in a launcher's memory: those of its own ranks and of another launcher."""

from __future__ import annotations

import contextlib
import json
import socket
import zlib
from pathlib import Path
from typing import Any

import pytest

from elasticctl_launcher.peers import copy_holder
from elasticctl_launcher.peers.copy_holder import ALONE, CopyHolder, delete_old_saves, find_peer
from elasticctl_launcher.peers.copy_protocol import PeerError
from elasticctl_protocol.requests import Member
from tests.support.waiting import wait_until

SHARE = "share-00000-of-00001.json"


def name_of(number: int) -> str:
    return f"{'a' * 16}/data/g000001-n{number:06d}-step{number:09d}-run/{SHARE}"


def ask(holder: CopyHolder, message: dict[str, Any]) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(holder.path)
        line.sendall(json.dumps(message).encode() + b"\n")
        answer: dict[str, Any] = json.loads(line.makefile().readline())
        return answer


def holder_in(tmp_path: Path, name: str, stack: contextlib.ExitStack) -> CopyHolder:
    holder = CopyHolder("127.0.0.1", str(tmp_path / f"{name}.sock"), tmp_path / name, lambda: b"token")
    return stack.enter_context(contextlib.closing(holder))


def copy(holder: CopyHolder, number: int) -> str:
    """Have a copy sent; return why that failed, or an empty string."""
    path = holder.folder / name_of(number)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"data")
    assert "refused" not in ask(holder, {"copied": [[name_of(number), 4, zlib.crc32(b"data")]]})
    wait_until(lambda: not ask(holder, {"state": True})["sending"])
    return str(ask(holder, {"state": True})["lack"])


def test_copies_are_sent_to_the_next_launcher_which_keeps_two(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        mine, other = holder_in(tmp_path, "mine", stack), holder_in(tmp_path, "other", stack)
        assert copy(mine, 1) == ALONE
        mine.join_group(lambda: other.address)
        assert [copy(mine, number) for number in (2, 3, 4)] == ["", "", ""]
        kept = {str(path.relative_to(other.folder)) for path in other.folder.rglob("*.json")}
        assert kept >= {name_of(3), name_of(4)}
        delete_old_saves(other.folder / ("a" * 16))
        assert not (other.folder / name_of(2)).exists()
        assert "refused" in ask(mine, {"copied": [["/etc/passwd", 4, 1]]})


def test_a_lack_of_memory_is_refused_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(str(copy_holder.MARGIN_BYTES + 3_000_000))
    (tmp_path / "memory.current").write_text("2000000")
    monkeypatch.setattr(copy_holder, "CGROUP", tmp_path)
    with contextlib.ExitStack() as stack:
        mine, other = holder_in(tmp_path, "mine", stack), holder_in(tmp_path, "other", stack)
        mine.join_group(lambda: other.address)
        assert "0 MB are left" in ask(mine, {"room": 5_000_000})["refused"]
        (tmp_path / "memory.current").write_text(str(copy_holder.MARGIN_BYTES + 3_000_000))
        assert "do not fit in the host's memory" in copy(mine, 1)
        assert not list(other.folder.rglob("*.json"))


def test_a_copy_is_sent_to_another_host_if_there_is_one() -> None:
    hosts = [Member(host=host, name=host) for host in ("a", "a", "b")]
    addresses = {0: "a:1", 1: "a:2", 2: "b:3"}
    assert [find_peer(hosts, number, addresses.get) for number in range(3)] == [("b", 3), ("b", 3), ("a", 1)]
    assert find_peer(hosts[:2], 0, addresses.get) == ("a", 2)
    assert find_peer(hosts[:1], 0, addresses.get) is None
    with pytest.raises(PeerError, match="does not accept copies"):
        find_peer(hosts, 0, {}.get)
