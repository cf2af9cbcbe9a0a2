"""A connection between two workers of one job, over which one runs a command on the other.

    worker -> caller    32 random bytes, once
    caller -> worker    32 random bytes, once
    both                frames: a kind (1 byte), a length (4 bytes), the data, and an HMAC-SHA256 of all this

The key of each direction is derived from the key of the job's workers and the random bytes of both ends. The HMAC also
covers the frame's number. So the first frame proves that its sender belongs to this job, and no frame can be replayed,
removed or inserted. Frames are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import threading
from enum import IntEnum

from elasticctl_launcher.peers.copy_protocol import NONCE_BYTES, PATIENCE_S, PeerError, receive
from elasticctl_launcher.service.client import keep_alive

MAX_FRAME_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
_HEADER = struct.Struct(">BI")
_MAC_BYTES = 32
_TO_WORKER, _TO_CALLER = b"to worker", b"to caller"


class FrameKind(IntEnum):
    """What a frame contains."""

    RUN = 1
    """From the caller, first: a line for the worker's shell."""
    INPUT = 2
    """From the caller; an empty frame marks the end of the input."""
    SIGNAL = 3
    """From the caller: the number of a signal, as decimal digits."""
    OUTPUT = 4
    ERRORS = 5
    EXIT = 6
    """From the worker, last: the exit code, as decimal digits."""


class WorkerConnection:
    """One end of a connection, after the exchange of random bytes. Sends from any thread, receives from one.

    `calls`: this end is the caller. Methods raise PeerError if the other end does not belong to this job, and OSError
    if it has gone.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, calls: bool) -> None:
        self._socket = connected
        connected.settimeout(PATIENCE_S)
        mine = secrets.token_bytes(NONCE_BYTES)
        connected.sendall(mine)
        theirs = receive(connected, NONCE_BYTES)
        nonces = theirs + mine if calls else mine + theirs
        purposes = (_TO_WORKER, _TO_CALLER) if calls else (_TO_CALLER, _TO_WORKER)
        self._send_key, self._receive_key = (hmac.digest(key, each + nonces, hashlib.sha256) for each in purposes)
        self._sent = self._received = 0
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Return the socket's file descriptor, to poll it."""
        return self._socket.fileno()

    def stay_open(self) -> None:
        """Wait for the other end without a limit from now on; TCP keepalive detects that it has gone."""
        self._socket.settimeout(None)
        keep_alive(self._socket)

    def send(self, kind: FrameKind, data: bytes = b"") -> None:
        """Send one frame with at most `MAX_FRAME_BYTES` of data."""
        body = _HEADER.pack(kind, len(data)) + data
        with self._lock:
            self._socket.sendall(body + _mac(self._send_key, self._sent, body))
            self._sent += 1

    def receive(self) -> tuple[FrameKind, bytes]:
        """Return the kind and the data of the next frame."""
        header = receive(self._socket, _HEADER.size)
        number, length = _HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise PeerError(f"a frame of {length} bytes is too long")
        body = header + receive(self._socket, length)
        if not hmac.compare_digest(receive(self._socket, _MAC_BYTES), _mac(self._receive_key, self._received, body)):
            raise PeerError("the other end does not know the key of this job's workers")
        self._received += 1
        try:
            return FrameKind(number), body[_HEADER.size :]
        except ValueError as e:
            raise PeerError(f"a frame of the unknown kind {number}") from e

    def hang_up(self) -> None:
        """End the connection, and every wait for the other end; may be called from any thread."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the connection has already ended


def _mac(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, struct.pack(">Q", number) + body, hashlib.sha256)
