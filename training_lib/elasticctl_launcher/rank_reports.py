"""Reports of the ranks, gathered by the launcher and sent on to the service a few times a second.

Ranks send datagrams and never wait (`elasticctl_train.progress`). Of many progress reports only the last is sent on;
what a status must not miss (first step, resume, commit) goes at once.

The other way there is one word only: a file whose appearance tells the ranks of a generation to come to an end in
order. When a rank has, it reports `drained`, which stays here, as `finished` does.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from elasticctl_launcher.service_client import ServiceAway, ServiceClient, ServiceError

FLUSH_S = 0.5
PATIENCE_S, LAST_PATIENCE_S = 5.0, 1.0
"""How long an answer may take: of a worker that trains, and of one that is about to end."""
MAX_DATAGRAM_BYTES = 65_536
MAX_PENDING = 200

log = logging.getLogger(__name__)


class RankReports:
    """Listens on `path`, in `folder`, until `close`; sends to the service from a thread of its own.

    `on_drained(generation, rank)` is called from a thread; `heard` is the newest generation whose ranks have reported
    anything, which tells that the script uses the training library.
    """

    def __init__(self, client: ServiceClient, folder: Path, on_drained: Callable[[int, int], None]) -> None:
        self._client, self._on_drained = client, on_drained
        self._folder = str(folder)
        self.path = os.path.join(self._folder, "agent.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._away = False
        self._pending: list[dict[str, Any]] = []
        self._furthest: dict[str, Any] | None = None
        self.heard = -1
        self._finished = -1
        self._life_at = time.monotonic()
        self._stepped_generation = -1
        self._due = threading.Event()
        self._closed = False
        for work in (self._listen, self._send_on):
            threading.Thread(target=work, name=f"inbox-{work.__name__}", daemon=True).start()

    def error_file(self, generation: int, rank: int) -> str:
        """Where torch's `@record` writes the exception of a rank."""
        return os.path.join(self._folder, f"error-{generation}-{rank}.json")

    def silence_s(self) -> float:
        """Seconds since a rank last did a step, or said anything else; 0 once they have finished training."""
        return 0.0 if self._finished >= self.heard else time.monotonic() - self._life_at

    def notice_file(self, generation: int) -> str:
        """The file that tells the ranks of a generation to agree on a step, commit it and stop."""
        return os.path.join(self._folder, f"notice-{generation}")

    def flush(self) -> None:
        """Send what is pending before something ends here: at once, unless the service was away a moment ago."""
        if not self._away:
            self._send(LAST_PATIENCE_S)

    def _send(self, patience_s: float) -> None:
        """Send what is pending. What a service that is away did not take is kept for the next time."""
        if not self._sending.acquire(timeout=patience_s):
            return
        try:
            with self._lock:
                facts, self._pending = self._pending, []
                furthest, self._furthest = self._furthest, None
            messages = facts if furthest is None else [*facts, furthest]
            if messages:
                self._client.call("report", {"messages": messages}, timeout_s=patience_s)
                self._away = False
        except ServiceAway as error:
            log.debug("reports not delivered: %s", error)
            self._away = True
            with self._lock:
                self._pending[:0] = facts
                del self._pending[:-MAX_PENDING]
                self._furthest = _newer(self._furthest, furthest)
        except ServiceError as error:
            log.debug("reports refused: %s", error)
        finally:
            self._sending.release()

    def close(self) -> None:
        """Send what is left and stop listening."""
        self._closed = True
        self._due.set()
        self._send(LAST_PATIENCE_S)  # the last chance, though it was away a moment ago
        self._socket.close()

    def _listen(self) -> None:
        while not self._closed:
            try:
                message = json.loads(self._socket.recv(MAX_DATAGRAM_BYTES))
            except OSError:
                return
            except ValueError:
                continue
            if isinstance(message, dict):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        generation, step = message.get("generation"), message.get("step")
        if not isinstance(generation, int) or not isinstance(step, int):
            return
        self.heard = max(self.heard, generation)
        self._life_at = time.monotonic()
        if message.get("kind") == "drained":
            self._on_drained(generation, message.get("rank", -1))
            return
        if message.get("kind") == "finished":
            self._finished = generation  # what the script still does, an export or a test, may take its time
            return
        with self._lock:
            if message.get("kind") != "progress":
                self._pending.append(message)
                del self._pending[:-MAX_PENDING]
                self._due.set()
                return
            self._furthest = _newer(message, self._furthest)
            if generation > self._stepped_generation:
                self._stepped_generation = generation
                self._due.set()

    def _send_on(self) -> None:
        while not self._closed:
            self._due.wait(FLUSH_S)
            self._due.clear()
            self._send(PATIENCE_S)


def _newer(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """Of two reports of progress the further one, the first of two alike; with the metrics of the other that it lacks.

    Metrics come with few of the steps: where the newest step has none, those of the one before are the newest.
    """
    if first is None or second is None:
        return first or second
    older, newer = sorted((second, first), key=lambda report: (report["generation"], report["step"]))
    parts = [report.get("metrics") for report in (older, newer)]
    metrics = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    return {**newer, "metrics": metrics} if metrics else newer
