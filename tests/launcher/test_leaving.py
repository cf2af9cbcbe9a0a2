"""A worker that leaves trains until it is replaced, if it has time; and drains, of any generation."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticctl.api.codec import from_json
from elasticctl.api.status import RankFailure
from elasticctl_controller.core.interruption_notices import LeaveNotice, Leaving
from elasticctl_launcher.leaving import Drain, Termination, TimeLimits
from elasticctl_launcher.rank_reports import RankReports
from elasticctl_launcher.rendezvous import GroupChange
from elasticctl_launcher.service.client import ServiceAway
from elasticctl_launcher.service.questions import Inquiries
from elasticctl_launcher.spot_notice import SpotNotice
from elasticctl_protocol.requests import Doing
from tests.support.launcher_lab import JOB_UID, KEY, Lab
from tests.support.metadata_server import ACTION_PATH, fake_metadata
from tests.support.scripted_rendezvous import Launch, ScriptedRendezvous
from tests.support.waiting import wait_until

DRAINED = "its node is being drained"


def replace_a_0(lab: Lab) -> None:
    """Its successor joins, and both ranks continue."""
    lab.add("a-2")
    lab.start_script("a-2")
    assert lab.wait("a-0") == 143
    lab.until(lambda: "rank 0 of 2 generation 2" in lab.output("a-1"))
    lab.until(lambda: "rank 1 of 2 generation 2" in lab.output("a-2"))
    assert all((lab.folder / f"reached-1-{rank}").exists() for rank in range(2)), "both committed the same step"


def test_a_worker_trains_until_its_successor_is_ready(pair: Lab) -> None:
    pair.leaving = Leaving(frozenset({"uid-a-0"}), {"uid-a-0": LeaveNotice(DRAINED, time.time() + 600)})
    pair.tell()
    pair.workers["a-0"].terminate()
    pair.until(lambda: "it keeps training" in pair.output("a-0"))
    assert pair.workers["a-0"].poll() is None
    replace_a_0(pair)
    assert from_json(RankFailure, pair.message("a-0")).verdict == "preempted"
    generations = pair.site.service.view(KEY, JOB_UID).generations
    assert [item.reason for item in generations][1:] == [f"a-0 has to stop: {DRAINED}"], "it costs one re-forming"


def test_a_worker_with_time_left_by_the_cloud_keeps_training(lab: Lab) -> None:
    began = time.time()
    end = int(began) + 600
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(end))
    with fake_metadata("aws") as server:
        lab.start_script("a-0", ELASTICCTL_NOTICE_SOURCE="aws", ELASTICCTL_METADATA_URL=server.url)
        lab.start_script("a-1")
        lab.add("a-0", "a-1")
        lab.until(lambda: "rank 0 of 2" in lab.output("a-0") and "rank 1 of 2" in lab.output("a-1"))
        server.answers[ACTION_PATH] = 200, f'{{"action": "terminate", "time": "{at}"}}'
        lab.until(lambda: "it keeps training" in lab.output("a-0"))
        notice = lab.site.service.view(KEY, JOB_UID).notices["uid-a-0"]
        assert notice.reason == f"AWS spot interruption at {at}"
        assert notice.deadline is not None
        assert -1 < notice.deadline - end <= time.time() - began, "apart from the time that the message took"
        replace_a_0(lab)
    assert from_json(RankFailure, lab.message("a-0")).error == f"AWS spot interruption at {at}"


def test_the_service_makes_a_worker_leave_without_a_signal(pair: Lab) -> None:
    pair.leaving = Leaving(frozenset(), {"uid-a-0": LeaveNotice("Karpenter is removing its node")})
    pair.tell()
    replace_a_0(pair)
    assert "Karpenter is removing its node" in from_json(RankFailure, pair.message("a-0")).error


def a_departure(answer: object) -> tuple[Termination, ScriptedRendezvous]:
    service = ScriptedRendezvous({"notice": answer})  # type: ignore[dict-item]
    return Termination(Inquiries(service, service.poll, "u", lambda question: None), 30.0), service  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [{}, ServiceAway("gone"), {"stay_s": 0.0, "left_s": 20.0}])
def test_without_permission_to_stay_it_leaves_immediately(answer: object) -> None:
    departure, service = a_departure(answer)
    departure.record_signal()
    assert not departure.ask_to_stay()
    assert service.bodies("notice") == [{"uid": "u", "reason": "SIGTERM", "stays": True}]


def test_notices_of_the_cloud_and_of_the_cluster_are_distinguished() -> None:
    departure, service = a_departure({"stay_s": None, "left_s": None})
    assert (departure.why, departure.left_s()) == ("", None)
    departure.expect(SpotNotice("rebalance"))
    departure.record_signal()
    assert departure.ask_to_stay()
    assert (departure.why, departure.left_s(), departure.stay_s()) == ("rebalance", None, None)
    departure.record_signal()  # the pod is deleted, too
    departure.ask_to_stay()
    left_s = departure.left_s()
    assert left_s is not None
    assert 0 < left_s <= 30.0
    assert [body.get("in_s", "the cluster knows") for body in service.bodies("notice")] == [None, "the cluster knows"]


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


def test_a_drain_whose_notice_cannot_be_written_is_refused(reports: Reports, tmp_path: Path) -> None:
    """For example on a full disk: the steps since the last commit are lost, but not the worker."""
    reports.folder = tmp_path / "none"
    assert not drain_of(reports).request(to_leave=True)


def test_a_drain_to_leave_ends_before_the_worker_is_killed(reports: Reports) -> None:
    now = [100.0]
    drain = drain_of(reports, lambda: now[0])
    drain.request()
    drain.limit(TimeLimits(stop_grace_s=5.0).drain_s(30.0))
    assert drain.left_s() == 20.0
    now[0] += 50.0
    assert drain.left_s() == 0.0


@pytest.mark.parametrize(("left_s", "drain_s"), [(120.0, 110.0), (30.0, 20.0), (20.0, 10.0), (4.0, 2.0), (0.0, 0.0)])
def test_the_drain_leaves_time_to_stop_the_ranks(left_s: float, drain_s: float) -> None:
    assert TimeLimits(stop_grace_s=5.0).drain_s(left_s) == drain_s


@pytest.mark.parametrize(("left_s", "grace_s"), [(120.0, 115.0), (30.0, 25.0), (4.0, 2.0), (0.0, 0.0), (None, 20.0)])
def test_the_last_grace_period_of_a_worker_that_leaves(left_s: float | None, grace_s: float) -> None:
    assert TimeLimits(stop_grace_s=20.0).last_grace_s(left_s) == grace_s


def test_ranks_after_their_last_step_are_not_drained(reports: Reports) -> None:
    reports.finished_generation = 3
    assert not drain_of(reports).request()
    reports.newest_generation = reports.finished_generation = 2
    assert not drain_of(reports).request(), "nor are ranks that have reported nothing"


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


def test_sigterm_is_handled_during_an_export(launch: Launch, tmp_path: Path) -> None:
    handler = ScriptedRendezvous(
        on_join=lambda handler: once_exporting(handler, lambda: os.kill(os.getpid(), signal.SIGTERM))
    )
    assert launch(handler, sys.executable, "-c", EXPORTING, str(tmp_path / "never")) == 143
    assert handler.bodies("leave")
