"""HTTP for the object stores: connections that do not copy, and retries. Independent of any particular cloud.

It uses `http.client` because that writes a memoryview to the socket, and reads into one, without copying. The clouds'
own clients, and urllib3's `readinto`, copy, which costs more processor time than everything else.

`RetryingClient` retries requests according to `outages`. A service's `Dialect` interprets its refusals. Whether a
request that got no response was carried out is unknown: see `Reply.unsure`.
"""

from __future__ import annotations

import base64
import email.utils
import enum
import http.client
import os
import select
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from elasticctl_store.errors import StorageError
from elasticctl_store.storage.outages import Patience, Waiter


def has_ended(idle: socket.socket) -> bool:
    """Return whether the other side has closed an idle connection: nothing else makes it readable."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))


_CHUNK_BYTES = 1 << 20  # a socket's timeout applies to a whole `sendall`, so send pieces that any network can take
_IDLE_AGE_S = 15.0  # servers close idle connections after 5 to 60 s, some of them silently
_KEPT_CONNECTIONS = 16
MOST_ANSWER_BYTES = 16 << 20
"""Larger than any page of a listing."""
_MOST_DOUBTS = 5
"""After this many implausible responses in a row, the response is taken for what the service has to say."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. `target` is path and query, percent-encoded. With `into`, the body of a success is written there.

    The body of a response that is larger than `most_bytes` is dropped.
    """

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[memoryview, ...] = ()
    into: memoryview | None = None
    most_bytes: int = MOST_ANSWER_BYTES


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response. Header names are in lower case; `filled_bytes` were written into the request's `into`.

    `is_too_large`: the body was larger than the request's `most_bytes`, and `body` is empty.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    filled_bytes: int = 0
    is_too_large: bool = False


class WireError(Exception):
    """There is no response. `sent`: the request may have been carried out; `final`: retrying is of no use."""

    def __init__(self, reason: str, *, sent: bool, final: bool = False) -> None:
        super().__init__(reason)
        self.sent, self.final = sent, final


class ConnectionPool:
    """Connections to one origin (`https://host:port`), kept open between requests. Thread-safe."""

    def __init__(self, origin: str, *, connect_s: float, silence_s: float, ca_file: str | None = None) -> None:
        """`connect_s` bounds connecting, `silence_s` each wait for the server to receive or send something.

        `ca_file` is a file, or a folder, of certificates to trust. Raises StorageError if it cannot be read.
        """
        self._origin = urlsplit(origin)
        self._connect_s, self._silence_s = connect_s, silence_s
        self._tls = _trust(ca_file) if self._origin.scheme == "https" else None
        self._proxy = _proxy_for(self._origin.hostname or "") if self._tls else None
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        weakref.finalize(self, _close, self._idle)

    def exchange(self, request: HttpRequest) -> HttpResponse:
        """Send a request and read the response. Raises WireError if there is none, or only a part of it."""
        connection = self._pop_idle() or self._connect()
        try:
            answer, reusable = _exchange(connection, request)
        except (http.client.HTTPException, OSError) as e:
            connection.close()
            raise WireError(_describe(e), sent=True) from e
        except BaseException:
            connection.close()
            raise
        if reusable:
            self._push_idle(connection)
        else:
            connection.close()
        return answer

    def _pop_idle(self) -> http.client.HTTPConnection | None:
        """Return an idle connection that the server has not closed, or None."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since_s = self._idle.pop()
            if time.monotonic() - since_s < _IDLE_AGE_S and not has_ended(connection.sock):
                return connection
            connection.close()

    def _push_idle(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if len(self._idle) < _KEPT_CONNECTIONS:
                self._idle.append((connection, time.monotonic()))
                return
        connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = self._new()
        try:
            connection.connect()
        except ssl.SSLCertVerificationError as e:
            connection.close()
            fix = "name the authority's certificates in $AWS_CA_BUNDLE or $SSL_CERT_FILE"
            raise WireError(
                f"its certificate is not trusted ({e.verify_message}). FIX: {fix}", sent=False, final=True
            ) from e
        except (http.client.HTTPException, OSError) as e:
            connection.close()
            raise WireError(f"cannot connect: {_describe(e)}", sent=False) from e
        connection.sock.settimeout(self._silence_s)
        return connection

    def _new(self) -> http.client.HTTPConnection:
        host, port = self._origin.hostname or "", self._origin.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=self._connect_s)
        if self._proxy is None:
            return http.client.HTTPSConnection(host, port, timeout=self._connect_s, context=self._tls)
        proxy, tunnel_headers = self._proxy
        connection = http.client.HTTPSConnection(
            proxy.hostname or "", proxy.port or 80, timeout=self._connect_s, context=self._tls
        )
        connection.set_tunnel(host, port or 443, tunnel_headers)
        return connection


