"""What ranks report, and what of it is forwarded to the service: the furthest step, with all metrics since the last."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl_launcher.rank_reports import LAST_TIMEOUT_S, MAX_PENDING, RankReports
from elasticctl_launcher.service.client import ServiceAway, ServiceClient, ServiceError, ServiceRefused
from elasticctl_protocol.reports import CommittedReport, DrainedReport, MetricRows, Report, UsageReport
from tests.support.waiting import wait_until


class Service:
    """Stores the requests; answers while `answers` is set, or raises `trouble` if it is set."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.asked_by: list[threading.Thread] = []
        self.answers = threading.Event()
        self.trouble: ServiceError | None = None
        self.was_away = threading.Event()

    def call(self, verb: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert verb == "report"
        self.asked_by.append(threading.current_thread())
        self.answers.wait()
        if self.trouble is not None:
            raise self.trouble
        self.messages += body["messages"]
        return {}

    send = ServiceClient.send


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def received() -> list[Report]:
    """The calls of `on_finished`."""
    return []


@pytest.fixture
def finished() -> list[tuple[int, bool]]:
    return []


@pytest.fixture
def inbox(service: Service, received: list[Report], finished: list[tuple[int, bool]]) -> Iterator[RankReports]:
    with tempfile.TemporaryDirectory(prefix="ec-") as folder:  # the path of a socket must be short
        inbox = RankReports(service, Path(folder), received.append, lambda *ended: finished.append(ended))  # type: ignore[arg-type]
        yield inbox
        service.answers.set()
        inbox.close()


def send(inbox: RankReports, *reports: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
        for report in reports:
            wire.sendto(json.dumps({"kind": "progress", "generation": 1, **report}).encode(), inbox.path)


def test_metrics_are_not_lost_with_the_steps_that_had_them(inbox: RankReports, service: Service) -> None:
    """The other reports collect while the service is busy with the first one."""
    send(inbox, {"step": 1})
    wait_until(lambda: inbox.newest_generation == 1 and inbox._furthest is None)
    send(inbox, {"step": 2, "metrics": {"loss": 0.5, "lr": 0.1}}, {"step": 3, "metrics": {"loss": 0.4}}, {"step": 5})
    send(inbox, {"step": 4, "metrics": {"loss": 9.0}}, {"step": 6, "metrics": "garbage"})
    wait_until(lambda: inbox._furthest is not None and inbox._furthest.step == 6)
    service.answers.set()
    wait_until(lambda: len(service.messages) == 2)
    assert service.messages[0]["step"] == 1
    assert service.messages[1] | {"step": 6, "metrics": {"loss": 0.4, "lr": 0.1}} == service.messages[1]


def test_lasting_reports_are_repeated_to_a_service_that_was_away(inbox: RankReports, service: Service) -> None:
    service.answers.set()
    resumed = {"kind": "resumed", "step": 4}
    send(inbox, resumed | {"step": 3}, resumed, {"kind": "copied", "step": 4}, {"kind": "committed", "step": 6})
    wait_until(lambda: len(service.messages) == 4)
    sent = list(service.messages)
    service.was_away.set()
    wait_until(lambda: len(service.messages) == 6)
    assert service.messages[4:] == sent[1:3]
    send(inbox, {"kind": "committed", "step": 7})
    wait_until(lambda: len(service.messages) == 7)


def test_reports_are_delivered_after_an_outage(inbox: RankReports, service: Service) -> None:
    service.answers.set()
    service.trouble = ServiceAway("restarting")
    reports = [{"kind": "resumed", "step": 4}, {"step": 5, "metrics": {"loss": 0.5}}, {"kind": "committed", "step": 6}]
    send(inbox, *reports)
    wait_until(lambda: inbox._is_away and len(inbox._pending) == 2)
    service.trouble = None
    wait_until(lambda: len(service.messages) == 3)
    assert [message["step"] for message in service.messages] == [4, 6, 5]
    assert service.messages[-1]["metrics"] == {"loss": 0.5}


def test_a_worker_that_ends_does_not_wait_for_a_service_that_is_away(inbox: RankReports, service: Service) -> None:
    inbox.send(CommittedReport(generation=1, step=1))
    wait_until(lambda: service.asked_by)  # the service does not answer, so the first report waits
    inbox.flush()
    service.trouble = ServiceAway("timed out")
    service.answers.set()
    wait_until(lambda: inbox._is_away)
    service.answers.clear()
    inbox.flush()
    assert threading.main_thread() not in service.asked_by


def test_pending_reports_are_bounded_and_refused_ones_dropped(inbox: RankReports, service: Service) -> None:
    service.answers.set()
    service.trouble = ServiceAway("restarting")
    for step in range(MAX_PENDING + 50):
        inbox.send(CommittedReport(generation=1, step=step))
        inbox._send(LAST_TIMEOUT_S)
    assert [report.step for report in inbox._pending] == list(range(50, MAX_PENDING + 50))
    service.trouble = ServiceRefused(410, "no running job")
    inbox._send(LAST_TIMEOUT_S)
    assert inbox._pending == []


def test_malformed_reports_are_ignored(inbox: RankReports, service: Service, received: list[Report]) -> None:
    service.answers.set()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
        for datagram in (b"[" * 50_000, b"\xff", b"5", b'{"kind": "progress"}'):
            wire.sendto(datagram, inbox.path)
    send(inbox, {"kind": "drained", "step": 1, "rank": [0]}, {"kind": "drained", "step": 1, "rank": 3}, {"step": 2})
    wait_until(lambda: bool(service.messages))
    assert [message["step"] for message in service.messages] == [2]
    assert [report.rank for report in received if isinstance(report, DrainedReport)] == [None, 3]


def test_metrics_are_not_forwarded(inbox: RankReports, service: Service, received: list[Report]) -> None:
    service.answers.set()
    send(inbox, {"kind": "metrics", "rows": ['{"step": 1}', 5]}, {"kind": "metrics", "rows": "garbage"}, {"step": 1})
    wait_until(lambda: bool(service.messages))
    assert [report.rows for report in received if isinstance(report, MetricRows)] == [('{"step": 1}',), ()]
    assert [message["kind"] for message in service.messages] == ["progress"]


def test_only_the_newest_usage_is_sent(inbox: RankReports, service: Service) -> None:
    inbox.send_usage(UsageReport(cpus_used=1.0))
    inbox.send_usage(UsageReport(cpus_used=2.0))
    service.answers.set()
    wait_until(lambda: len(service.messages) == 1)
    send(inbox, {"step": 1})
    wait_until(lambda: len(service.messages) == 2)
    assert [message.get("cpus_used") for message in service.messages] == [2.0, None]


def test_a_script_that_trains_again_is_not_over(inbox: RankReports, finished: list[tuple[int, bool]]) -> None:
    send(inbox, {"kind": "resumed", "step": 0}, {"kind": "finished", "step": 9}, {"kind": "resumed", "step": 0})
    wait_until(lambda: len(finished) == 2)
    assert finished == [(1, True), (1, False)]
    assert inbox.finished_generation == -1
