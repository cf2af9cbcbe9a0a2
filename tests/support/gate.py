"""An HTTP proxy before a storage server: counts requests, does what can go wrong, and checks what the server does not.

The servers of the tests are lenient where the real services are strict, so the gate refuses for them, as the services
do: a create of what is there already (the GCS emulator ignores preconditions), a body that does not match its checksum
(moto looks at none), a range past an object's end (the emulator sends none of it as if it were one). And it cuts GCS
listings into pages (the emulator gives everything).
"""

from __future__ import annotations

import base64
import http.client
import json
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import google_crc32c

PAGE_KEYS = 1000


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it came; `number` counts from 1."""

    number: int
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with a request, before it reaches the server or after it has been carried out.

    `status` and `code` answer in the server's place; `lose` resets the connection ("before", or "after" the server has
    done it); `hang` never answers after it was done; `truncate` breaks the answer's body off; `flip` inverts a bit of
    the "request" or of the "answer"; `slow_s` pauses before each of ten pieces of the answer; `call` is called first.
    """

    status: int = 0
    code: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    lose: str = ""
    hang: bool = False
    truncate: bool = False
    flip: str = ""
    slow_s: float = 0.0
    call: Callable[[], None] | None = None
    call_after: Callable[[], None] | None = None


def first(
    fault: Fault, times: int = 1, method: str = "", part: str = "", skip: int = 0
) -> Callable[[Seen], Fault | None]:
    """A plan: of the requests of that method with `part` in their target, after `skip` others `times` go wrong."""
    turns = iter(range(skip + times))

    def plan(seen: Seen) -> Fault | None:
        if method not in ("", seen.method) or part not in seen.target:
            return None
        turn = next(turns, None)
        return fault if turn is not None and turn >= skip else None

    return plan


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer on its way back."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Gate:
    """The proxy to one server; `scheme` is "s3", "gs" or "sts". `faults` is asked about each request, under a lock."""

    def __init__(self, scheme: str, port: int) -> None:
        self.scheme, self._upstream = scheme, port
        self.seen: list[Seen] = []
        self.faults: Callable[[Seen], Fault | None] = lambda seen: None
        self._lock, self._creating = threading.Lock(), threading.Lock()
        self.closing = threading.Event()
        gate = self

        class Handler(_Handler):
            pass

        Handler.gate = gate
        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def url(self, prefix: str, bucket: str = "bucket") -> str:
        """The URL of a storage whose requests pass this gate."""
        region = "&region=us-east-1" if self.scheme == "s3" else ""
        return f"{self.scheme}://{bucket}/{prefix}?endpoint=http://127.0.0.1:{self.port}{region}"

    def close(self) -> None:
        """Take no more requests; those that hang end too."""
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()

    def record(self, method: str, target: str, headers: dict[str, str], body: bytes) -> tuple[Seen, Fault]:
        """Count a request and say what is to go wrong with it."""
        with self._lock:
            seen = Seen(len(self.seen) + 1, method, target, headers, body)
            self.seen.append(seen)
            return seen, self.faults(seen) or Fault()

    def pass_on(self, seen: Seen, body: bytes) -> Reply:
        """What the real service would answer."""
        refusal = self._bad_digest(seen, body)
        if refusal is not None:
            return refusal
        if self.scheme == "gs" and "/upload/" in seen.target:
            with self._creating:
                return self._gcs_insert(seen, body)
        reply = self._forward(seen.method, seen.target, seen.headers, body)
        if self.scheme == "gs" and seen.method == "GET" and urlsplit(seen.target).path.endswith("/o"):
            return _page(reply, parse_qs(urlsplit(seen.target).query))
        if self.scheme == "gs" and reply.status == 206 and not reply.body:
            said = dict(reply.headers)["Content-Range"].rpartition("/")[2]
            return self.refusal(416, "requestedRangeNotSatisfiable", (("Content-Range", f"bytes */{said}"),))
        return reply

    def refusal(self, status: int, code: str, headers: tuple[tuple[str, str], ...] = ()) -> Reply:
        """An error document in the service's own form."""
        if self.scheme in ("s3", "sts"):
            error = f"<Error><Code>{code}</Code><Message>said {code}</Message></Error>"
            whole = error if self.scheme == "s3" else f"<ErrorResponse>{error}</ErrorResponse>"
            body = f"<?xml version='1.0'?>{whole}".encode()
        else:
            about = {"code": status, "message": f"said {code}", "errors": [{"reason": code}]}
            body = json.dumps({"error": about}).encode()
        return Reply(status, list(headers), body)

    def _bad_digest(self, seen: Seen, body: bytes) -> Reply | None:
        if self.scheme == "s3" and (expected := seen.headers.get("x-amz-checksum-crc32")):
            found = base64.b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()
            return self.refusal(400, "BadDigest") if found != expected else None
        if self.scheme == "gs" and "/upload/" in seen.target:
            about, content = _parts(body)
            found = base64.b64encode(google_crc32c.value(content).to_bytes(4, "big")).decode()
            if about.get("crc32c", found) != found:
                return self.refusal(400, f"Provided CRC32C {about['crc32c']} doesn't match calculated CRC32C {found}.")
        return None

    def _gcs_insert(self, seen: Seen, body: bytes) -> Reply:
        if "ifGenerationMatch=0" in seen.target:
            name = quote(_parts(body)[0]["name"], safe="")
            there = urlsplit(seen.target).path.removeprefix("/upload") + "/" + name
            if self._forward("GET", there, {}, b"").status == 200:
                return self.refusal(412, "conditionNotMet")
        return self._forward(seen.method, seen.target, seen.headers, body)

    def _forward(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self._upstream, timeout=60)
        try:
            headers = {name: value for name, value in headers.items() if name != "connection"}
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            skipped = ("content-length", "transfer-encoding", "connection", "date", "server")
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
            return Reply(answer.status, kept, answer.read())
        finally:
            connection.close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away in the middle is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30
    wbufsize = -1
    disable_nagle_algorithm = True
    gate: Gate

    def handle_one(self) -> None:
        gate = self.gate
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen, fault = gate.record(self.command, self.path, headers, body)
        if fault.call is not None:
            fault.call()
        if fault.lose == "before":
            return self._reset()
        if fault.status:
            return self._send(gate.refusal(fault.status, fault.code, fault.headers), fault)
        reply = gate.pass_on(seen, _flipped(body) if fault.flip == "request" else body)
        if fault.call_after is not None:
            fault.call_after()
        if fault.lose == "after":
            return self._reset()
        if fault.hang:
            self.close_connection = True
            gate.closing.wait(30)
            return None
        return self._send(reply, fault)

    do_GET = do_PUT = do_POST = do_DELETE = handle_one

    def _send(self, reply: Reply, fault: Fault) -> None:
        body = _flipped(reply.body) if fault.flip == "answer" else reply.body
        self.send_response(reply.status)
        for name, value in reply.headers:
            self.send_header(name, value)
        if reply.status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault.truncate:
            self.close_connection = True
            body = body[: len(body) // 2]
        piece = max(1, -(-len(body) // 10)) if fault.slow_s else max(1, len(body))
        for start in range(0, len(body), piece):
            time.sleep(fault.slow_s)
            self.wfile.write(body[start : start + piece])
            self.wfile.flush()

    def _reset(self) -> None:
        """Close so that the client sees a reset, not an end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def _flipped(body: bytes) -> bytes:
    """A bit in the middle inverted: in the object of a multipart body, too."""
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 4]) + body[middle + 1 :] if body else body


def _parts(body: bytes) -> tuple[dict[str, str], bytes]:
    """The metadata and the object of a GCS insert."""
    boundary, _, _ = body.partition(b"\r\n")
    _, about, content, _ = body.split(boundary)
    return json.loads(about.partition(b"\r\n\r\n")[2]), content.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")


def _page(reply: Reply, query: dict[str, list[str]]) -> Reply:
    """What `startOffset` and `maxResults` leave of a listing."""
    found = json.loads(reply.body) if reply.status == 200 else {}
    if "items" not in found:
        return reply
    first, most = query.get("startOffset", [""])[0], int(query.get("maxResults", ["1000"])[0])
    items = sorted((item for item in found["items"] if item["name"] >= first), key=lambda item: item["name"])
    page: dict[str, Any] = {"items": items[:most]}
    if len(items) > most:
        page["nextPageToken"] = "more"
    return Reply(200, reply.headers, json.dumps(page).encode())
