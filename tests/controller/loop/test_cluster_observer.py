"""What events say is asked for rarely: about one waiting pod of a job, and few ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.observed.workers import Pod, PodWait
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import Cause, JobStatus, WorkerStatus
from elasticctl_controller.loop.cluster_observer import (
    ASKED_PER_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MOST_ENDS,
    PodEvents,
)
from tests.support.controller.samples import NOW, a_job, a_pod, an_end, termination_message

POD = a_pod(0, PodPhase.PENDING)
FAILED = {"reason": "FailedMount", "message": "no such secret", "lastTimestamp": to_rfc3339(NOW)}


class Bench:
    def __init__(self) -> None:
        self.asked: list[str] = []
        self.events: list[dict[str, Any]] = [FAILED]
        self.pod_events = PodEvents(self._list)

    def _list(self, job: ElasticJob, uid: str) -> list[dict[str, Any]]:
        self.asked.append(uid)
        return self.events


def test_a_new_answer_is_reported_once_and_asked_for_less_and_less_often() -> None:
    bench, job, now = Bench(), a_job(), NOW
    pauses: list[float] = []
    assert bench.pod_events.ask(job, POD, now) == (True, FIRST_PAUSE_S)
    assert bench.pod_events.of(job.key) == {"uid-0": PodWait("FailedMount", "no such secret")}
    assert bench.pod_events.ask(job, POD, now + 1) == (False, FIRST_PAUSE_S - 1)
    for _ in range(6):
        now += pauses[-1] if pauses else FIRST_PAUSE_S
        is_new, again_s = bench.pod_events.ask(job, POD, now)
        pauses.append(again_s)
        assert not is_new
    assert pauses == [20, 40, 80, *[LONGEST_PAUSE_S] * 3]
    assert len(bench.asked) == 7
    bench.events = []
    assert bench.pod_events.ask(job, POD, now + LONGEST_PAUSE_S) == (True, FIRST_PAUSE_S)
    assert bench.pod_events.of(job.key) == {"uid-0": None}


def test_another_pod_is_asked_about_immediately_and_a_job_that_does_not_wait_is_dropped() -> None:
    bench, job = Bench(), a_job()
    bench.pod_events.ask(job, POD, NOW)
    bench.pod_events.ask(job, a_pod(1, PodPhase.PENDING), NOW + 1)
    assert (bench.asked, list(bench.pod_events.of(job.key))) == (["uid-0", "uid-1"], ["uid-1"])
    bench.pod_events.drop_answer(job.key)
    assert bench.pod_events.of(job.key) == {}


def test_many_jobs_that_wait_ask_no_more_often_together() -> None:
    bench = Bench()
    jobs = [a_job(name=f"job-{number}") for number in range(60)]
    for job in jobs:
        bench.pod_events.ask(job, POD, NOW)
    asked = len(bench.asked)
    for second in range(1, 51):
        for job in jobs:
            bench.pod_events.ask(job, POD, NOW + second)
    assert len(bench.asked) - asked <= 50 * ASKED_PER_S


def killed(container: str = "elasticjob-worker", probe: str = "liveness") -> list[dict[str, Any]]:
    """What a kubelet says when it kills a container for its probe."""
    return [
        {"reason": "Unhealthy", "message": "Liveness probe failed: timeout", "lastTimestamp": to_rfc3339(NOW - 9)},
        {"reason": "Unhealthy", "message": "Liveness probe failed: HTTP 500", "lastTimestamp": to_rfc3339(NOW - 1)},
        {"reason": "Killing", "message": f"Container {container} failed {probe} probe"},
    ]


def probed(**probes: object) -> ElasticJob:
    container = {"name": "elasticjob-worker", "livenessProbe": {"exec": {}}, **probes}
    return a_job(template={"spec": {"containers": [container]}})


def ends(bench: Bench, job: ElasticJob, *pods: Pod) -> list[tuple[str, str]]:
    lost = frozenset({"lost"})
    return [(pod.reason, pod.message) for pod in bench.pod_events.explain_ends(job, pods, lost, NOW)]


@pytest.mark.parametrize("code", [137, 143])
def test_a_worker_that_its_own_probe_has_killed_is_explained_by_that(code: int) -> None:
    bench = Bench()
    bench.events = killed()
    assert ends(bench, probed(), an_end(0, code)) == [("ProbeFailed", "its liveness probe failed: HTTP 500")]
    told_to_stop = an_end(0, 1, message=termination_message("preempted"))
    assert ends(bench, probed(), told_to_stop) == [("ProbeFailed", "its liveness probe failed: HTTP 500")]


def test_any_other_end_stays_what_it_is() -> None:
    bench = Bench()
    for events in ([], killed(container="sidecar"), [{"reason": "Killing", "message": "Stopping container"}]):
        bench.events = events
        assert ends(bench, probed(), an_end(0, 137)) == [("", "")]
    bench.events = killed()
    bench.asked.clear()
    clear = [
        a_pod(0),
        an_end(0, 1),
        an_end(0, 0),
        an_end(0, 137, reason="OOMKilled"),
        an_end(0, 143, disruption_target=True),
        an_end(0, 137, deleting=True),
        an_end(0, 137, node="lost"),
    ]
    assert ends(bench, probed(), *clear) == [(pod.reason, pod.message) for pod in clear]
    assert ends(bench, probed(livenessProbe=None), an_end(0, 137)) == [("", "")]
    assert bench.asked == [], "and the API server is not asked"


def test_few_of_many_ends_are_asked_about_and_none_twice() -> None:
    bench, job = Bench(), probed()
    bench.events = killed()
    found = ends(bench, job, *(an_end(index, 137) for index in range(100)))
    assert found.count(("", "")) == 100 - MOST_ENDS
    assert len(bench.asked) == MOST_ENDS
    seen = replace(job, status=JobStatus(workers=(WorkerStatus("digits-worker-0", "uid-0", 0, cause=Cause.KILLED),)))
    bench.asked.clear()
    assert ends(bench, seen, an_end(0, 137)) == [("", "")]
    assert bench.asked == []
