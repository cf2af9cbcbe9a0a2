"""`LocalWorkerAccess`: commands next to the processes of a local worker, with their environment and in their folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Self

import psutil

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.text import quote
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.worker_processes import ENDED, variable_of
from elasticctl.cluster.worker_access import NO_SUCH_PROGRAM, NOT_EXECUTABLE, Streams, copy, write_all
from elasticctl_protocol import variables

HOST = "127.0.0.1"
_OF_TERMINAL = ("TERM", "COLORTERM")


class LocalWorkerAccess:
    """`elasticctl.cluster.worker_access.WorkerAccess` on this machine."""

    def __init__(self, paths: LocalPaths) -> None:
        self._paths = paths

    def run(self, worker: Manifest, argv: Sequence[str], streams: Streams) -> int:
        """Run a command as a child of this process; see `WorkerAccess.run`."""
        process = self._process(worker)
        try:
            folder, environ = process.cwd(), process.environ()
        except psutil.Error as e:
            raise _gone(worker) from e
        environ["PWD"] = folder
        if streams.terminal:
            environ |= {name: os.environ[name] for name in _OF_TERMINAL if name in os.environ}
        sys.stdout.flush()
        with _Interrupts() as interrupts:
            try:
                child = subprocess.Popen(
                    list(argv),
                    cwd=folder,
                    env=environ,
                    stdin=subprocess.DEVNULL if streams.stdin is None else streams.stdin,
                    stdout=streams.stdout,
                    stderr=streams.stdout if streams.terminal else streams.stderr,
                )
            except (OSError, ValueError) as e:  # ValueError: a NUL in a word
                return _not_started(argv[0], e, streams.stderr)
            interrupts.pass_on_to(child)
            code = child.wait()
        return 128 - code if code < 0 else code

    async def forward(
        self, worker: Manifest, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect to a port of this machine, on which the worker listens; see `WorkerAccess.forward`."""
        self._process(worker)
        try:
            from_worker, to_worker = await asyncio.open_connection(HOST, port)
        except OSError as e:
            name = worker["metadata"]["name"]
            raise ConflictError(f"nothing in {name} listens on port {port} ({e.strerror or e})") from e
        try:
            await asyncio.gather(copy(reader, to_worker), copy(from_worker, writer))
        finally:
            to_worker.close()

    def _process(self, worker: Manifest) -> psutil.Process:
        """The worker's own process. Raises NotFoundError if it has ended."""
        uid = str(worker["metadata"]["uid"])
        try:
            report = json.loads((self._paths.pod_dir(uid) / "started.json").read_text("utf-8"))
            process = psutil.Process(int(report["pid"]))
            # Another process may have its pid by now.
            if process.status() in ENDED or variable_of(process, variables.POD_UID) != uid:
                raise _gone(worker)
        except (OSError, ValueError, KeyError, TypeError, psutil.Error) as e:
            raise _gone(worker) from e
        return process


class _Interrupts:
    """Ctrl-C while a command runs is the command's own to handle: from before it starts, since it may be quick."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._early = False

    def __enter__(self) -> Self:
        self._in_main_thread = threading.current_thread() is threading.main_thread()  # the one that gets signals
        if self._in_main_thread:
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_main_thread:
            signal.signal(signal.SIGINT, self._before)

    def pass_on_to(self, child: subprocess.Popen[bytes]) -> None:
        """Send what has come so far to the command, and what comes from now on."""
        self._child = child
        if self._early:
            child.send_signal(signal.SIGINT)

    def _handle(self, number: int, frame: object) -> None:
        if any(map(os.isatty, (0, 1, 2))):
            return  # a terminal has sent it to both
        if self._child is None:
            self._early = True
        else:
            self._child.send_signal(signal.SIGINT)


def _not_started(program: str, error: Exception, stderr: int) -> int:
    """Say why a program cannot be started; returns the code that a shell would."""
    if isinstance(error, FileNotFoundError):
        write_all(stderr, f"there is no program {quote(program)}\n".encode())
        return NO_SUCH_PROGRAM
    why = error.strerror if isinstance(error, OSError) else str(error)
    write_all(stderr, f"cannot start {quote(program)}: {why}\n".encode())
    return NOT_EXECUTABLE


def _gone(worker: Manifest) -> NotFoundError:
    name = worker["metadata"]["name"]
    return NotFoundError(f"{name} has ended. Next: elasticctl status {name.rpartition('-worker-')[0]}")
