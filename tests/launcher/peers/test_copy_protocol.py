"""Launchers send each other shares: intact, damaged, truncated, and without the key."""

from __future__ import annotations

import hashlib
import hmac
import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticctl_launcher.peers.copy_protocol import MAX_MESSAGE_BYTES, CopiedFile, PeerError, receive_files, send_files

TOKEN = b"right-token"
NAME = f"{'0' * 16}/data/g000001-n000002-step000000003-run/share-00000-of-00002.json"
DATA = bytes(range(256)) * 8192


def offer(folder: Path, data: bytes = DATA) -> CopiedFile:
    (folder / NAME).parent.mkdir(parents=True)
    (folder / NAME).write_bytes(data)
    return CopiedFile(NAME, len(data), zlib.crc32(data))


def between(
    folder: Path, send: Callable[[socket.socket], None], token: bytes = TOKEN, why_not: str = ""
) -> tuple[Exception | None, Exception | None]:
    """Return what the sender and the receiver raise; the receiver stores files in `folder`."""
    ours, theirs = socket.socketpair()
    raised: list[Exception] = []

    def receive() -> None:
        with theirs:
            try:
                receive_files(theirs, token, folder, lambda size_bytes: why_not)
            except (PeerError, OSError) as e:
                raised.append(e)

    thread = threading.Thread(target=receive)
    thread.start()
    failed: Exception | None = None
    with ours:
        try:
            send(ours)
        except (PeerError, OSError) as e:
            failed = e
    thread.join()
    return failed, raised[0] if raised else None


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_a_share_arrives_unchanged(tmp_path: Path) -> None:
    file = offer(tmp_path / "from")
    assert between(tmp_path / "to", lambda line: send_files(line, TOKEN, tmp_path / "from", [file])) == (None, None)
    assert [path.read_bytes() for path in files_in(tmp_path / "to")] == [DATA]


def test_nothing_is_sent_to_a_receiver_without_room(tmp_path: Path) -> None:
    file = offer(tmp_path / "from")
    failed, _ = between(
        tmp_path / "to", lambda line: send_files(line, TOKEN, tmp_path / "from", [file]), why_not="full"
    )
    assert isinstance(failed, PeerError)
    assert str(failed) == "full"
    assert not files_in(tmp_path)[1:]


def test_neither_end_accepts_a_peer_without_the_key(tmp_path: Path) -> None:
    file = offer(tmp_path / "from")
    _, refused = between(tmp_path / "to", lambda line: send_files(line, b"other", tmp_path / "from", [file]))
    assert "does not know the key" in str(refused)

    ours, theirs = socket.socketpair()  # a receiver that does not know the token
    with ours, theirs:
        theirs.sendall(bytes(32))
        theirs.sendall(struct.pack(">I", 2) + b"{}" + bytes(32))
        with pytest.raises(PeerError, match="does not know the key"):
            send_files(ours, TOKEN, tmp_path / "from", [file])
        assert DATA[:1000] not in theirs.recv(1 << 20)


def test_damaged_or_truncated_files_are_not_kept(tmp_path: Path) -> None:
    file = offer(tmp_path / "from")
    (tmp_path / "from" / NAME).write_bytes(DATA[:-1] + b"!")
    failed, _ = between(tmp_path / "to", lambda line: send_files(line, TOKEN, tmp_path / "from", [file]))
    assert "damaged" in str(failed)
    (tmp_path / "from" / NAME).write_bytes(DATA[:-1])
    failed, refused = between(tmp_path / "to", lambda line: send_files(line, TOKEN, tmp_path / "from", [file]))
    assert "shorter" in str(failed)
    assert isinstance(refused, ConnectionResetError)
    assert not files_in(tmp_path / "to")


@pytest.mark.parametrize(
    "message",
    [
        b"[]",
        b"{",
        b"[" * 5000,
        b'{"nonce": "00", "files": []}',
        *(
            json.dumps({"nonce": "00" * 32, "files": files}).encode()
            for files in (
                [],
                7,
                [[NAME, 1, 1]] * 3,
                [["../" + NAME, 1, 1]],
                [[NAME.replace("run", "r/../../n"), 1, 1]],
                [[NAME + "\n", 1, 1]],
                [[NAME, -1, 1]],
                [[NAME, 1 << 63, 1]],
                [[NAME, True, 1]],
                [[NAME, 1]],
                [NAME],
            )
        ),
    ],
)
def test_an_invalid_offer_is_refused_even_with_the_key(tmp_path: Path, message: bytes) -> None:
    def send(line: socket.socket) -> None:
        signed = b"offer" + line.recv(32, socket.MSG_WAITALL) + message
        line.sendall(struct.pack(">I", len(message)) + message + hmac.digest(TOKEN, signed, hashlib.sha256))
        line.recv(1)

    _, refused = between(tmp_path, send)
    assert isinstance(refused, PeerError)
    assert not files_in(tmp_path)


def test_a_message_that_is_too_long_is_refused(tmp_path: Path) -> None:
    def send(line: socket.socket) -> None:
        line.sendall(struct.pack(">I", MAX_MESSAGE_BYTES + 1))
        line.recv(1 << 10)

    _, refused = between(tmp_path, send)
    assert "too long" in str(refused)
