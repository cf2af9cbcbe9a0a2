"""Requests to the rendezvous service.

ServiceError
├── ServiceAway      no answer, or the service is in trouble (5xx, 429): try again
└── ServiceRefused   the service refuses (4xx): another try gets the same answer
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
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from elasticctl_protocol import variables
from elasticctl_protocol.requests import (
    WIRE,
    Heartbeat,
    LeaveRequest,
    NoticeRequest,
    Polled,
    Refusal,
    ReportRequest,
)
from elasticctl_store.storage.http import has_ended

RETRY_MIN_S, RETRY_MAX_S = 0.05, 2.0
POLL_TIMEOUT_S = 40.0
"""Longer than the service's own limit for a long poll (20 s), so that only a service that hangs exceeds it."""
_NOT_AUTHORIZED = (401, 403)
KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""In seconds, and a number of probes. If the network has forgotten a connection (a service that moved, a NAT that lost
its state), a long poll would otherwise wait until its timeout, while the group waits only 10 s for a silent worker.
"""
UNACKNOWLEDGED_MS = 6000
"""The timeout of a request that the network has not acknowledged, for which the kernel sends no probes."""
CONNECT_S = 5.0
"""The timeout of a connection attempt that gets no answer at all, as when a service has just moved to another address.
"""

Request = Polled | Heartbeat | NoticeRequest | LeaveRequest | ReportRequest
T = TypeVar("T")

log = logging.getLogger(__name__)


class ServiceError(Exception):
    """A request to the rendezvous service failed."""


class ServiceAway(ServiceError):
    """The service gave no usable answer; it may be restarting."""


class ServiceRefused(ServiceError):
    """The service refused the request; `status` is the HTTP status, or 0 if the request could not be made."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{message} (HTTP {status})")
        self.status = status


class RetryPauses:
    """Pauses between tries, in seconds. Each is up to twice as long as the last one, and at most `RETRY_MAX_S`."""

    def __init__(self) -> None:
        self._pause_s = RETRY_MIN_S

    def next_s(self) -> float:
        """Return the next pause, shortened at random so that a thousand workers do not return at the same moment."""
        pause_s, self._pause_s = self._pause_s, min(RETRY_MAX_S, self._pause_s * 2)
        return pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (jitter, not a secret)

    def reset(self) -> None:
        """Start again with the shortest pause."""
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
    """Make the kernel end an idle TCP connection whose other end has gone."""
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
            raise ConnectionRefusedError(
                f"the process that answers on {self._path} belongs to user {uid}, not to this user"
            )


def peer_uid(connected: socket.socket) -> int | None:
    """Return the user id at the other end of a Unix socket; None if the system does not report it."""
    if sys.platform != "linux":
        return None
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


@dataclass(frozen=True, slots=True)
class ServiceClient:
    """Calls the service at `endpoint` (`host:port`, `http://host:port` or `unix:///path`) for one job.

    Reads the bearer token from `token_file` for each request, so that a rotated token is used, and never logs it. Keeps
    connections open, because opening them was half of the service's work when a group re-forms. Thread-safe. Logs once
    when the service goes away or refuses the token, and once when it is back; `was_away` is set then, for a caller that
    has to report again what a restarted service does not know.
    """

    endpoint: str
    namespace: str
    job: str
    token_file: str
    was_away: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    _idle: deque[http.client.HTTPConnection] = field(default_factory=deque, repr=False, compare=False)
    _away: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    _locked_out: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)

    def call(self, verb: str, body: Mapping[str, Any], timeout_s: float = 10.0) -> dict[str, Any]:
        """Send one request; return the answer. Raises ServiceAway or ServiceRefused."""
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
            raise self._away_error(str(error) or type(error).__name__) from error
        self._idle.append(connection)
        return self._read_answer(response.status, raw)

    def send(self, request: Request, answer: type[T], timeout_s: float = 10.0) -> T:
        """Send one request; return its answer. Raises ServiceAway or ServiceRefused."""
        return WIRE.decode(answer, self.call(request.verb, WIRE.encode(request), timeout_s))

    def close(self) -> None:
        """Close idle connections. The next call opens a new one."""
        while (connection := self._pop_idle()) is not None:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """An idle connection that is still open, or a new one."""
        while (connection := self._pop_idle()) is not None:
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

    def _pop_idle(self) -> http.client.HTTPConnection | None:
        with suppress(IndexError):  # another thread may have taken the last one
            return self._idle.pop()
        return None

    def _read_answer(self, status: int, raw: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError):
            answer = None
        if status >= 500 or (status == 200 and not isinstance(answer, dict)):
            raise self._away_error(f"HTTP {status}")
        if self._away.is_set():
            self._away.clear()
            self.was_away.set()
            log.info("the rendezvous service is back")
        if status == 200 and isinstance(answer, dict):
            self._locked_out.clear()
            return answer
        if status == 429:  # the service is up, but busy
            raise ServiceAway(f"rendezvous service at {self.endpoint}: HTTP {status}")
        message = WIRE.decode(Refusal, answer).error or "refused"
        if status in _NOT_AUTHORIZED and not self._locked_out.is_set():
            self._locked_out.set()
            log.warning("the rendezvous service at %s refuses this worker: %s", self.endpoint, message)
        raise ServiceRefused(status, message)

    def _away_error(self, why: str) -> ServiceAway:
        """Return the error to raise; log it once, however long the outage lasts and however many threads notice it."""
        error = ServiceAway(f"rendezvous service at {self.endpoint}: {why}")
        if not self._away.is_set():
            self._away.set()
            log.warning("%s: trying again until it answers", error)
        return error


def client_from_environment(endpoint: str = "") -> ServiceClient:
    """Return the client of the worker that the environment describes. Raises KeyError for a missing variable."""
    return ServiceClient(
        endpoint=endpoint or os.environ[variables.RENDEZVOUS_ENDPOINT],
        namespace=os.environ.get(variables.NAMESPACE, "default"),
        job=os.environ[variables.JOB],
        token_file=os.environ[variables.TOKEN_FILE],
    )


Poll = Callable[[Polled], Mapping[str, Any]]
"""`poll(request)` makes one long poll, and returns the answer as JSON data. Raises ServiceAway or ServiceRefused."""