def _trust(ca_file: str | None) -> ssl.SSLContext:
    try:
        if ca_file is not None and os.path.isdir(ca_file):
            return ssl.create_default_context(capath=ca_file)
        return ssl.create_default_context(cafile=ca_file)
    except OSError as e:
        fix = "correct $AWS_CA_BUNDLE or $REQUESTS_CA_BUNDLE"
        raise StorageError(f"cannot read the certificates in {ca_file}: {e.strerror or e}. FIX: {fix}") from e


def _exchange(connection: http.client.HTTPConnection, request: HttpRequest) -> tuple[HttpResponse, bool]:
    """Send a request and receive the response; also return whether the connection can be reused."""
    whole = _send(connection, request)
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.getheaders()}
    if request.into is not None and response.status in (200, 206):
        filled = _fill(response, request.into)
        answer = HttpResponse(response.status, headers, b"", filled)
    else:
        body = _read(response, request.most_bytes)
        answer = HttpResponse(response.status, headers, body or b"", is_too_large=body is None)
    return answer, whole and response.isclosed() and not response.will_close


def _send(connection: http.client.HTTPConnection, request: HttpRequest) -> bool:
    """Send a request. Return False if the server refused to receive all of it; its response may say why."""
    connection.putrequest(request.method, request.target, skip_accept_encoding=True)
    for name, value in request.headers.items():
        connection.putheader(name, value)
    if request.body or request.method in ("PUT", "POST"):
        connection.putheader("content-length", str(sum(len(view) for view in request.body)))
    try:
        connection.endheaders()
        for piece in _chunks(request.body):
            connection.send(piece)
    except (BrokenPipeError, ConnectionResetError):
        return False
    return True


def _read(response: http.client.HTTPResponse, most_bytes: int) -> bytes | None:
    """Return the whole body; if it is larger than `most_bytes`, close the connection and return None."""
    if response.length is None or response.length <= most_bytes:
        body = response.read(most_bytes + 1) if response.length is None else response.read()
        if len(body) <= most_bytes:
            return body
    response.close()
    response.will_close = True
    return None


def _fill(response: http.client.HTTPResponse, into: memoryview) -> int:
    """Read the body until its end, or until `into` is full; return the number of bytes. Raises IncompleteRead if it
    breaks off."""
    expected = len(into) if response.length is None else min(response.length, len(into))
    done = 0
    while done < expected:
        count = response.readinto(into[done : min(done + _CHUNK_BYTES, expected)])
        if not count:
            raise http.client.IncompleteRead(b"", expected - done)
        done += count
    if response.length == 0:
        response.close()
    return done


def _chunks(body: Iterable[memoryview]) -> Iterable[memoryview]:
    for view in body:
        for start in range(0, len(view), _CHUNK_BYTES):
            yield view[start : start + _CHUNK_BYTES]


def _close(idle: Iterable[tuple[http.client.HTTPConnection, float]]) -> None:
    for connection, _ in idle:
        connection.close()


