"""A worker that has to go, and has time: it trains on until its place is taken."""

from __future__ import annotations

import time

import pytest

from elasticctl.api.codec import from_json
from elasticctl.api.status import RankFailure
from elasticctl_controller.core.interruption_notices import LeaveNotice, Leaving
from elasticctl_launcher.leaving import Termination
from elasticctl_launcher.service.client import ServiceAway
from elasticctl_launcher.service.questions import Inquiries
from elasticctl_launcher.spot_notice import SpotNotice
from tests.support.launcher_lab import JOB_UID, KEY, Lab
from tests.support.metadata_server import ACTION_PATH, fake_metadata
from tests.support.scripted_rendezvous import ScriptedRendezvous

DRAINED = "its node is being drained"


def replace_a_0(lab: Lab) -> None:
    """Its successor comes, and the two go on."""
    lab.add("a-2")
    lab.start_script("a-2")
    assert lab.wait("a-0") == 143
    lab.until(lambda: "rank 0 of 2 generation 2" in lab.output("a-1"))
    lab.until(lambda: "rank 1 of 2 generation 2" in lab.output("a-2"))
    assert all((lab.folder / f"reached-1-{rank}").exists() for rank in range(2)), "both committed the same step"


def test_a_drained_worker_trains_on_until_its_successor_is_ready(pair: Lab) -> None:
    pair.leaving = Leaving(frozenset({"uid-a-0"}), {"uid-a-0": LeaveNotice(DRAINED, time.time() + 600)})
    pair.tell()
    pair.workers["a-0"].terminate()
    pair.until(lambda: "it keeps training" in pair.output("a-0"))
    assert pair.workers["a-0"].poll() is None
    replace_a_0(pair)
    assert from_json(RankFailure, pair.message("a-0")).verdict == "preempted"
    generations = pair.site.service.view(KEY, JOB_UID).generations
    assert [item.reason for item in generations][1:] == [f"a-0 has to stop: {DRAINED}"], "it costs one re-forming"


def test_one_whose_cloud_gives_it_time_trains_on(lab: Lab) -> None:
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
        told = lab.site.service.view(KEY, JOB_UID).notices["uid-a-0"]
        assert told.reason == f"AWS spot interruption at {at}"
        assert told.deadline is not None
        assert -1 < told.deadline - end <= time.time() - began, "but for the time that the message took"
        replace_a_0(lab)
    assert from_json(RankFailure, lab.message("a-0")).error == f"AWS spot interruption at {at}"


def test_one_on_a_node_that_is_taken_away_is_told_to_go_without_a_signal(pair: Lab) -> None:
    pair.leaving = Leaving(frozenset(), {"uid-a-0": LeaveNotice("Karpenter is removing its node")})
    pair.tell()
    replace_a_0(pair)
    assert "Karpenter is removing its node" in from_json(RankFailure, pair.message("a-0")).error


def a_departure(answer: object) -> tuple[Termination, ScriptedRendezvous]:
    service = ScriptedRendezvous({"notice": answer})  # type: ignore[dict-item]
    return Termination(Inquiries(service, service.poll, "u", lambda question: None), 30.0), service  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", [{}, ServiceAway("gone"), {"stay_s": 0.0, "left_s": 20.0}])
def test_without_leave_to_stay_it_goes_at_once(answer: object) -> None:
    departure, service = a_departure(answer)
    departure.record_signal()
    assert not departure.ask_to_stay()
    assert service.bodies("notice") == [{"uid": "u", "reason": "SIGTERM", "stays": True}]


def test_the_clouds_word_and_the_clusters_are_told_apart() -> None:
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
