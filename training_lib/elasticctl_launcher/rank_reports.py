"""Receives the ranks' reports and forwards them to the rendezvous service.

Ranks send datagrams and never wait (`elasticctl_train.launcher_reports`). Reports are forwarded twice a second, or less
often if the service asks for that because it has many workers. Of several progress reports only the furthest is
forwarded. Reports that must not be lost (first step, resume, commit) are forwarded immediately. Those that stay true
are repeated after the service was away: if it was restarted, it may not have stored them.

In the other direction there is only one message: a file that appears to ask the ranks of a generation to drain. A rank
that has drained reports `drained`. That report and `finished` are not forwarded.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elasticctl_launcher.service.client import ServiceAway, ServiceClient, ServiceError
from elasticctl_launcher.system import start_thread
from elasticctl_protocol.reports import (
    CopiedReport,
    DrainedReport,
    FinishedReport,
    InputsReport,
    MetricRows,
    ProgressReport,
    Report,
    ResumedReport,
    UsageReport,
    decode_report,
    encode_report,
)
from elasticctl_protocol.requests import ReportAnswer, ReportRequest

FLUSH_S = 0.5
TIMEOUT_S, LAST_TIMEOUT_S = 5.0, 1.0
"""How long the service may take to answer: while the worker trains, and when it is about to end."""
MAX_DATAGRAM_BYTES = 65_536
MAX_PENDING = 200
_LASTING = (ResumedReport, CopiedReport, InputsReport)
"""The kinds of reports that are true until the next one of their kind, for as long as the generation lasts."""

log = logging.getLogger(__name__)


class RankReports:
    """Receives datagrams at `path`, a socket in `folder`, until `close`; forwards them to the service from a thread.

    `on_report(report)` is called for every report, and `on_finished(generation, is_over)` when a rank has made its last
    step or, if `is_over` is False, has begun another training after that; both from a thread.

    `newest_generation` is the newest generation whose ranks have reported anything, which proves that the script uses
    the training library. `finished_generation` is the newest generation whose ranks have made their last step. Both are
    -1 if there is none.

    Raises OSError if the socket cannot be created.
    """

    def __init__(
        self,
        client: ServiceClient,
        folder: Path,
        on_report: Callable[[Report], None],
        on_finished: Callable[[int, bool], None],
    ) -> None:
        self._client, self._on_report, self._on_finished = client, on_report, on_finished
        self._folder = str(folder)
        self.path = os.path.join(self._folder, "agent.sock")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._is_away = False
        self._every_s = FLUSH_S
        self._pending: list[Report] = []
        self._lasting: dict[type[Report], Report] = {}
        self._furthest: ProgressReport | None = None
        self._usage: UsageReport | None = None
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
                    pending = {id(report) for report in self._pending}
                    self._pending[:0] = [each for each in self._lasting.values() if id(each) not in pending]
                events, self._pending = self._pending, []
                furthest, self._furthest = self._furthest, None
                usage, self._usage = self._usage, None
            reports = [*events, *(latest for latest in (furthest, usage) if latest is not None)]
            if reports:
                request = ReportRequest(messages=tuple(map(encode_report, reports)))
                self._every_s = max(FLUSH_S, self._client.send(request, ReportAnswer, patience_s).every_s or 0.0)
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
                report = decode_report(json.loads(self._socket.recv(MAX_DATAGRAM_BYTES)))
            except OSError:
                return
            except (ValueError, RecursionError):
                continue
            if isinstance(report, MetricRows):
                self._on_report(report)
            elif report is not None and report.generation is not None and report.step is not None:
                self._accept(report, report.generation)

    def _accept(self, report: Report, generation: int) -> None:
        self.newest_generation = max(self.newest_generation, generation)
        self._on_report(report)
        if isinstance(report, DrainedReport):
            return
        if isinstance(report, FinishedReport):
            self.finished_generation = generation
            self._on_finished(generation, True)
            return
        if isinstance(report, ResumedReport) and self.finished_generation == generation:
            self.finished_generation = -1
            self._on_finished(generation, False)
        with self._lock:
            if not isinstance(report, ProgressReport):
                self._queue(report)
                return
            self._furthest = _merge_progress(replace(report, times=None), self._furthest)
            if generation > self._stepped_generation:
                self._stepped_generation = generation
                self._wake.set()

    def send(self, report: Report) -> None:
        """Forward a report of the launcher itself immediately; may be called from any thread."""
        with self._lock:
            self._queue(report)

    def send_usage(self, report: UsageReport) -> None:
        """Send the worker's use of its machine with the next reports. Only the newest is kept. May be called from any
        thread.
        """
        with self._lock:
            self._usage = report

    def _queue(self, report: Report) -> None:
        """Queue a report to be forwarded immediately. The caller holds the lock."""
        if isinstance(report, _LASTING):
            self._lasting[type(report)] = report
        self._pending.append(report)
        del self._pending[:-MAX_PENDING]
        self._wake.set()

    def _forward(self) -> None:
        while not self._closed:
            self._wake.wait(self._every_s)
            self._wake.clear()
            self._send(TIMEOUT_S)


def _merge_progress(first: ProgressReport | None, second: ProgressReport | None) -> ProgressReport | None:
    """The further of two reports of progress (the first if they are equal), with metrics of the other that it lacks.

    Only some steps have metrics. If the newest step has none, those of the step before are still the newest.
    """
    if first is None or second is None:
        return first or second
    older, newer = sorted((second, first), key=lambda report: (report.generation or 0, report.step or 0))
    return replace(newer, metrics={**(older.metrics or {}), **(newer.metrics or {})} or None)
