"""`CommandServer`: runs the launcher program's commands on this worker, in place of sshd.

As with ssh, a command is a line for the shell. It runs in its own session, with this worker's environment. When its
connection ends, it gets SIGTERM, and SIGKILL after a grace period. The kernel kills it if the launcher dies.

The connection:

    worker -> caller    32 random bytes, once
    caller -> worker    32 random bytes, once
    both                frames: a kind (1 byte), a length (4 bytes), the data, and an HMAC-SHA256 of all this

The key of each direction is derived from the key of the job's workers and the random bytes of both ends. The HMAC also
covers the frame's number. So the first frame proves that its sender belongs to this job, and no frame can be replayed,
removed or inserted. Frames are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import IO

from elasticctl_launcher.peers.copy_protocol import NONCE_BYTES, PATIENCE_S, PeerError, receive
from elasticctl_launcher.ranks.warm_spares import BOOTSTRAP
from elasticctl_launcher.service.client import keep_alive
from elasticctl_launcher.system import serve_connections, start_thread

MAX_CONNECTIONS = 512
FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that a caller forwards to its command."""

CANNOT_START = 126
_HUNG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)
"""The event of a socket whose other end has gone. It comes before the data that was sent until then has been read."""

log = logging.getLogger(__name__)


class _Command:
    """A process in its own session, started for the caller at the other end of `line`; `run` waits for its end.

    The process is reaped last, so that no other process gets the number of its session meanwhile. Raises OSError if it
    cannot be started.
    """

    def __init__(
        self, line: WorkerConnection, words: str, environ: Mapping[str, str], folder: Path, grace_s: float
    ) -> None:
        self._line, self._grace_s = line, grace_s
        self._ended, self._hung_up, self._lock = threading.Event(), False, threading.Lock()
        pipe = subprocess.PIPE
        argv = [sys.executable, "-I", "-S", BOOTSTRAP, str(os.getpid()), "exec", "/bin/sh", "-c", words]
        self._process = subprocess.Popen(
            argv, env=environ, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0
        )
        self.pid = self._process.pid

    def run(self) -> int:
        """Wait for the end of the process and of its output; return the exit code in the shell's form.

        Call this from the thread that created the object, because the kernel ties the process to that thread.
        """
        obey = threading.Thread(target=self._obey, daemon=True)
        pumps = [
            threading.Thread(target=self._pump, args=(pipe, kind), daemon=True)
            for pipe, kind in ((self._process.stdout, FrameKind.OUTPUT), (self._process.stderr, FrameKind.ERRORS))
        ]
        for thread in (obey, *pumps):
            thread.start()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        for pump in pumps:
            pump.join()  # like sshd, wait for processes that inherited the output, while the caller is there
        if self._hung_up:
            self._signal(signal.SIGKILL)  # processes that the command has left running
        with self._lock:
            code = self._process.wait()
            self._ended.set()
        return 128 - code if code < 0 else code

    def hang_up(self) -> None:
        """End the command as if its caller had gone; return immediately."""
        self._line.hang_up()

    def wait(self, timeout_s: float) -> None:
        """Wait for the command's end, for `timeout_s` seconds at most."""
        self._ended.wait(timeout_s)

    def _obey(self) -> None:
        """Forward input and signals until the connection ends; then end the command."""
        stdin = self._process.stdin
        try:
            while True:
                kind, data = self._line.receive()
                if kind is FrameKind.INPUT and stdin is not None:
                    with suppress(BrokenPipeError, ValueError):  # the command no longer reads
                        self._feed(stdin, data) if data else stdin.close()
                elif kind is FrameKind.SIGNAL and int(data) in FORWARDED:
                    self._signal(int(data))
        except (OSError, PeerError, ValueError):
            self._hung_up = True
            self._line.hang_up()
        self._signal(signal.SIGTERM)
        if not self._ended.wait(self._grace_s):
            self._signal(signal.SIGKILL)
        if stdin is not None:
            with suppress(BrokenPipeError):
                stdin.close()

    def _feed(self, stdin: IO[bytes], data: bytes) -> None:
        """Write to the command's input. Raises ConnectionResetError if the caller has gone before all is written.

        If the caller has sent more than sockets buffer, its end is noticed only once its kernel gives up, in a minute
        or two.
        """
        os.set_blocking(stdin.fileno(), False)
        poll, left = select.poll(), memoryview(data)
        poll.register(stdin, select.POLLOUT)
        poll.register(self._line, _HUNG_UP)
        while left:
            if any(descriptor == self._line.fileno() for descriptor, _ in poll.poll()):
                raise ConnectionResetError("the caller has closed the connection")
            left = left[stdin.write(left) or 0 :]

    def _pump(self, pipe: IO[bytes], kind: FrameKind) -> None:
        with contextlib.closing(pipe), suppress(OSError):
            while data := os.read(pipe.fileno(), CHUNK_BYTES):
                self._line.send(kind, data)

    def _signal(self, number: int) -> None:
        """Send a signal to every process in the command's session."""
        with self._lock, suppress(ProcessLookupError, PermissionError):
            if not self._ended.is_set():
                os.killpg(self.pid, number)


class CommandServer:
    """Listens on TCP at `host` until `close`, for callers that know the key from `read_key()`. Raises OSError.

    Commands run in `folder` with the environment `environ`, and have `grace_s` seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self, host: str, read_key: Callable[[], bytes], environ: Mapping[str, str], folder: Path, grace_s: float
    ) -> None:
        self._read_key, self._environ, self._folder, self._grace_s = read_key, dict(environ), folder, grace_s
        self._lock = threading.Lock()
        self._running: list[_Command] = []
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._server = socket.create_server((host, 0), family=family, backlog=MAX_CONNECTIONS)
        self.port: int = self._server.getsockname()[1]
        arguments = self._server, self._serve, "command", MAX_CONNECTIONS
        start_thread(serve_connections, *arguments, name="commands")

    def own_pids(self) -> set[int]:
        """Return the ids of the processes that this server has started and waits for."""
        with self._lock:
            return {command.pid for command in self._running}

    def end_commands(self) -> None:
        """End all commands as if their callers had gone; return immediately."""
        with self._lock:
            for command in self._running:
                command.hang_up()

    def close(self) -> None:
        """Stop listening, end all commands, and wait for their end."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.end_commands()
        with self._lock:
            left = list(self._running)
        for command in left:
            command.wait(self._grace_s + 1.0)

    def _serve(self, connected: socket.socket) -> None:
        try:
            line = WorkerConnection(connected, self._read_key(), calls=False)
            kind, words = line.receive()
            if kind is FrameKind.RUN:
                line.stay_open()
                line.send(FrameKind.EXIT, str(self._run(line, os.fsdecode(words))).encode())
        except PeerError as error:
            log.warning("a command from another worker was refused: %s", error)
        except OSError:
            return  # the caller has gone, and its command has ended

    def _run(self, line: WorkerConnection, words: str) -> int:
        try:
            command = _Command(line, words, self._environ, self._folder, self._grace_s)
        except (OSError, ValueError) as error:
            line.send(FrameKind.ERRORS, f"elasticctl: cannot start a command: {error}\n".encode())
            return CANNOT_START
        with self._lock:
            self._running.append(command)
        try:
            return command.run()
        finally:
            with self._lock:
                self._running.remove(command)


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
