"""A fake of the clouds' metadata services, on the loopback interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED_PATH = "/computeMetadata/v1/instance/preempted"
ACTION = '{"action": "terminate", "time": "2026-03-01T08:22:00Z"}'


class FakeMetadata(ThreadingHTTPServer):
    """Answers as `cloud` does; a path in `answers` is answered with that status and text instead.

    A status of 0 hangs until `released`; `asked` is every request seen, as "METHOD path".
    """

    daemon_threads = True

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud = cloud
        self.answers: dict[str, tuple[int, str]] = {}
        self.tokens = 0
        self.asked: list[str] = []
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def token(self) -> str:
        """The only token that is valid now."""
        return f"token-{self.tokens}=="

    def answer(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if path in self.answers:
            return self.answers[path]
        if self.cloud == "aws" and path == TOKEN_PATH:
            if method != "PUT" or not 1 <= int(headers.get("x-aws-ec2-metadata-token-ttl-seconds", "0")) <= 21_600:
                return 400, "Bad Request"
            self.tokens += 1
            return 200, self.token
        if self.cloud == "aws" and headers.get("x-aws-ec2-metadata-token") != self.token:
            return 401, "Unauthorized"
        if self.cloud == "gcp" and path == PREEMPTED_PATH:
            return (200, "FALSE") if headers.get("metadata-flavor") == "Google" else (403, "Forbidden")
        return 404, "<html>not found</html>"


class _Handler(BaseHTTPRequestHandler):
    server: FakeMetadata

    def _respond(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, text = self.server.answer(self.command, self.path, headers)
        if status == 0:
            self.server.released.wait()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    do_GET = do_PUT = _respond

    def log_message(self, *_: object) -> None:
        return


@contextmanager
def fake_metadata(cloud: str) -> Iterator[FakeMetadata]:
    """Serve until the block is left."""
    with FakeMetadata(cloud) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.shutdown()
            thread.join()
