"""A rank's connection to its launcher, by which it learns that its group has ended, and its place in the next one.

`elasticctl_protocol.local` describes the messages.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress

from elasticctl_protocol import variables
from elasticctl_protocol.local import LauncherMessage, RankMessage, to_line
from elasticctl_protocol.requests import WIRE

_TAKEN = ""
"""The variable's value once the connection is in use."""


def is_taken() -> bool:
    """True if another run in this process has already used the connection to the launcher."""
    return os.environ.get(variables.LINK_SOCKET) == _TAKEN


class LauncherLink:
    """The connection of the rank that `environ` describes. Raises OSError if nothing listens."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(environ[variables.LINK_SOCKET])
        except OSError:
            self._socket.close()
            raise
        self._local_rank = int(environ.get("LOCAL_RANK", "0"))
        self.generation = int(environ[variables.GENERATION])
        self._changed = threading.Condition()
        self._over = -1
        self._place: dict[str, str] | None = None
        self._closed = False

    @classmethod
    def open(cls, environ: MutableMapping[str, str] = os.environ) -> LauncherLink | None:
        """Return the connection to the launcher; None if no launcher keeps this process.

        Only the first run in a process gets one, because a newcomer would start with the first run while the others are
        in a later one.
        """
        if environ.get(variables.LINK_SOCKET, _TAKEN) == _TAKEN or not environ.get(variables.GENERATION, "").isdigit():
            return None
        try:
            return cls(environ)
        except OSError:
            return None
        finally:
            environ[variables.LINK_SOCKET] = _TAKEN

    def listen(self, on_over: Callable[[], None] = lambda: None) -> None:
        """Receive messages from now on; `on_over()` is called from a thread when this rank's generation has ended."""
        threading.Thread(target=self._listen, args=(on_over,), name="elasticctl-link", daemon=True).start()

    @property
    def is_over(self) -> bool:
        """True if the generation that this rank is in has ended."""
        return self._over >= self.generation

    def attach(self) -> None:
        """Report that this process can be kept when its generation ends."""
        self._send(RankMessage(attach=self._local_rank, generation=self.generation))

    def report_lost(self, generation: int, why: str) -> None:
        """Report that this rank has lost its peers in that generation, unless the generation is over."""
        if self._over < generation:
            self._send(RankMessage(lost=generation, why=why))

    def regroup(self, why: str) -> None:
        """Ask for the end of this rank's generation, so that its ranks meet in the next one."""
        self._send(RankMessage(regroup=self.generation, why=why))

    def decline(self, why: str) -> None:
        """Report that this process cannot continue: the launcher has to replace it, in the next group too."""
        with self._changed:
            newest = (self._place or {}).get(variables.GENERATION, self.generation)
        self._send(RankMessage(decline=int(newest), why=why))

    def wait_for_place(self) -> dict[str, str]:
        """Wait without a limit for a place in a later generation; enter that generation and return its environment.

        Raises ConnectionError if the launcher closes the connection. If the launcher dies, the kernel kills this
        process.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._place is not None)
            place, self._place = self._place, None
            if place is None:
                raise ConnectionError("the launcher has closed the connection")
            self.generation = int(place[variables.GENERATION])
            return place

    def close(self) -> None:
        """Close the connection, so that this process is no longer kept."""
        with self._changed:
            self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _send(self, message: RankMessage) -> None:
        with suppress(OSError):
            self._socket.sendall(to_line(message))

    def _listen(self, on_over: Callable[[], None]) -> None:
        with suppress(OSError, ValueError), self._socket.makefile("r") as lines:
            for line in lines:
                self._handle(WIRE.decode(LauncherMessage, json.loads(line)), on_over)
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _handle(self, message: LauncherMessage, on_over: Callable[[], None]) -> None:
        if message.over is not None:
            self._over = max(self._over, message.over)
            if self.is_over:
                on_over()
        elif message.place is not None:
            with self._changed:
                self._place = dict(message.place)
                self._changed.notify_all()
