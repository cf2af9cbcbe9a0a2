"""`WorkerAccess`: what the client does in a worker that runs: it runs commands there, and connects to ports.

Two implementations, `LocalWorkerAccess` and `KubeWorkerAccess`, pass one contract test
(tests/support/worker_access_contract). A worker is its pod's manifest, as `Cluster.pods_of` returns it: every act
applies to that incarnation, or fails. A command has the worker's environment and runs in the folder in which the
worker runs its script.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from elasticctl.api.codec import Manifest

NO_SUCH_PROGRAM, NOT_EXECUTABLE = 127, 126
"""The exit codes of a shell for programs that it cannot start."""
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Streams:
    """What a command reads and prints, as file descriptors; `stdin` None: nothing to read.

    `terminal`: it runs on a terminal, which `stdin` and `stdout` are, and prints to that alone.
    """

    stdin: int | None = None
    stdout: int = 1
    stderr: int = 2
    terminal: bool = False


class WorkerAccess(Protocol):
    """Every method may raise UnreachableError, and NotFoundError for a worker that is gone."""

    def run(self, worker: Manifest, argv: Sequence[str], streams: Streams) -> int:
        """Run a command and return its exit code: 128 + N for one that signal N has ended, 127 for no such program.

        Raises ForbiddenError, which names the missing right.
        """

    async def forward(
        self, worker: Manifest, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Connect to a port of the worker and forward both directions, until one side closes.

        Raises what `run` does, and ConflictError where nothing listens on the port.
        """


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`; raises OSError."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy to the end of `reader`, and pass that on."""
    with suppress(OSError):  # one of the two has gone
        while data := await reader.read(BLOCK_BYTES):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()
