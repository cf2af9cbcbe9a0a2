"""The launcher's connections to its ranks. A rank that has one can stay in its process when the group changes.

`elasticctl_train.inplace.launcher_link` is the other end, and describes the messages.
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
from typing import Any

from elasticctl_launcher.system import serve_connections, start_thread

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

    def say_over(self, generation: int) -> None:
        """Tell all ranks that a generation has ended."""
        with self._lock:
            lines = list(self._attached.values())
        for line in lines:
            _send(line, {"over": generation})

    def give_place(self, local_rank: int, environment: Mapping[str, str]) -> None:
        """Tell a rank its place in the next generation, as environment variables."""
        with self._lock:
            line = self._attached.get(local_rank)
        if line is not None:
            _send(line, {"place": dict(environment)})

    def close(self) -> None:
        """Stop listening."""
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _listen(self, line: socket.socket) -> None:
        with suppress(OSError, ValueError, KeyError, TypeError), line.makefile("r") as messages:
            for message in messages:
                self._hear(line, json.loads(message))
        self._detach(line)

    def _hear(self, line: socket.socket, message: Mapping[str, Any]) -> None:
        if "attach" in message:
            with self._lock:
                self._attached[int(message["attach"])] = line
                self._lock.notify_all()
        elif "lost" in message:
            self._on_lost(int(message["lost"]), str(message["why"]))
        elif "regroup" in message:
            self._on_declined(int(message["regroup"]), str(message["why"]))
        elif "decline" in message:
            self._detach(line)
            self._on_declined(int(message["decline"]), str(message["why"]))

    def _detach(self, line: socket.socket) -> None:
        with self._lock:
            self._attached = {rank: other for rank, other in self._attached.items() if other is not line}


def _send(line: socket.socket, message: Mapping[str, Any]) -> None:
    with suppress(OSError):  # the rank has ended
        line.sendall(json.dumps(message).encode() + b"\n")
