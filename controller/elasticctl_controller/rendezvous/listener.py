"""Accepts connections for a server that all workers of a large job call at the same time, and that every pod can reach.

`Listener` accepts connections for an aiohttp application. It reads the head of one request of an unknown client;
without a valid token, it refuses the request and closes the connection. aiohttp sees only requests of known jobs, each
at its job's turn. A client that begins a request and does not finish it in time is disconnected, and unknown clients
are limited by address (`admission`). Pages that everyone may read, such as metrics, are answered from the head as well.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

from aiohttp import web
from aiohttp.typedefs import Handler

from elasticctl_controller.rendezvous.admission import UNKNOWN_CLIENTS, Admission
from elasticctl_controller.rendezvous.fair_scheduling import Turns
from elasticctl_controller.rendezvous.requests import Caller, Refused
from elasticctl_controller.rendezvous.sockets import has_lost_host, peer_uid, reset
from elasticctl_protocol.requests import WIRE, Refusal

BACKLOG = 4096
"""Connections that wait to be accepted; the kernel cuts it to net.core.somaxconn."""
HEAD_S = 5.0
"""How long the head of a request may take to arrive: it fits into one packet."""
HEAD_BYTES = 1 << 14
LINGER_S = 0.5
_ACCEPTS = 32
"""Connections accepted before others are read from again."""
_PROTOCOL: Mapping[str, Any] = {
    "access_log": None,
    "auto_decompress": False,
    "lingering_time": 0.0,
    "max_line_size": 2048,
    "max_field_size": 2048,
    "max_headers": 32,
    "read_bufsize": 1 << 14,
    "keepalive_timeout": 600.0,
}
"""aiohttp's settings for known connections: nothing is decompressed, and the rest of a refused request is not read."""


class Guard(Protocol):
    """Recognizes the callers of an application."""

    @property
    def turns(self) -> Turns:
        """Each job's share of the event loop."""

    def authenticate(self, path: str, authorization: str) -> tuple[Caller, int]:
        """The job that a request belongs to, and how many connections that job may have. Raises Refused."""

    def lose_contact(self, key: str, uid: str, *, hung_up: bool) -> None:
        """The host of this job's worker no longer answers, or has closed the connection on which its launcher watched
        the group (`hung_up`)."""


