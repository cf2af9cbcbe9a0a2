"""Drains: for newcomers they take as long as they take, for a worker that has to go what its own end leaves of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticctl_launcher.leaving import Drain, TimeLimits
from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.rendezvous import GroupChange
from elasticctl_protocol.requests import Doing
from tests.support.scripted_rendezvous import Launch, ScriptedRendezvous
from tests.support.waiting import wait_until

EXPORTING = """
import json, os, socket, sys, time
wire = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
def report(kind):
    said = {"kind": kind, "generation": int(os.environ["ELASTICCTL_GENERATION"]), "rank": 0, "step": 9}
    wire.sendto(json.dumps(said).encode(), os.environ["ELASTICCTL_AGENT_SOCKET"])
report("progress")
report("finished")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
sys.exit(5 if os.path.exists(os.environ["ELASTICCTL_NOTICE_FILE"]) else 0)
"""


class Reports:
    """What the ranks of generation 3 have reported."""

    newest_generation, finished_generation = 3, 2

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def notice_file(self, generation: int) -> str:
        return str(self.folder / f"notice-{generation}")


@pytest.fixture
def reports(tmp_path: Path) -> Reports:
    return Reports(tmp_path)


def drain_of(reports: Reports, clock: Callable[[], float] = lambda: 0.0) -> Drain:
    stand_in: RankReports = reports  # type: ignore[assignment]
    return Drain(3, stand_in, clock)


def test_a_drain_for_newcomers_has_no_deadline(reports: Reports) -> None:
    now = [0.0]
    drain = drain_of(reports, lambda: now[0])
    assert drain.request()
    assert Path(reports.notice_file(3)).exists()
    now[0] = 1e6
    assert drain.left_s() is None
    for rank in (4, 5):
        assert not drain.is_done((4, 5))
        drain.record_drained(3, rank)
        drain.record_drained(2, 5)
    assert drain.is_done((4, 5))


def test_ranks_that_cannot_be_asked_are_stopped_as_those_that_do_not_listen(reports: Reports, tmp_path: Path) -> None:
    """On a full disk, say: the steps since the last commit are lost then, but not the worker."""
    reports.folder = tmp_path / "none"
    assert not drain_of(reports).request(to_leave=True)


def test_one_for_its_own_sake_ends_before_the_worker_is_killed(reports: Reports) -> None:
    now = [100.0]
    drain = drain_of(reports, lambda: now[0])
    drain.request()
    drain.limit(TimeLimits(stop_grace_s=5.0).drain_s(30.0))
    assert drain.left_s() == 20.0
    now[0] += 50.0
    assert drain.left_s() == 0.0


@pytest.mark.parametrize(("left_s", "drain_s"), [(120.0, 110.0), (30.0, 20.0), (20.0, 10.0), (4.0, 2.0), (0.0, 0.0)])
def test_what_stopping_leaves_of_the_time(left_s: float, drain_s: float) -> None:
    assert TimeLimits(stop_grace_s=5.0).drain_s(left_s) == drain_s


@pytest.mark.parametrize(("left_s", "grace_s"), [(120.0, 115.0), (30.0, 25.0), (4.0, 2.0), (0.0, 0.0), (None, 20.0)])
def test_what_ranks_of_a_worker_that_has_to_go_may_take_to_end(left_s: float | None, grace_s: float) -> None:
    assert TimeLimits(stop_grace_s=20.0).last_grace_s(left_s) == grace_s


def test_ranks_that_have_made_their_last_step_are_not_asked(reports: Reports) -> None:
    reports.finished_generation = 3
    assert not drain_of(reports).request()
    reports.newest_generation = reports.finished_generation = 2
    assert not drain_of(reports).request(), "nor are those that have reported nothing"


def once_exporting(handler: ScriptedRendezvous, act: Callable[[], None]) -> None:
    def wait() -> None:
        wait_until(lambda: Doing.EXPORTING in handler.said)
        act()

    threading.Thread(target=wait, daemon=True).start()


def test_an_export_is_not_drained_for_newcomers(launch: Launch, tmp_path: Path) -> None:
    go = tmp_path / "go"

    def let_newcomers_in(handler: ScriptedRendezvous) -> None:
        def act() -> None:
            handler.on_change(1, GroupChange.DRAIN)
            threading.Timer(1.0, go.touch).start()

        once_exporting(handler, act)

    handler = ScriptedRendezvous({"finish": {"state": "done"}}, let_newcomers_in)
    assert launch(handler, sys.executable, "-c", EXPORTING, str(go)) == 0
    assert (handler.generation, Doing.DRAINING in handler.said) == (1, False)


def test_sigterm_is_heard_during_an_export(launch: Launch, tmp_path: Path) -> None:
    handler = ScriptedRendezvous(
        on_join=lambda handler: once_exporting(handler, lambda: os.kill(os.getpid(), signal.SIGTERM))
    )
    assert launch(handler, sys.executable, "-c", EXPORTING, str(tmp_path / "never")) == 143
    assert handler.bodies("leave")
