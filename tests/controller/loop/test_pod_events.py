"""What events say is asked for rarely, and about one pod of a job."""

from __future__ import annotations

from typing import Any

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.observed.workers import PodWait
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl_controller.loop.hearsay import ASKED_PER_S, FIRST_PAUSE_S, LONGEST_PAUSE_S, Hearsay
from tests.support.controller.samples import NOW, a_job, a_pod

POD = a_pod(0, PodPhase.PENDING)
FAILED = {"reason": "FailedMount", "message": "no such secret", "lastTimestamp": to_rfc3339(NOW)}


class Bench:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.events: list[dict[str, Any]] = [FAILED]
        self.hearsay = Hearsay(self._list)

    def _list(self, job: ElasticJob, uid: str) -> list[dict[str, Any]]:
        self.asked.append(uid)
        return self.events


def test_what_is_new_is_told_once_and_asked_for_less_and_less() -> None:
    bench, job, now = Bench(), a_job(), NOW
    pauses: list[float] = []
    assert bench.hearsay.ask(job, POD, now) == (True, FIRST_PAUSE_S)
    assert bench.hearsay.of(job.key) == {"uid-0": PodWait("FailedMount", "no such secret")}
    assert bench.hearsay.ask(job, POD, now + 1) == (False, FIRST_PAUSE_S - 1)
    for _ in range(6):
        now += pauses[-1] if pauses else FIRST_PAUSE_S
        is_new, again_s = bench.hearsay.ask(job, POD, now)
        pauses.append(again_s)
        assert not is_new
    assert pauses == [20, 40, 80, *[LONGEST_PAUSE_S] * 3]
    assert len(bench.asked) == 7
    bench.events = []
    assert bench.hearsay.ask(job, POD, now + LONGEST_PAUSE_S) == (True, FIRST_PAUSE_S)
    assert bench.hearsay.of(job.key) == {"uid-0": None}


def test_another_pod_is_asked_about_at_once_and_a_job_that_does_not_wait_is_forgotten() -> None:
    bench, job = Bench(), a_job()
    bench.hearsay.ask(job, POD, NOW)
    bench.hearsay.ask(job, a_pod(1, PodPhase.PENDING), NOW + 1)
    assert (bench.asked, list(bench.hearsay.of(job.key))) == (["uid-0", "uid-1"], ["uid-1"])
    bench.hearsay.forget(job.key)
    assert bench.hearsay.of(job.key) == {}


def test_many_jobs_that_wait_ask_no_more_often_together() -> None:
    bench = Bench()
    jobs = [a_job(name=f"job-{number}") for number in range(200)]
    for job in jobs:
        bench.hearsay.ask(job, POD, NOW)
    asked = len(bench.asked)
    for second in range(1, 101):
        for job in jobs:
            bench.hearsay.ask(job, POD, NOW + second)
    assert len(bench.asked) - asked <= 100 * ASKED_PER_S
