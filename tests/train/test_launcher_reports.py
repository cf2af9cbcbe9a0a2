"""Reports to the launcher, and its notice: all ranks stop after the same step, and commit it."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elasticctl_protocol.reports import ProgressReport, ResumedReport
from elasticctl_store.checkpoints.commits import read_commits
from elasticctl_store.storage.local import LocalStorage
from elasticctl_train import launcher_reports
from elasticctl_train.data.sample_order import Cursor, EpochPlan, Step
from elasticctl_train.launcher_reports import NoticeFile, Progress, Reporter
from elasticctl_train.metrics import LoggedMetrics, LostMetric
from tests.support.train import programs, ranks
from tests.support.train.launcher import Launcher
from tests.support.train.programs import trained


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "agent"))
        listening.settimeout(240)
        yield listening


def environment(listener: socket.socket) -> dict[str, str]:
    return {"ELASTICCTL_AGENT_SOCKET": listener.getsockname(), "ELASTICCTL_GENERATION": "3"}


def received(listener: socket.socket, *, rows: bool = False) -> dict[str, Any]:
    """The next report, with or without rows of metrics."""
    while True:
        message = json.loads(listener.recv(65536))
        assert isinstance(message, dict)
        if (message["kind"] == "metrics") is rows:
            return message


def test_a_report_is_one_json_object(listener: socket.socket) -> None:
    reporter = Reporter(1, environment(listener))
    reporter.send(ResumedReport(step=100))
    assert received(listener) == {"kind": "resumed", "rank": 1, "generation": 3, "step": 100}
    reporter.close()
    reporter.send(ResumedReport(step=100))


def test_without_a_launcher_nothing_is_reported() -> None:
    Reporter(0, {}).send(ResumedReport(step=0))


def test_a_missing_listener_is_ignored(tmp_path: Path) -> None:
    reporter = Reporter(0, {"ELASTICCTL_AGENT_SOCKET": str(tmp_path / "gone")})
    reporter.send(ResumedReport(step=0))
    reporter.close()


def test_reports_do_not_wait_for_a_slow_listener(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    for step in range(10_000):
        reporter.send(ProgressReport(step=step))
    assert received(listener)["step"] == 0
    reporter.close()


@pytest.fixture(autouse=True)
def _half_a_second_never_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics are sent with a step that is long enough after the last one that had them."""
    monkeypatch.setattr("elasticctl_train.metrics.time", SimpleNamespace(time=time.time, monotonic=lambda: 100.0))


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_reports, "REPORT_EVERY_S", 0.0)


