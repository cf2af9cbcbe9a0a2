"""One HTTP exchange at a time, without copying what is moved: bodies go out of and into the caller's memory.

`http.client` because it writes a memoryview to the socket, and reads into one, as they are; the clouds' own clients
and urllib3's `readinto` copy, which costs more processor time than all the rest. Knows nothing of any cloud.
"""

from __future__ import annotations

import base64
import http.client
import select
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, unquote, urlsplit


def has_ended(idle: socket.socket) -> bool:
    """True when the other side has hung up: nothing else makes an idle connection readable."""
    poll = select.poll()
    poll.register(idle, select.POLLIN)
    return bool(poll.poll(0))


_CHUNK_BYTES = 1 << 20  # a socket's timeout is for a whole `sendall`, so it is given pieces that any network can take
_IDLE_AGE_S = 15.0  # servers close idle connections after 5 to 60 s, some without a word
_KEPT_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Request:
    """`target` is path and query, percent-encoded. With `into`, the body of a success is written there."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: tuple[memoryview, ...] = ()
    into: memoryview | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said. Header names are in lower case; `filled_bytes` were written into the request's `into`."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    filled_bytes: int = 0


class WireError(Exception):
    """There is no answer. `sent`: the request may have been carried out; `final`: no use in trying again."""

    def __init__(self, reason: str, *, sent: bool, final: bool = False) -> None:
        super().__init__(reason)
        self.sent, self.final = sent, final


class Connections:
    """Connections to one origin (`https://host:port`), kept open between exchanges; for any number of threads."""

    def __init__(self, origin: str, *, connect_s: float, silence_s: float, ca_file: str | None = None) -> None:
        """`connect_s` bounds connecting, `silence_s` each wait for the server to take or send something."""
        self._origin = urlsplit(origin)
        self._connect_s, self._silence_s = connect_s, silence_s
        self._tls = ssl.create_default_context(cafile=ca_file) if self._origin.scheme == "https" else None
        self._proxy = _proxy_for(self._origin.hostname or "") if self._tls else None
        self._lock = threading.Lock()
        self._idle: list[tuple[http.client.HTTPConnection, float]] = []
        weakref.finalize(self, _close, self._idle)

    def exchange(self, request: Request) -> Answer:
        """Send a request and read the answer. Raises WireError when there is none, or not all of it."""
        connection = self._take() or self._connect()
        try:
            answer, reusable = _exchange(connection, request)
        except (http.client.HTTPException, OSError) as e:
            connection.close()
            raise WireError(_described(e), sent=True) from e
        except BaseException:
            connection.close()
            raise
        if reusable:
            self._keep(connection)
        else:
            connection.close()
        return answer

    def _take(self) -> http.client.HTTPConnection | None:
        """An idle connection that the server has not closed."""
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection, since_s = self._idle.pop()
            if time.monotonic() - since_s < _IDLE_AGE_S and not has_ended(connection.sock):
                return connection
            connection.close()

    def _keep(self, connection: http.client.HTTPConnection) -> None:
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
            mend = "name the authority's certificates in $AWS_CA_BUNDLE or $SSL_CERT_FILE"
            raise WireError(
                f"its certificate is not trusted ({e.verify_message}); {mend}", sent=False, final=True
            ) from e
        except (http.client.HTTPException, OSError) as e:
            connection.close()
            raise WireError(f"cannot connect: {_described(e)}", sent=False) from e
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


def _exchange(connection: http.client.HTTPConnection, request: Request) -> tuple[Answer, bool]:
    """Send and receive; also whether the connection can be used again."""
    whole = _send(connection, request)
    response = connection.getresponse()
    headers = {name.lower(): value for name, value in response.getheaders()}
    if request.into is not None and response.status in (200, 206):
        filled = _fill(response, request.into)
        answer = Answer(response.status, headers, b"", filled)
    else:
        answer = Answer(response.status, headers, response.read())
    return answer, whole and response.isclosed() and not response.will_close


def _send(connection: http.client.HTTPConnection, request: Request) -> bool:
    """Send a request; False when the server would not take all of it, and perhaps says why in an answer."""
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


def _fill(response: http.client.HTTPResponse, into: memoryview) -> int:
    """Read the body to its end or until `into` is full. Raises IncompleteRead for a body that breaks off."""
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
    """The proxy that $HTTPS_PROXY and $NO_PROXY ask for, and the headers it wants. Plain HTTP takes none."""
    proxy = urllib.request.getproxies().get("https")
    if not proxy or urllib.request.proxy_bypass(host):
        return None
    parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    if parts.username is None:
        return parts, {}
    login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return parts, {"Proxy-Authorization": f"Basic {base64.b64encode(login.encode()).decode()}"}


def _described(error: Exception) -> str:
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
