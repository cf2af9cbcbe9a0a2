"""The metadata services of AWS and Google Cloud for the lab's pods, with an answer for each machine: pods are
identified by their addresses."""

from __future__ import annotations

import json
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SPOT, REBALANCE = "/latest/meta-data/spot/instance-action", "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"


class Metadata:
    """Serves at `url` until it is stopped."""

    def __init__(self, address: str) -> None:
        self._said: dict[tuple[str, str], str] = {}
        said = self._said

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._answer(200, "token")

            def do_GET(self) -> None:
                otherwise = "FALSE" if self.path == PREEMPTED else None
                text = said.get((self.client_address[0], self.path), otherwise)
                self._answer(404 if text is None else 200, text or "")

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

        class Server(ThreadingHTTPServer):
            def handle_error(self, request: object, client_address: object) -> None:
                """Log nothing: the client did not wait, or has been frozen."""

        self._server = Server((address, 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metadata", daemon=True)
        self._thread.start()
        self.url = f"http://{address}:{self._server.server_port}"

    def announce(self, pod_ip: str, at: float) -> None:
        """Notify this pod that its machine will be reclaimed; Google Cloud does not say that it is at `at`."""
        self._said[pod_ip, PREEMPTED] = "TRUE"
        self._said[pod_ip, SPOT] = json.dumps({"action": "terminate", "time": _text(at)})

    def recommend(self, pod_ip: str, at: float) -> None:
        """Recommend this pod, as of `at`, to leave its machine."""
        self._said[pod_ip, REBALANCE] = json.dumps({"noticeTime": _text(at)})

    def clear_notices(self, pod_ip: str) -> None:
        """Give this address no notice any more: another pod may get it."""
        for path in (SPOT, REBALANCE, PREEMPTED):
            self._said.pop((pod_ip, path), None)

    def stop(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _text(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