@pytest.mark.usefixtures("every_step")
def test_progress_includes_total_steps_speed_and_metrics(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    progress.expect(total_epochs=3)
    progress.expect_order(EpochPlan(20, 8))
    progress.record_step(
        Step(8, loss=torch.tensor(0.5, requires_grad=True), cursor=Cursor(step=4, epoch=1, position=8))
    )
    assert received(listener) == {
        "kind": "progress", "rank": 0, "generation": 3, "step": 4, "total_steps": 9, "epoch": 1, "total_epochs": 3,
        "metrics": {"loss": 0.5},
    }  # fmt: skip
    progress.record_step(Step(8, loss=0.25, cursor=Cursor(step=5, epoch=1, position=16)))
    second = received(listener)
    assert second["total_steps"] == 9
    assert second["samples_per_s"] > 0
    assert "metrics" not in second
    progress.metrics.add(5, {"accuracy": 0.5})
    progress.send(Cursor(step=5, epoch=1, position=16))
    third = received(listener)
    assert (third["total_steps"], third["metrics"]) == (9, {"loss": 0.25, "accuracy": 0.5})
    reporter.close()


def test_steps_of_accumulated_gradients_are_counted_as_one(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    progress.expect(total_epochs=2)
    progress.expect_order(EpochPlan(64, 8))
    progress.record_step(Step(16, cursor=Cursor(step=1, epoch=0, position=16)))
    assert received(listener)["total_steps"] == 8
    reporter.close()


def test_some_short_steps_are_reported_and_the_newest_at_the_end(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr(launcher_reports, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    progress.report_rest()
    for step in range(1, 6):
        progress.record_step(Step(8, cursor=Cursor(step=step)))
    progress.report_rest()
    progress.report_rest()
    now_s[0] += 2 * launcher_reports.REPORT_EVERY_S
    progress.record_step(Step(8, cursor=Cursor(step=6)))
    messages = [received(listener) for _ in range(4)]
    assert [message["step"] for message in messages] == [1, 2, 5, 6], "the second report has times, which are due"
    assert messages[-1]["samples_per_s"] == pytest.approx(40 / (2 * launcher_reports.REPORT_EVERY_S))
    reporter.close()


@pytest.mark.usefixtures("every_step")
def test_metrics_that_are_not_finite_are_reported_with_their_first_step(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    losses = [2.0, float("inf"), torch.tensor(float("nan")), float("nan")]
    for step, loss in enumerate(losses, start=80):
        progress.record_step(Step(8, loss=loss, cursor=Cursor(step=step)))
        received(listener)
    progress.metrics.add(84, {"best": float("-inf"), "accuracy": torch.tensor(0.5)})
    progress.send(Cursor(step=84))
    assert received(listener)["metrics"] == {
        "loss": {"value": "NaN", "since_step": 81},
        "best": {"value": "-inf", "since_step": 84},
        "accuracy": 0.5,
    }
    progress.metrics.add(85, {"loss": 1.5})
    progress.send(Cursor(step=85))
    assert received(listener)["metrics"]["loss"] == 1.5
    reporter.close()


def test_rank_0_sends_every_value_once(listener: socket.socket) -> None:
    for rank in (1, 0):
        reporter = Reporter(rank, environment(listener))
        progress = Progress(reporter)
        progress.metrics.restore(9, {"loss": 7.0})
        for step, loss in enumerate([0.5, torch.tensor(float("nan")), float("-inf"), 0.25], start=10):
            progress.metrics.add_loss(step, loss, 8 * step if step < 12 else None)
        progress.metrics.add(13, {"accuracy": torch.tensor(0.5), "step": 1.0, "samples": 2.0})
        progress.metrics.add(13, {"accuracy": 0.75})
        progress.send_rows()
        progress.metrics.add(14, {"long": 1.0, "x" * 300: 1.0})
        progress.send_rows()  # too early: the rows wait
        for step in range(15, 315):
            progress.metrics.add(step, {"x" * 100: 1.0})
        progress.send_rows(surely=True)
        reporter.close()
    rows: list[dict[str, Any]] = []
    while not rows or rows[-1]["step"] < 314:
        rows += map(json.loads, received(listener, rows=True)["rows"])
    assert all(row.pop("at") > 0 for row in rows)
    assert rows[:6] == [
        {"step": 10, "samples": 80, "loss": 0.5}, {"step": 11, "samples": 88, "loss": "NaN"},
        {"step": 12, "loss": "-Infinity"},
        {"step": 13, "loss": 0.25, "accuracy": 0.5}, {"step": 13, "accuracy": 0.75},
        {"step": 14, "long": 1.0, "x" * 300: 1.0},
    ]  # fmt: skip
    assert [row["step"] for row in rows[6:]] == list(range(15, 315))


def test_rows_contain_the_total_number_of_samples(listener: socket.socket) -> None:
    reporter = Reporter(0, environment(listener))
    progress = Progress(reporter)
    for cursor in (Cursor(4, 1, 8, 20), Cursor(5, 1, 16, 20), Cursor(6, 2, 8, None)):
        progress.record_step(Step(8, loss=0.5, cursor=cursor))
    progress.send_rows(surely=True)
    rows = [json.loads(row) for _ in range(2) for row in received(listener, rows=True)["rows"]]
    assert [(row["step"], row.get("samples")) for row in rows] == [(4, 28), (5, 36), (6, None)]
    reporter.close()


def test_losses_on_a_device_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor on another device: all such tensors are read together."""
    monkeypatch.setattr("elasticctl_train.metrics._is_elsewhere", lambda loss: True)
    metrics = LoggedMetrics()
    stacked = []
    monkeypatch.setattr(torch, "stack", lambda parts, stack=torch.stack: stacked.append(len(parts)) or stack(parts))
    metrics.add_loss(1, torch.tensor(1.0))
    values = [1.0, 1.0, float("nan"), float("nan")]
    for step, value in enumerate(values, start=2):
        metrics.add_loss(step, torch.tensor(value))
    assert (stacked, metrics.not_finite) == ([1], {})
    metrics.read_losses()
    assert (stacked, metrics.not_finite) == ([1, 4], {"loss": LostMetric("NaN", 4)})
    for step in range(1000):
        metrics.add_loss(step, torch.tensor(1.0, dtype=torch.float16 if step == 500 else torch.float32))
    assert max(stacked) <= 256
    metrics.read_losses()
    assert metrics.not_finite == {}


END = {"epochs": 200, "samples": 1000, "global_batch": 8, "every_steps": 100_000}
"""More steps than possible, and rare saves: only notice makes the ranks commit a step."""


@pytest.mark.parametrize(("world_size", "noticed"), [(1, 0), (3, 1)])
def test_all_ranks_stop_after_the_same_committed_step(
    tmp_path: Path, launcher: Launcher, world_size: int, noticed: int
) -> None:
    url = str(tmp_path / "state")
    arguments = (url, str(tmp_path / "before"), END, str(launcher.folder))
    processes = ranks.start(programs.train_until_notice, world_size, *arguments)
    launcher.hear("progress", world_size)
    launcher.give_notice(noticed)
    drained = launcher.hear("drained", world_size)
    for process in processes:
        assert process.is_alive(), "a drained rank waits to be stopped"
        process.kill()
        process.join()
    (step,) = set(drained.values())
    newest = next(iter(read_commits(LocalStorage(Path(url)))))
    assert newest.step == step
    per_epoch = 1000 // 8
    rest = {**END, "epochs": step // per_epoch + 1}
    assert ranks.run(programs.train, 1, url, str(tmp_path / "after"), rest) == [0]
    samples = [n for s in trained([tmp_path / "before", tmp_path / "after"]).values() for n in s]
    assert Counter(samples) == Counter(dict.fromkeys(range(1000), rest["epochs"]))


def test_without_storage_the_ranks_still_stop_together(tmp_path: Path, launcher: Launcher) -> None:
    processes = ranks.start(programs.train_until_notice, 2, "", str(tmp_path / "notes"), END, str(launcher.folder))
    launcher.hear("progress", 2)
    launcher.give_notice(0)
    assert len(set(launcher.hear("drained", 2).values())) == 1
    for process in processes:
        process.kill()
        process.join()


def test_without_a_launcher_there_is_no_notice(tmp_path: Path) -> None:
    assert not NoticeFile.from_environment({}).possible
    notice = NoticeFile.from_environment({"ELASTICCTL_NOTICE_FILE": str(tmp_path / "n")})
    assert notice.possible
    assert not notice.given()
    (tmp_path / "n").touch()
    assert notice.given()
