"""Receives the ranks' reports and forwards them to the rendezvous service.

Ranks send datagrams and never wait (`elasticctl_train.progress`). Reports are forwarded twice a second, or less often
if the service asks for that because it has many workers. Of several progress reports only the furthest is forwarded.
Reports that must not be lost (first step, resume, commit) are forwarded at once. Those that stay true are repeated
after the service was away: if it was restarted, it may not have stored them.

In the other direction there is only one message: a file that appears to ask the ranks of a generation to drain. A rank
that has drained reports `drained`. That report and `finished` are not forwarded.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticctl_launcher.service.client import ServiceAway, ServiceClient, ServiceError
from elasticctl_launcher.system import start_thread

FLUSH_S = 0.5
TIMEOUT_S, LAST_TIMEOUT_S = 5.0, 1.0
"""How long the service may take to answer: while the worker trains, and when it is about to end."""
MAX_DATAGRAM_BYTES = 65_536
MAX_PENDING = 200
_LASTING = frozenset({"resumed", "copied", "inputs"})
"""The kinds of reports that are true until the next one of their kind, for as long as the generation lasts."""

log = logging.getLogger(__name__)


class RankReports:
    """Receives datagrams at `path`, a socket in `folder`, until `close`; forwards them to the service from a thread.

    `on_drained(generation, rank)`: a rank has drained. `on_finished(generation, is_over)`: a rank has made its last
    step, or, if `is_over` is False, has begun another training after that. `on_metrics(rows)`: metrics, as lines of
    JSON. `on_times(generation, rank, times)`: where a rank spent its time; not forwarded in this form.
    `on_report(message)`: any report except metrics. All of them are called from a thread.

    `newest_generation` is the newest generation whose ranks have reported anything, which proves that the script uses
    the training library. `finished_generation` is the newest generation whose ranks have made their last step. Both are
    -1 if there is none.

    Raises OSError if the socket cannot be created.
    """

    def __init__(self, client: ServiceClient, folder: Path, on_drained: Callable[[int, int], None]) -> None:
        self._client, self._on_drained = client, on_drained
        self.on_finished: Callable[[int, bool], None] = lambda generation, is_over: None
        self.on_report: Callable[[Mapping[str, Any]], None] = lambda message: None
        self.on_metrics: Callable[[Sequence[str]], None] = lambda rows: None
        self.on_times: Callable[[int, object, Mapping[str, Any]], None] = lambda generation, rank, times: None
        self._folder = str(folder)
        self.path = os.path.join(self._folder, "agent.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._is_away = False
        self._every_s = FLUSH_S
        self._pending: list[dict[str, Any]] = []
        self._lasting: dict[str, dict[str, Any]] = {}
        self._furthest: dict[str, Any] | None = None
        self._usage: dict[str, Any] | None = None
        self.newest_generation = -1
        self.finished_generation = -1
        self._stepped_generation = -1
        self._wake = threading.Event()
        self._closed = False
        for work in (self._receive, self._forward):
            start_thread(work, name=f"reports{work.__name__}")

    def error_file(self, generation: int, rank: int) -> str:
        """Return the path of the file in which torch's `@record` stores the exception of a rank."""
        return os.path.join(self._folder, f"error-{generation}-{rank}.json")

    def notice_file(self, generation: int) -> str:
        """Return the path of the file that asks the ranks of a generation to agree on a step, commit it and stop."""
        return os.path.join(self._folder, f"notice-{generation}")

    def flush(self) -> None:
        """Send pending reports before the ranks are stopped. Does nothing if the service was away at the last try."""
        if not self._is_away:
            self._send(LAST_TIMEOUT_S)

    def _send(self, patience_s: float) -> None:
        """Send pending reports. If the service is away, they stay pending."""
        if not self._sending.acquire(timeout=patience_s):
            return
        try:
            with self._lock:
                if self._client.was_away.is_set():
                    self._client.was_away.clear()
                    pending = {id(message) for message in self._pending}
                    self._pending[:0] = [each for each in self._lasting.values() if id(each) not in pending]
                events, self._pending = self._pending, []
                furthest, self._furthest = self._furthest, None
                usage, self._usage = self._usage, None
            messages = [*events, *(latest for latest in (furthest, usage) if latest is not None)]
            if messages:
                answer = self._client.call("report", {"messages": messages}, timeout_s=patience_s)
                every_s = answer.get("every_s")
                self._every_s = max(FLUSH_S, every_s) if isinstance(every_s, int | float) else FLUSH_S
                self._is_away = False
        except ServiceAway as error:
            log.debug("cannot deliver reports: %s", error)
            self._is_away = True
            with self._lock:
                self._pending[:0] = events
                del self._pending[:-MAX_PENDING]
                self._furthest = _merge_progress(self._furthest, furthest)
        except ServiceError as error:
            log.debug("the service refused reports: %s", error)
        finally:
            self._sending.release()

    def close(self) -> None:
        """Send pending reports and stop listening."""
        self._closed = True
        self._wake.set()
        self._send(LAST_TIMEOUT_S)  # the last chance, even if the service was away at the last try
        self._socket.close()

    def _receive(self) -> None:
        while not self._closed:
            try:
                message = json.loads(self._socket.recv(MAX_DATAGRAM_BYTES))
            except OSError:
                return
            except (ValueError, RecursionError):
                continue
            if isinstance(message, dict):
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        if message.get("kind") == "metrics":
            rows = message.get("rows")
            self.on_metrics([row for row in rows if isinstance(row, str)] if isinstance(rows, list) else [])
            return
        generation, step = message.get("generation"), message.get("step")
        if not isinstance(generation, int) or not isinstance(step, int):
            return
        self.newest_generation = max(self.newest_generation, generation)
        times = message.pop("times", None)
        if isinstance(times, Mapping):
            self.on_times(generation, message.get("rank"), times)
        self.on_report(message)
        if message.get("kind") == "drained":
            rank = message.get("rank")
            if isinstance(rank, int):
                self._on_drained(generation, rank)
            return
        if message.get("kind") == "finished":
            self.finished_generation = generation
            self.on_finished(generation, True)
            return
        if message.get("kind") == "resumed" and self.finished_generation == generation:
            self.finished_generation = -1
            self.on_finished(generation, False)
        with self._lock:
            if message.get("kind") != "progress":
                self._add(message)
                return
            self._furthest = _merge_progress(message, self._furthest)
            if generation > self._stepped_generation:
                self._stepped_generation = generation
                self._wake.set()

    def send(self, message: dict[str, Any]) -> None:
        """Forward a message of the launcher itself at once; may be called from any thread."""
        with self._lock:
            self._add(message)

    def note_usage(self, message: dict[str, Any]) -> None:
        """Send the worker's use of its machine with the next report. Only the newest is kept. May be called from any
        thread.
        """
        with self._lock:
            self._usage = message

    def _add(self, message: dict[str, Any]) -> None:
        """Queue a message to be forwarded at once. The caller holds the lock."""
        kind = message.get("kind")
        if kind in _LASTING:
            self._lasting[kind] = message
        self._pending.append(message)
        del self._pending[:-MAX_PENDING]
        self._wake.set()

    def _forward(self) -> None:
        while not self._closed:
            self._wake.wait(self._every_s)
            self._wake.clear()
            self._send(TIMEOUT_S)


def _merge_progress(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """The further of two progress reports (the first if they are equal), with metrics of the other that it lacks.

    Only some steps have metrics. If the newest step has none, those of the step before are still the newest.
    """
    if first is None or second is None:
        return first or second
    older, newer = sorted((second, first), key=lambda report: (report["generation"], report["step"]))
    parts = [report.get("metrics") for report in (older, newer)]
    metrics = {name: value for part in parts if isinstance(part, dict) for name, value in part.items()}
    return {**newer, "metrics": metrics} if metrics else newer
