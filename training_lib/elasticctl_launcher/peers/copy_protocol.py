"""The protocol by which one launcher sends a rank's share to another, over TCP.

    receiver -> sender    32 random bytes
    sender -> receiver    a message: the files with name, size and checksum, and 32 random bytes of the sender
    receiver -> sender    a message: {} to continue, or {"refused": why}
    sender -> receiver    the content of the files, one after the other
    receiver -> sender    a message: {} once they are stored, or {"refused": why}

A message consists of its length (4 bytes), JSON, and an HMAC-SHA256 with the key of the job's workers. The HMAC covers
the message's purpose, the reader's random bytes, and the JSON. So both ends prove that they belong to this job, and a
recorded message is not accepted again. The content is not encrypted; its checksums are part of a signed message.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from elasticctl_protocol import variables

NONCE_BYTES = 32
MAX_MESSAGE_BYTES = 8 << 10
MAX_FILES = 2
CHUNK_BYTES = 1 << 20
PATIENCE_S = 30.0
"""How long either end waits for the next bytes from the other."""
_MAC_BYTES = 32
_LENGTH = struct.Struct(">I")
_NAME = re.compile(
    r"[0-9a-f]{16}/data/g\d{6,18}-n\d{6,18}-step\d{9,18}-[\w.-]{1,100}/share-\d{5,9}-of-\d{5,9}\.(json|safetensors)",
    re.ASCII,
)


def read_peer_key() -> bytes:
    """Return the secret that proves to a job's workers that the other end is one of them.

    It is the content of $ELASTICCTL_PEER_KEY_FILE, or the job's token on a cluster that has no such key. Raises
    KeyError, OSError and PeerError.
    """
    path = os.environ.get(variables.PEER_KEY_FILE) or os.environ[variables.TOKEN_FILE]
    key = Path(path).read_bytes().strip()
    if not key:
        raise PeerError(f"the key file {path} is empty")
    return key


class PeerError(Exception):
    """The other launcher refuses, or violates the protocol, or has sent damaged data."""


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file of a share: its path in the folder of copies (`name`), its size, and the CRC-32 of its content.

    Raises PeerError for values that no file of a share has.
    """

    name: str
    size_bytes: int
    crc32: int

    def __post_init__(self) -> None:
        if not (isinstance(self.name, str) and _NAME.fullmatch(self.name)):
            raise PeerError(f"{str(self.name)!r:.100} is not the name of a share's file")
        for number in (self.size_bytes, self.crc32):
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 1 << 62:
                raise PeerError(f"{self.name}: its size or its checksum is not valid")


def send_files(line: socket.socket, key: bytes, folder: Path, files: Sequence[CopiedFile]) -> None:
    """Send files in `folder`; return once they are stored. Raises PeerError and OSError."""
    line.settimeout(PATIENCE_S)
    theirs, mine = receive(line, NONCE_BYTES), secrets.token_bytes(NONCE_BYTES)
    _send_message(line, key, b"offer" + theirs, {"nonce": mine.hex(), "files": [astuple(file) for file in files]})
    _raise_if_refused(_receive_message(line, key, b"accept" + mine))
    for file in files:
        with (folder / file.name).open("rb", buffering=0) as data:
            if line.sendfile(data, 0, file.size_bytes) != file.size_bytes:
                raise PeerError(f"{file.name} has become shorter")
    _raise_if_refused(_receive_message(line, key, b"kept" + mine))


def receive_files(line: socket.socket, key: bytes, folder: Path, refuse: Callable[[int], str]) -> None:
    """Receive files from `send_files` and store them in `folder`, either all of them or none.

    `refuse(size_bytes)` returns why there is no room for that many bytes, or an empty string. Raises PeerError and
    OSError.
    """
    line.settimeout(PATIENCE_S)
    mine = secrets.token_bytes(NONCE_BYTES)
    line.sendall(mine)
    offer = _receive_message(line, key, b"offer" + mine)
    try:
        theirs, rows = bytes.fromhex(offer["nonce"]), offer["files"]
        if len(theirs) != NONCE_BYTES or not isinstance(rows, list) or not 0 < len(rows) <= MAX_FILES:
            raise PeerError("the offer is not that of a share")
        files = [CopiedFile(*row) for row in rows]
    except (KeyError, TypeError, ValueError) as e:
        raise PeerError("the offer is not that of a share") from e
    why_not = refuse(sum(file.size_bytes for file in files))
    _send_message(line, key, b"accept" + theirs, {"refused": why_not} if why_not else {})
    if why_not:
        return
    partial = [(folder / f"{file.name}.{secrets.token_hex(4)}.partial", folder / file.name) for file in files]
    try:
        for file, (path, _) in zip(files, partial, strict=True):
            _receive_file(line, file, path)
        for path, final in partial:
            path.replace(final)
    except (OSError, PeerError) as e:
        if not isinstance(e, (ConnectionError, TimeoutError)):
            _send_message(line, key, b"kept" + theirs, {"refused": str(e)})
        raise
    finally:
        for path, _ in partial:
            path.unlink(missing_ok=True)
    _send_message(line, key, b"kept" + theirs, {})


def _receive_file(line: socket.socket, file: CopiedFile, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    left, crc, chunk = file.size_bytes, 0, memoryview(bytearray(CHUNK_BYTES))
    with path.open("xb", buffering=0) as kept:
        while left:
            count = line.recv_into(chunk[: min(left, CHUNK_BYTES)])
            if not count:
                raise ConnectionResetError("the other launcher has closed the connection")
            crc = zlib.crc32(chunk[:count], crc)
            kept.write(chunk[:count])
            left -= count
    if crc != file.crc32:
        raise PeerError(f"{file.name} was damaged in transit")


def _send_message(line: socket.socket, key: bytes, purpose: bytes, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    line.sendall(_LENGTH.pack(len(data)) + data + hmac.digest(key, purpose + data, hashlib.sha256))


def _receive_message(line: socket.socket, key: bytes, purpose: bytes) -> dict[str, Any]:
    (length,) = _LENGTH.unpack(receive(line, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise PeerError(f"a message of {length} bytes is too long")
    data = receive(line, length)
    if not hmac.compare_digest(receive(line, _MAC_BYTES), hmac.digest(key, purpose + data, hashlib.sha256)):
        raise PeerError("the other end does not know the key of this job's workers")
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise PeerError("a message is not JSON") from e
    if not isinstance(message, dict):
        raise PeerError("a message is not a JSON object")
    return message


def _raise_if_refused(answer: Mapping[str, Any]) -> None:
    if answer.get("refused"):
        raise PeerError(str(answer["refused"])[:200])


def receive(line: socket.socket, size_bytes: int) -> bytes:
    """Return the next `size_bytes` bytes. Raises OSError if the other end closes the connection before."""
    data = bytearray()
    while len(data) < size_bytes:
        part = line.recv(size_bytes - len(data))
        if not part:
            raise ConnectionResetError("the other launcher has closed the connection")
        data += part
    return bytes(data)
