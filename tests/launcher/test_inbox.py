"""What ranks report and what of it goes on to the service: the furthest step, with all metrics that came on the way."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticctl_train.launcher.inbox import Inbox
from tests.waiting import wait_until


class Service:
    """Keeps what it is sent; answers as long as `answers` is set."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.answers = threading.Event()

    def call(self, verb: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        assert verb == "report"
        self.answers.wait(timeout_s)
        self.messages += body["messages"]
        return {}


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def inbox(service: Service) -> Iterator[Inbox]:
    with tempfile.TemporaryDirectory(prefix="ec-", dir="/tmp") as folder:  # a socket's path has to be short
        inbox = Inbox(service, Path(folder), lambda generation, rank: None)  # type: ignore[arg-type]
        yield inbox
        service.answers.set()
        inbox.close()


def send(inbox: Inbox, *reports: dict[str, Any]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as wire:
        for report in reports:
            wire.sendto(json.dumps({"kind": "progress", "generation": 1, **report}).encode(), inbox.path)


def test_metrics_are_not_lost_with_the_steps_that_had_them(inbox: Inbox, service: Service) -> None:
    """While the service is busy with the first report, the others gather."""
    send(inbox, {"step": 1})
    wait_until(lambda: inbox.heard == 1 and inbox._furthest is None)
    send(inbox, {"step": 2, "metrics": {"loss": 0.5, "lr": 0.1}}, {"step": 3, "metrics": {"loss": 0.4}}, {"step": 5})
    send(inbox, {"step": 4, "metrics": {"loss": 9.0}}, {"step": 6, "metrics": "garbage"})
    wait_until(lambda: inbox._furthest is not None and inbox._furthest["step"] == 6)
    service.answers.set()
    wait_until(lambda: len(service.messages) == 2)
    assert service.messages[0]["step"] == 1
    assert service.messages[1] | {"step": 6, "metrics": {"loss": 0.4, "lr": 0.1}} == service.messages[1]
