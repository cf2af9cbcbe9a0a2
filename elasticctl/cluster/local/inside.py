"""`LocalInside`: commands beside the processes of a local worker, with their environment and in their folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import psutil

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.api.text import quote
from elasticctl.cluster.inside import NO_SUCH_PROGRAM, NOT_EXECUTABLE, Streams, copy, write_all
from elasticctl.cluster.local.paths import POD_UID_VARIABLE, LocalPaths
from elasticctl.cluster.local.worker_processes import ENDED, variable_of

HOST = "127.0.0.1"
_OF_TERMINAL = ("TERM", "COLORTERM")


class LocalInside:
    """`elasticctl.cluster.inside.Inside` on this machine."""

    def __init__(self, paths: LocalPaths) -> None:
        self._paths = paths

    def run(self, worker: Manifest, argv: Sequence[str], streams: Streams) -> int:
        """Run a command as a child of this process; see `Inside.run`."""
        process = self._process(worker)
        try:
            folder, environ = process.cwd(), process.environ()
        except psutil.Error as e:
            raise _gone(worker) from e
        environ["PWD"] = folder
        if streams.terminal:
            environ |= {name: os.environ[name] for name in _OF_TERMINAL if name in os.environ}
        sys.stdout.flush()
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
        return _wait(child)

    async def carry(
        self, worker: Manifest, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect to a port of this machine, on which the worker listens; see `Inside.carry`."""
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
            if process.status() in ENDED or variable_of(process, POD_UID_VARIABLE) != uid:
                raise _gone(worker)
        except (OSError, ValueError, KeyError, TypeError, psutil.Error) as e:
            raise _gone(worker) from e
        return process


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for a command; Ctrl-C is its own to handle. Returns its exit code as a shell tells it."""
    while True:
        try:
            code = child.wait()
        except KeyboardInterrupt:
            # A terminal has sent it to both; a signal to this process alone is passed on.
            if not any(map(os.isatty, (0, 1, 2))):
                child.send_signal(signal.SIGINT)
            continue
        return 128 - code if code < 0 else code


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
