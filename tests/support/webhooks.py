"""A webhook's other end: a real HTTP server on loopback that keeps what it is sent, and answers as a test says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Hook:
    """`answer(number)` gives status and headers of the answer to the call of that number, from 1 on.

    While `open` is not set, it hears calls and answers none.
    """

    answer: Callable[[int], tuple[int, dict[str, str]]] = lambda number: (200, {})
    got: list[dict[str, Any]] = field(default_factory=list)
    calls: list[float] = field(default_factory=list)
    signatures: list[str] = field(default_factory=list)
    url: str = ""
    open: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.open.set()

    @property
    def texts(self) -> list[str]:
        """The lines of all messages that were taken."""
        return [line for message in self.got for line in message["text"].split("\n")]

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for message in self.got for event in message["elasticctl"]["events"]]


@contextmanager
def serving(hook: Hook) -> Iterator[Hook]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Content-Type"] == "application/json"
            with lock:
                hook.calls.append(time.monotonic())
                hook.signatures.append(self.headers.get("webhook-signature", ""))
                status, headers = hook.answer(len(hook.calls))
            hook.open.wait()
            if status < 300:
                hook.got.append(message)
            self.send_response(status)
            for name, value in {"Content-Length": "2", **headers}.items():
                self.send_header(name, value)
            with suppress(OSError):  # the client waits for it no longer
                self.end_headers()
                self.wfile.write(b"ok")

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hook.url = f"http://127.0.0.1:{server.server_address[1]}/services/T0/B0/planted-secret"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hook
    finally:
        hook.open.set()
        server.shutdown()
        server.server_close()
