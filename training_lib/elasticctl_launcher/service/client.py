"""Requests to the rendezvous service.

ServiceError
├── ServiceAway      no answer, or the service is in trouble (5xx, 429): worth another try
└── ServiceRefused   the service said no (4xx); another try gets the same answer
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import random
import socket
import struct
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from elasticctl_store.storage.http import has_ended

RETRY_MIN_S, RETRY_MAX_S = 0.05, 2.0
POLL_TIMEOUT_S = 40.0
"""Longer than the service's own limit of a long poll (20 s), so that only a service that hangs exceeds it."""
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""In seconds, and probes: a connection that the network has forgotten (a service that moved, a NAT that lost its state)
would keep a long poll waiting until its timeout, while the group waits 10 s for a worker that says nothing."""
UNACKNOWLEDGED_MS = 6000
"""The same for a request of which the network has acknowledged nothing: the kernel sends no probes meanwhile."""
CONNECT_S = 5.0
"""Where nobody answers, not even with a refusal, as behind the address of a service that has just moved."""

log = logging.getLogger(__name__)


class ServiceError(Exception):
    """A request to the rendezvous service failed."""


class ServiceAway(ServiceError):
    """No usable answer; the service may be restarting."""


class ServiceRefused(ServiceError):
    """The service refused the request; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class Backoff:
    """Pauses between tries, in seconds: each up to twice as long as the one before, at most `RETRY_MAX_S`."""

    def __init__(self) -> None:
        self._pause_s = RETRY_MIN_S

    def next_s(self) -> float:
        """The next pause, shortened at random so that a thousand workers do not come back at the same moment."""
        pause_s, self._pause_s = self._pause_s, min(RETRY_MAX_S, self._pause_s * 2)
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (jitter, not a secret)

    def reset(self) -> None:
        """Begin with the shortest pause again."""
        self._pause_s = RETRY_MIN_S


class _TcpConnection(http.client.HTTPConnection):
    def connect(self) -> None:
        timeout_s, self.timeout = self.timeout, min(self.timeout or CONNECT_S, CONNECT_S)
        try:
            super().connect()
        finally:
            self.timeout = timeout_s
        self.sock.settimeout(timeout_s)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)
        keep_alive(self.sock)


def keep_alive(connected: socket.socket) -> None:
    """Have the kernel end a TCP connection on which nothing is said, and whose other end has gone."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
        uid = peer_uid(self.sock)
        if uid not in (None, os.geteuid()):
            self.close()  # before the token is sent
            raise ConnectionRefusedError(f"a process of user {uid} answers on {self._path}, and not one of this user's")


def peer_uid(connected: socket.socket) -> int | None:
    """The user at the other end of a Unix socket; None where the system does not tell."""
    if sys.platform != "linux":
        return None
    told = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", told)[1])


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """Calls the service at `endpoint` (`host:port`, `http://host:port` or `unix:///path`) for one job.

    The bearer token is read from `token_file` at each request, so that a rotated one is picked up; it is never logged.
    It keeps connections open, since opening them was half of the service's work when a group re-forms. May be used from
    several threads at once. It logs when the service goes away and when it is back, each once.
    """

    endpoint: str
    namespace: str
    job: str
    token_file: str
    _idle: deque[http.client.HTTPConnection] = field(default_factory=deque, repr=False, compare=False)
    _away: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def call(self, verb: str, body: Mapping[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        """Send one request; raises ServiceAway or ServiceRefused."""
        try:
            token = Path(self.token_file).read_text("ascii").strip()
        except OSError as error:
            raise ServiceRefused(0, f"cannot read the token file {self.token_file}: {error.strerror}") from error
        except UnicodeDecodeError:
            token = ""
        if not token or not token.isprintable():
            raise ServiceRefused(0, f"the token file {self.token_file} holds no token")
        path = f"/v1/jobs/{quote(self.namespace, safe='')}/{quote(self.job, safe='')}/{verb}"
        headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        connection = self._connect(timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            raw = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._note_away(str(error) or type(error).__name__) from error
        self._idle.append(connection)
        return self._read_answer(response.status, raw)

    def close(self) -> None:
        """Close the connections that are idle; the next call makes a new one."""
        while (connection := self._take_idle()) is not None:
            connection.close()

    def call_until(
        self, verb: str, body: Mapping[str, Any], deadline: float, timeout_s: float = 10.0
    ) -> dict[str, Any]:
        """Like `call`, tried again while the service is away, until `deadline` (of time.monotonic)."""
        backoff = Backoff()
        while True:
            try:
                return self.call(verb, body, timeout_s)
            except ServiceAway:
                pause_s = backoff.next_s()
                if time.monotonic() + pause_s > deadline:
                    raise
            time.sleep(pause_s)

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """An idle connection that is still open, else a new one."""
        while (connection := self._take_idle()) is not None:
            if connection.sock is not None and not has_ended(connection.sock):
                connection.timeout = timeout_s
                connection.sock.settimeout(timeout_s)
                return connection
            connection.close()
        url = urlsplit(self.endpoint if "://" in self.endpoint else f"http://{self.endpoint}")
        if url.scheme == "unix":
            return _UnixConnection(url.path, timeout_s)
        if url.scheme != "http" or not url.hostname:
            raise ServiceRefused(0, f"rendezvous endpoint {self.endpoint!r}: expected host:port, http:// or unix://")
        return _TcpConnection(url.hostname, url.port or 80, timeout=timeout_s)

    def _take_idle(self) -> http.client.HTTPConnection | None:
        with suppress(IndexError):  # another thread may take the last one after a check
            return self._idle.pop()
        return None

    def _read_answer(self, status: int, raw: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if status >= 500 or (status == 200 and not isinstance(answer, dict)):
            raise self._note_away(f"HTTP {status}")
        if self._away.is_set():
            self._away.clear()
            log.info("the rendezvous service is back")
        if status == 200 and isinstance(answer, dict):
            return answer
        if status == 429:  # it is there, and busy
            raise ServiceAway(f"rendezvous service at {self.endpoint}: HTTP {status}")
        message = answer.get("error") if isinstance(answer, dict) else None
        raise ServiceRefused(status, str(message or "refused"))

    def _note_away(self, why: str) -> ServiceAway:
        """Say so once, however long it stays away and however many threads notice; returns the error to raise."""
        error = ServiceAway(f"rendezvous service at {self.endpoint}: {why}")
        if not self._away.is_set():
            self._away.set()
            log.warning("%s: trying again until it answers", error)
        return error


def client_from_environment(endpoint: str = "", environ: Mapping[str, str] = os.environ) -> ServiceClient:
    """The client of the worker that `environ` describes; raises KeyError for a missing variable."""
    return ServiceClient(
        endpoint=endpoint or environ["ELASTICCTL_RDZV_ENDPOINT"],
        namespace=environ.get("ELASTICCTL_NAMESPACE", "default"),
        job=environ["ELASTICCTL_JOB"],
        token_file=environ["ELASTICCTL_RDZV_TOKEN_FILE"],
    )


Poll = Callable[[str, Mapping[str, Any]], dict[str, Any]]
"""`poll(verb, body)`: one long poll; raises ServiceAway or ServiceRefused."""
