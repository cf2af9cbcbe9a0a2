"""When and how a launcher reports what it does."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from elasticctl_launcher.service.client import ServiceAway, ServiceError, ServiceRefused
from elasticctl_launcher.service.heartbeat import BEAT_S, HeartbeatSender
from elasticctl_protocol.requests import Doing, FinishRequest
from tests.support.waiting import wait_until


class Service:
    """Stores requests; raises `trouble` while it is set, and holds long polls while `holds` is not set."""

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.trouble: ServiceError | None = None
        self.holds = threading.Event()

    def call(self, verb: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        self.received.append((verb, dict(body)))
        if self.trouble is not None:
            raise self.trouble
        if verb != "heartbeat":
            self.holds.wait(10)
        return {"state": "waiting"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def heart(service: Service, clock: Clock) -> HeartbeatSender:
    return HeartbeatSender(service, "uid-a-0", clock)  # type: ignore[arg-type]


def test_it_reports_what_the_launcher_does_and_since_when(
    heart: HeartbeatSender, service: Service, clock: Clock
) -> None:
    clock.now += 2
    heart.beat()
    heart.say(Doing.STOPPING, 3)
    clock.now += 60
    heart.say(Doing.STOPPING, 3)
    heart.beat()
    assert [body for _, body in service.received] == [
        {"uid": "uid-a-0", "generation": 0, "doing": "preparing", "since_s": 2.0},
        {"uid": "uid-a-0", "generation": 3, "doing": "stopping", "since_s": 60.0},
    ]


def test_one_is_due_at_each_change_and_every_few_seconds(heart: HeartbeatSender) -> None:
    assert heart.is_due(0.0), "it has not been reported yet"
    heart.beat()
    assert not heart.is_due(BEAT_S / 2)
    assert heart.is_due(BEAT_S)
    heart.say(Doing.WAITING, 1)
    assert heart.is_due(0.0)


def test_a_long_poll_is_a_heartbeat(heart: HeartbeatSender, service: Service) -> None:
    heart.say(Doing.WAITING, 1)
    polling = threading.Thread(target=heart.poll, args=[FinishRequest(uid="uid-a-0", generation=1)])
    polling.start()
    wait_until(lambda: service.received)
    assert service.received == [("finish", {"uid": "uid-a-0", "generation": 1, "doing": "waiting", "since_s": 0.0})]
    assert not heart.is_due(100 * BEAT_S)
    heart.say(Doing.EXPORTING, 1)
    assert heart.is_due(0.0), "the poll has begun before the change"
    service.holds.set()
    polling.join()
    heart.beat()
    assert heart.is_due(BEAT_S)


@pytest.mark.parametrize("trouble", [ServiceAway("away"), ServiceRefused(404, "unknown verb")])
def test_a_service_that_is_away_is_ignored(heart: HeartbeatSender, service: Service, trouble: ServiceError) -> None:
    service.trouble = trouble
    heart.beat()
    assert heart.is_due(BEAT_S)


def test_a_thread_sends_them(service: Service) -> None:
    heart = HeartbeatSender(service, "uid-a-0")  # type: ignore[arg-type]
    heart.start()
    wait_until(lambda: len(service.received) == 1)
    heart.say(Doing.RUNNING, 1)
    wait_until(lambda: len(service.received) == 2)
    heart.close()
    assert [body["doing"] for _, body in service.received] == ["preparing", "running"]
