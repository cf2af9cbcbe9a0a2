"""What every `WorkerAccess` does. A module per implementation subclasses the contract and gives it a `running`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from elasticctl.api.errors import ConflictError, NotFoundError
from elasticctl.cluster.base import Manifest
from elasticctl.cluster.worker_access import Streams, WorkerAccess

MARK = "MARK"
"""A variable of the worker, whose value is `here it is`."""


@dataclass
class RunningWorker:
    """A worker that runs, and the folder in which it does."""

    access: WorkerAccess
    worker: Manifest
    folder: Path

    def run(self, *argv: str, given: bytes | None = None) -> tuple[int, bytes, bytes]:
        """Run a command with something to read; returns its exit code, stdout and stderr."""
        with file_of(given or b"") as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            streams = Streams(None if given is None else stdin.fileno(), out.fileno(), err.fileno())
            code = self.access.run(self.worker, argv, streams)
            return code, content(out), content(err)


@contextmanager
def file_of(data: bytes) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file


def content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


class WorkerAccessContract:
    """Inherit, and define a fixture `running`: a worker in whose environment MARK is `here it is`."""

    def test_a_command_has_the_workers_environment_and_prints_to_both_streams(self, running: RunningWorker) -> None:
        script = f'printf %s "${MARK}"; echo aside >&2; exit 3'
        assert running.run("sh", "-c", script) == (3, b"here it is", b"aside\n")
        assert running.run("true") == (0, b"", b"")

    def test_words_arrive_as_they_were_typed(self, running: RunningWorker) -> None:
        words = ("a b", "", "'", '"', "$HOME", "*", "ä\n", "&x=1+1%41", "--")
        code, out, _ = running.run("printf", "%s|", *words)
        assert (code, out.decode()) == (0, "".join(f"{word}|" for word in words))

    def test_input_arrives_whole_and_ends(self, running: RunningWorker) -> None:
        data = random.Random(1).randbytes(300_000)
        assert running.run("cat", given=data) == (0, data, b"")
        assert running.run("cat") == (0, b"", b"")

    def test_unread_input_blocks_nothing(self, running: RunningWorker) -> None:
        reading, writing = os.pipe()
        try:
            with tempfile.TemporaryFile() as out:
                assert running.access.run(running.worker, ["echo", "done"], Streams(reading, out.fileno(), 2)) == 0
                assert content(out) == b"done\n"
        finally:
            os.close(reading)
            os.close(writing)

    def test_a_command_that_a_signal_ends(self, running: RunningWorker) -> None:
        assert running.run("sh", "-c", "kill -KILL $$")[0] == 128 + signal.SIGKILL

    def test_a_program_that_is_not_there(self, running: RunningWorker) -> None:
        code, out, err = running.run("no-such-program", "-x")
        assert (code, out) == (127, b"")
        assert b"no-such-program" in err

    def test_a_worker_that_is_gone(self, running: RunningWorker) -> None:
        gone = {**running.worker, "metadata": {**running.worker["metadata"], "uid": "another"}}
        with pytest.raises(NotFoundError, match=r"has ended. Next: elasticctl status \w+$"):
            running.access.run(gone, ["true"], Streams())

    def test_a_port_of_the_worker(self, running: RunningWorker) -> None:
        data = random.Random(1).randbytes(200_000)
        with echo_server() as port:
            assert asyncio.run(through(running, port, data)) == data

    def test_a_port_on_which_nothing_listens(self, running: RunningWorker) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with pytest.raises(ConflictError, match=str(port)):
            asyncio.run(through(running, port, b"x"))


@contextmanager
def echo_server() -> Iterator[int]:
    """A port that gives back what it gets."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


async def through(running: RunningWorker, port: int, data: bytes) -> bytes:
    """What comes back of `data` from a port of the worker."""
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await running.access.forward(running.worker, port, reader, writer)
            done.set_result(None)
        except Exception as e:  # noqa: BLE001 - the test's own to judge
            done.set_exception(e)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname()[:2])
        try:
            writer.write(data)
            reading = asyncio.ensure_future(reader.readexactly(len(data)))
            await asyncio.wait((reading, done), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()
                await done
        finally:
            writer.close()
            await writer.wait_closed()
        await done
        return reading.result()