class UnknownClient:
    """A connection that has not shown a token. Only the head of its first request is read."""

    def __init__(self, listener: Listener, connected: socket.socket, peer: str) -> None:
        self._listener, self._socket, self.peer = listener, connected, peer
        self._head = b""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(HEAD_S, self.close)
        loop.add_reader(connected.fileno(), self._read)

    def close(self, *, known: bool = False) -> None:
        """Stop reading, and close the connection unless it is `known` now."""
        self._deadline.cancel()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        loop.remove_writer(self._socket.fileno())
        self._listener.drop_client(self, known=known)
        if not known:
            self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(HEAD_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        self._head += data
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if not data or (not end and len(self._head) >= HEAD_BYTES):
            self.close()
        elif end:
            self._decide(head)

    def _decide(self, head: bytes) -> None:
        try:
            found = self._listener.decide(head)
        except Refused as error:
            found = response(error.status, "application/json", json.dumps(WIRE.encode(Refusal(str(error)))).encode())
        if isinstance(found, bytes):
            self._answer(found)
        else:
            self.close(known=True)
            self._listener.let_in_at_turn(self._socket, found, self._head)

    def _answer(self, answer: bytes) -> None:
        """Answer, and close a little later, so that a client that still sends a small body gets to read the answer."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._socket.fileno())
        self._deadline.cancel()
        self._deadline = loop.call_later(LINGER_S, self.close)
        self._send(memoryview(answer))

    def _send(self, rest: memoryview) -> None:
        """Send the rest of an answer as the client reads it: the buffer of a socket may be smaller."""
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._socket.fileno())
        try:
            rest = rest[self._socket.send(rest) :]
            if not rest:
                self._socket.shutdown(socket.SHUT_WR)
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()
            return
        if rest:
            loop.add_writer(self._socket.fileno(), self._send, rest)


class JobConnection(asyncio.Protocol):
    """A job's connection, in front of aiohttp's own protocol: what arrives is processed at the job's turn.

    `uid` is the worker that has called last on this connection, and `watches` says whether it watched the group.
    """

    def __init__(self, listener: Listener, caller: Caller | None, first: bytes) -> None:
        self._listener, self.caller, self._first = listener, caller, first
        self.uid, self.watches = "", False
        self._inner: asyncio.Protocol = listener.protocol()
        self._transport: asyncio.Transport | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._busy = self._gone = False

    def identify(self, uid: str, *, watches: bool) -> None:
        """The request that has arrived is of this worker."""
        self.uid, self.watches = uid, watches

    def begin_request(self) -> None:
        """The head of a request has arrived."""
        self._busy = True
        self._in_time()

    def end_request(self) -> None:
        """A request has been answered."""
        self._busy = self.watches = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._inner.connection_made(transport)
        if self._first:
            self.data_received(self._first)
            self._first = b""

    def data_received(self, data: bytes) -> None:
        if not self._busy and self._deadline is None and self._transport is not None:
            self._deadline = asyncio.get_running_loop().call_later(HEAD_S, self._transport.abort)
        if self.caller is None:
            self._inner.data_received(data)
        else:
            self._listener.at_turn(self.caller, self._feed, data)

    def _feed(self, data: bytes) -> None:
        if not self._gone:
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone = True
        self._in_time()
        self._listener.on_lost(self, exc)
        self._inner.connection_lost(exc)

    def _in_time(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection_of(request: web.Request) -> JobConnection | None:
    """The connection that a request came on; None if the application is served without a `Listener`."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, JobConnection) else None


@web.middleware
async def _time_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Have the connection know when the head of a request has arrived, and when the request has been answered."""
    connection = connection_of(request)
    if connection is None:
        return await handler(request)
    connection.begin_request()
    try:
        return await handler(request)
    finally:
        connection.end_request()


class Listener:
    """Serves an application until `cleanup`; with a `guard`, only to callers that it recognizes.

    With `pages`, it serves those instead, to everyone: a path's function returns the whole `response`. One page is
    served on a connection.
    """

    def __init__(
        self,
        app: web.Application | None = None,
        guard: Guard | None = None,
        pages: Mapping[str, Callable[[], bytes]] | None = None,
    ) -> None:
        app = app or web.Application()
        app.middlewares.insert(0, _time_request)
        # With a guard, no handler keeps waiting for a caller that has disconnected.
        cancels = guard is not None
        self._runner = web.AppRunner(app, shutdown_timeout=1.0, handler_cancellation=cancels, **_PROTOCOL)
        self._guard, self._pages = guard, pages
        self._admission = Admission()
        self._unknown: dict[UnknownClient, None] = {}  # the one that came first is first
        self._jobs: dict[str, int] = {}
        self._sockets: list[socket.socket] = []
        self._entering: set[asyncio.Task[Any]] = set()

    async def open_tcp(self, host: str | None, port: int) -> None:
        """Listen on a port, by default on all addresses. Raises OSError."""
        dual = not host and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual or ":" in (host or "") else socket.AF_INET
        listening = socket.create_server((host or "", port), family=family, backlog=BACKLOG, dualstack_ipv6=dual)
        await self.open(listening)

    async def open_unix(self, path: str) -> None:
        """Listen on a path for processes of this user. Raises OSError."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(path)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            raise
        await self.open(listening)

    async def open(self, listening: socket.socket) -> None:
        """Serve on a socket that listens."""
        listening.setblocking(False)
        if self._runner.server is None:
            await self._runner.setup()
        self._sockets.append(listening)
        self._resume(listening)

    async def cleanup(self) -> None:
        """Stop listening, and close all connections."""
        while self._sockets:
            listening = self._sockets.pop()
            asyncio.get_running_loop().remove_reader(listening.fileno())
            listening.close()
        for client in list(self._unknown):
            client.close()
        await self._runner.cleanup()

    def protocol(self) -> asyncio.Protocol:
        """aiohttp's protocol for a new connection."""
        return cast(web.Server, self._runner.server)()

    def decide(self, head: bytes) -> Caller | bytes:
        """The job that a request with this head belongs to, or the page that it asks for. Raises Refused."""
        line, *lines = head.decode("latin-1").split("\r\n")
        words = line.split(" ")
        names = [text.partition(":") for text in lines]
        tokens = [value.strip() for name, _, value in names if name.lower() == "authorization"]
        if len(words) != 3 or len(tokens) > 1:
            raise Refused(400, "this is not a request")
        if self._guard is None:
            page = (self._pages or {}).get(words[1].partition("?")[0])
            if page is None:
                raise Refused(404, "there is nothing here")
            return page()
        caller, most = self._guard.authenticate(words[1], tokens[0] if tokens else "")
        if self._jobs.get(caller.key, 0) >= most:
            raise Refused(429, f"too many connections of job {caller.key}")
        return caller

    def drop_client(self, client: UnknownClient, *, known: bool) -> None:
        """An unknown client has disconnected, or is `known` now."""
        if client in self._unknown:
            del self._unknown[client]
            if client.peer:
                self._admission.leave(client.peer, known=known)

    def let_in(self, connected: socket.socket, caller: Caller | None, first: bytes) -> None:
        """Have aiohttp serve a connection; `first` has been read from it already."""
        connection = JobConnection(self, caller, first)
        task = asyncio.get_running_loop().create_task(self._connect(connection, connected))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    def let_in_at_turn(self, connected: socket.socket, caller: Caller, first: bytes) -> None:
        """The same at the next turn of its job."""
        self._jobs[caller.key] = self._jobs.get(caller.key, 0) + 1
        cast(Guard, self._guard).turns.queue(caller.key, lambda: self.let_in(connected, caller, first))

    def at_turn(self, caller: Caller, work: Callable[[bytes], None], data: bytes) -> None:
        """Have `work` done with `data` at the next turn of a job."""
        cast(Guard, self._guard).turns.queue(caller.key, lambda: work(data))

    def on_lost(self, connection: JobConnection, error: Exception | None) -> None:
        """A connection has ended."""
        if connection.caller is not None:
            key = connection.caller.key
            self._jobs[key] -= 1
            if not self._jobs[key]:
                del self._jobs[key]
            lost_host = has_lost_host(error)
            if connection.uid and (lost_host or connection.watches):
                cast(Guard, self._guard).lose_contact(key, connection.uid, hung_up=not lost_host)

    def _accept(self, listening: socket.socket) -> None:
        """Accept a few connections; the event loop reads from others before it comes back for more."""
        for _ in range(_ACCEPTS):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as e:
                self._pause(listening, e)
                return
            if accepted.family == socket.AF_UNIX:
                admitted, peer = peer_uid(accepted) in (None, os.geteuid()), ""
            else:
                peer = address[0]
                admitted = self._admission.admit(peer, time.monotonic())
            if not admitted:
                reset(accepted)
                continue
            self._enter(accepted, peer)

    def _enter(self, accepted: socket.socket, peer: str) -> None:
        accepted.setblocking(False)
        if self._guard is None and self._pages is None:
            self.let_in(accepted, None, b"")
            return
        self._unknown[UnknownClient(self, accepted, peer)] = None
        if len(self._unknown) > UNKNOWN_CLIENTS:
            next(iter(self._unknown)).close()

    async def _connect(self, connection: JobConnection, connected: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: connection, connected)
        except OSError:  # it has gone already
            connected.close()
            self.on_lost(connection, None)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Nothing can be accepted for now: try again in a second, as asyncio does."""
        loop = asyncio.get_running_loop()
        loop.call_exception_handler({"message": "cannot accept a connection", "exception": error})
        loop.remove_reader(listening.fileno())
        loop.call_later(1.0, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)


def response(status: int, content_type: str, body: bytes) -> bytes:
    """A complete HTTP response, after which the connection is closed."""
    reason = "OK" if status == 200 else "Refused"
    return (
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    ).encode() + body
