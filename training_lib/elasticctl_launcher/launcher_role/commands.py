"""`CommandServer`: runs the launcher program's commands on this worker, in place of sshd.

As with ssh, a command is a line for the shell. It runs in its own session, with this worker's environment. When its
connection ends, it gets SIGTERM, and SIGKILL after a grace period. The kernel kills it if the launcher dies.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from elasticctl_launcher.launcher_role.worker_connection import CHUNK_BYTES, FrameKind, WorkerConnection
from elasticctl_launcher.peers.copy_protocol import PeerError
from elasticctl_launcher.ranks.warm_spares import BOOTSTRAP
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
            self._signal(signal.SIGKILL)  # processes that the command has left behind
        with self._lock:
            code = self._process.wait()
            self._ended.set()
        return 128 - code if code < 0 else code

    def hang_up(self) -> None:
        """End the command as if its caller had gone; return at once."""
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
        """End all commands as if their callers had gone; return at once."""
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
