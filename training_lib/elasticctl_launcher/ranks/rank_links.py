"""The launcher's connections to its ranks.

A rank that has a link can stay in its process when the group changes; `elasticctl_train.inplace.launcher_link` is the
other end.

Pipes show which signals the ranks' Python has handled, to notice a SIGTERM that the launcher has not sent: a script
that handles SIGTERM may save and end with exit code 0, as if it had finished. `bootstrap.report_signals` is the other
end. Ranks that are not Python, or were started without a spare, report nothing.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from elasticctl_launcher.system import serve_connections, start_thread
from elasticctl_protocol.local import LauncherMessage, RankMessage, to_line
from elasticctl_protocol.requests import WIRE

log = logging.getLogger(__name__)


class RankLinks:
    """Listens on a socket in `folder` until `close`. Raises OSError.

    `on_lost(generation, why)`: a rank can no longer reach its peers. `on_declined(generation, why)`: a rank cannot stay
    in its process. Both are called from a thread.
    """

    def __init__(
        self, folder: Path, on_lost: Callable[[int, str], None], on_declined: Callable[[int, str], None]
    ) -> None:
        self.path = os.path.join(str(folder), "link.sock")
        self._on_lost, self._on_declined = on_lost, on_declined
        self._lock = threading.Condition()
        self._attached: dict[int, socket.socket] = {}
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self.path)
        self._server.listen(1024)
        arguments = self._server, self._listen, "link"
        start_thread(serve_connections, *arguments, name="links")

    def are_attached(self, local_ranks: Iterable[int]) -> bool:
        """True if all of these ranks can stay in their processes."""
        with self._lock:
            return self._attached.keys() >= set(local_ranks)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another rank can stay in its process, for `timeout_s` seconds at most."""
        with self._lock:
            self._lock.wait(timeout_s)

    def report_end(self, generation: int) -> None:
        """Report to all ranks that a generation has ended."""
        with self._lock:
            lines = list(self._attached.values())
        for line in lines:
            _send(line, LauncherMessage(over=generation))

    def give_place(self, local_rank: int, environment: Mapping[str, str]) -> None:
        """Give a rank its place in the next generation, as environment variables."""
        with self._lock:
            line = self._attached.get(local_rank)
        if line is not None:
            _send(line, LauncherMessage(place=environment))

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _listen(self, line: socket.socket) -> None:
        with suppress(OSError, ValueError), line.makefile("r") as messages:
            for message in messages:
                self._handle_message(line, WIRE.decode(RankMessage, json.loads(message)))
        self._detach(line)

    def _handle_message(self, line: socket.socket, message: RankMessage) -> None:
        why = message.why or ""
        if message.attach is not None:
            with self._lock:
                self._attached[message.attach] = line
                self._lock.notify_all()
        elif message.lost is not None:
            self._on_lost(message.lost, why)
        elif message.regroup is not None:
            self._on_declined(message.regroup, why)
        elif message.decline is not None:
            self._detach(line)
            self._on_declined(message.decline, why)

    def _detach(self, line: socket.socket) -> None:
        with self._lock:
            self._attached = {rank: other for rank, other in self._attached.items() if other is not line}


def _send(line: socket.socket, message: LauncherMessage) -> None:
    with suppress(OSError):  # the rank has ended
        line.sendall(to_line(message))


READ_BYTES = 1 << 16


class HandledSignals:
    """One pipe for each local rank, in `folder`, until `close`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pipes: dict[int, int] = {}

    def expect(self, local_rank: int) -> None:
        """Prepare for the start of a rank: discard the signals of the previous one.

        If the pipe cannot be created, for example on a full disk, the rank reports nothing.
        """
        if local_rank in self._pipes:
            self.read(local_rank)
            return
        with suppress(OSError):
            path = self._folder / f"signals.{local_rank}"
            os.mkfifo(path, 0o600)
            self._pipes[local_rank] = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self, local_rank: int) -> frozenset[int]:
        """Return the numbers of the signals that the rank has handled since the last call."""
        found: set[int] = set()
        with suppress(KeyError, OSError):  # for example BlockingIOError: the pipe is empty
            while chunk := os.read(self._pipes[local_rank], READ_BYTES):
                found.update(chunk)
        return frozenset(found)

    def close(self) -> None:
        """Close the pipes."""
        while self._pipes:
            os.close(self._pipes.popitem()[1])
