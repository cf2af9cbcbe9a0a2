"""Tells the launcher how training goes: one JSON datagram for each report, never waited for, lost without harm."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

SOCKET_VARIABLE = "ELASTICCTL_AGENT_SOCKET"
GENERATION_VARIABLE = "ELASTICCTL_GENERATION"
SURELY_S = 5.0


class Reporter:
    """Sends to the launcher's socket; says nothing where the environment names none."""

    def __init__(self, rank: int, environ: Mapping[str, str] = os.environ) -> None:
        generation = environ.get(GENERATION_VARIABLE, "")
        self._base = {"rank": rank, "generation": int(generation) if generation.isdigit() else 0}
        self._path = environ.get(SOCKET_VARIABLE, "")
        self._socket: socket.socket | None = None
        if self._path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            self._socket.setblocking(False)

    def send(self, kind: str, **fields: object) -> None:
        """Send one report; fields that are None are left out."""
        if self._socket is None:
            return
        known = {name: value for name, value in fields.items() if value is not None}
        data = json.dumps({"kind": kind, **self._base, **known}).encode()
        with suppress(OSError):  # no listener yet or any more, or its queue is full
            self._socket.sendto(data, self._path)

    def send_surely(self, kind: str, **fields: object) -> None:
        """Send one report that somebody waits for: stands still until there is room for it, at most `SURELY_S`."""
        if self._socket is not None:
            self._socket.settimeout(SURELY_S)
            self.send(kind, **fields)
            self._socket.setblocking(False)

    def close(self) -> None:
        """Close the socket; later reports are dropped."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