def _proxy_for(host: str) -> tuple[SplitResult, dict[str, str]] | None:
    """Return the proxy that $HTTPS_PROXY and $NO_PROXY specify, and the headers it needs. Plain HTTP uses no proxy."""
    proxy = urllib.request.getproxies().get("https")
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.username is None:
        return parts, {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return parts, {"Proxy-Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _describe(error: Exception) -> str:
    match error:
        case TimeoutError():
            return "it did not answer in time"
        case http.client.IncompleteRead():
            return "its answer broke off"
        case http.client.RemoteDisconnected():
            return "it closed the connection without an answer"
        case OSError() if error.strerror:
            return error.strerror.lower()
    return str(error) or type(error).__name__


def is_temporary(status: int) -> bool:
    """Return whether a status says that the same request may succeed later, for any service.

    Proxies use many statuses above 500 (Cloudflare: 520 to 530, and 529). Not implemented (501), unsupported version
    (505) and full (507) are permanent.
    """
    return status in {408, 409, 425, 429} or (status >= 500 and status not in {501, 505, 507})


class Verdict(enum.Enum):
    """What to do about a response."""

    FINAL = enum.auto()
    TEMPORARY = enum.auto()
    STALE_CREDENTIALS = enum.auto()


@dataclass(frozen=True, slots=True)
class Reply:
    """A final response. `unsure`: an earlier try of the same request may have been carried out."""

    answer: HttpResponse
    unsure: bool


class Dialect(Protocol):
    """What differs between services in signing requests and in interpreting refusals."""

    def sign(self, request: HttpRequest) -> Mapping[str, str]:
        """Return all headers to send, credentials included. Raises StorageError, or WireError if it is worth
        retrying."""

    def renew(self) -> None:
        """Get new credentials, because a request was refused for stale ones."""

    def judge(self, answer: HttpResponse) -> Verdict:
        """Decide whether the request is worth retrying."""

    def reason(self, answer: HttpResponse) -> str:
        """Describe the refusal in a few words."""


Doubt = Callable[[HttpResponse], str]


class RetryingClient:
    """Sends requests in one dialect over the connections to one origin, until the response is final."""

    def __init__(self, connections: ConnectionPool, dialect: Dialect, waiter: Waiter) -> None:
        self._connections, self._dialect, self._waiter = connections, dialect, waiter

    def call(
        self, request: HttpRequest, doing: str, patience: Patience | None = None, doubt: Doubt = lambda answer: ""
    ) -> Reply:
        """Send until the response is final; `doing`, such as "write data/x to s3://b", is used in errors.

        `doubt` says what is implausible about a successful response, or "". Such a response is treated like a temporary
        refusal; if it does not change after several tries, it is returned as it is. Raises StorageError if no response
        is final within the patience (by default the storage's own).
        """
        unsure, renew, renewed, doubts = False, False, False, 0
        with self._waiter.request(doing, patience) as tries:
            while True:
                try:
                    if renew:
                        self._dialect.renew()
                        renew, renewed = False, True
                    answer = self._send(request)
                except WireError as e:
                    if e.final:
                        raise StorageError(f"cannot {doing}: {e}") from e
                    unsure |= e.sent
                    tries.failed(str(e))
                    continue
                verdict = self._dialect.judge(answer)
                renew = verdict is Verdict.STALE_CREDENTIALS
                wrong = doubt(answer) if 200 <= answer.status < 300 and doubts < _MOST_DOUBTS else ""
                if wrong:
                    doubts += 1
                    unsure = True
                    try:
                        tries.failed(wrong)
                    except StorageError:
                        return Reply(answer, unsure)
                    continue
                if verdict is Verdict.FINAL or (renew and renewed):
                    return Reply(answer, unsure)
                if not renew:
                    renewed = False  # an outage may last longer than the new credentials
                unsure |= answer.status >= 500 or answer.status < 300
                tries.failed(self._dialect.reason(answer), _retry_after_s(answer, time.time()))

    def _send(self, request: HttpRequest) -> HttpResponse:
        return self._connections.exchange(replace(request, headers=self._dialect.sign(request)))


def _retry_after_s(answer: HttpResponse, now_s: float) -> float:
    """Return the pause in seconds that a server requests, as seconds or as a date; 0 if it requests none."""
    asked = answer.headers.get("retry-after", "").strip()
    if asked.isascii() and asked.isdigit():
        return float(asked)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - now_s)
    except ValueError:
        return 0.0
