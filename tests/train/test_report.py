"""Reports to the launcher."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticctl_train.data.plan import Cursor, EpochPlan
from elasticctl_train.progress import Progress, Reporter


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "agent"))
        listening.settimeout(10)
        yield listening


def environment(listener: socket.socket) -> dict[str, str]:
    return {"ELASTICCTL_AGENT_SOCKET": listener.getsockname(), "ELASTICCTL_GENERATION": "3"}


def received(listener: socket.socket) -> dict[str, Any]:
    message = json.loads(listener.recv(65536))
    assert isinstance(message, dict)
    return message


def test_a_report_is_one_json_object(listener: socket.socket) -> None:
    reporter = Reporter(1, environment(listener))
    reporter.send("resumed", step=100, unknown=None)
    assert received(listener) == {"kind": "resumed", "rank": 1, "generation": 3, "step": 100}
    reporter.close()
    reporter.send("resumed", step=100)


def test_without_a_launcher_nothing_is_said() -> None:
    Reporter(0, {}).send("resumed", step=0)


def test_nobody_listening_does_no_harm(tmp_path: Path) -> None:
    reporter = Reporter(0, {"ELASTICCTL_AGENT_SOCKET": str(tmp_path / "gone")})
    reporter.send("resumed", step=0)
    reporter.close()


def test_a_listener_that_is_slow_is_not_waited_for(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    for step in range(10_000):
        reporter.send("progress", step=step)
    assert received(listener)["step"] == 0
    reporter.close()


def test_progress_tells_steps_to_go_speed_and_metrics(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    progress.total_epochs, progress.plan = 3, EpochPlan(20, 8)
    progress.step(Cursor(step=4, epoch=1, position=8), 8, torch.tensor(0.5, requires_grad=True))
    assert received(listener) == {
        "kind": "progress", "rank": 0, "generation": 3, "step": 4, "total_steps": 9, "epoch": 1, "total_epochs": 3,
        "metrics": {"loss": 0.5},
    }  # fmt: skip
    progress.step(Cursor(step=5, epoch=1, position=16), 8, 0.25)
    second = received(listener)
    assert second["total_steps"] == 9
    assert second["samples_per_s"] > 0
    assert "metrics" not in second
    progress.send(Cursor(step=5, epoch=1, position=16), {"accuracy": 0.5})
    third = received(listener)
    assert (third["total_steps"], third["metrics"]) == (9, {"accuracy": 0.5})
    reporter.close()


def test_steps_of_accumulated_gradients_are_counted_as_one(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    progress.total_epochs, progress.plan = 2, EpochPlan(64, 8)
    progress.step(Cursor(step=1, epoch=0, position=16), 16, None)
    assert received(listener)["total_steps"] == 8
    reporter.close()


def test_a_metric_json_has_no_word_for_is_left_out(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    progress.note({"loss": float("nan"), "best": float("inf"), "accuracy": torch.tensor(0.5)})
    assert progress.metrics == {"accuracy": 0.5}
    reporter.close()
