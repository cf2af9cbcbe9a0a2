"""Events over real HTTP: each once, repeats counted, the API's limits kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from elasticctl.api.spec import ElasticJob
from elasticctl_controller.kube.event_recorder import (
    MAX_DIFFERENT,
    MAX_WAITING,
    MAX_WAITING_OF_ONE,
    MESSAGE_CHARS,
    EventRecorder,
)
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from tests.support.control import ControlApi
from tests.support.controller.samples import Clock
from tests.support.waiting import wait_until

JOB = ElasticJob(name="digits", namespace="ml", uid="job-uid")
EVENTS = "/api/v1/namespaces/ml/events"


@pytest.fixture
def clock() -> Clock:
    return Clock(1_700_000_000.0)


@pytest.fixture
def recorder(control: ControlApi, clock: Clock) -> Iterator[EventRecorder]:
    recorder = EventRecorder(LimitedApi(control.connection(), TokenBucket(1000, 1000)), "me", clock)
    recorder.start()
    yield recorder
    recorder.stop()


def written(control: ControlApi, count: int) -> list[dict[str, Any]]:
    """The events, once that many were counted in all."""

    def all_there() -> list[dict[str, Any]] | None:
        with control.changed:
            found = [item for path, item in control.objects.items() if path.startswith(EVENTS)]
        return found if sum(item["count"] for item in found) == count else None

    return wait_until(all_there) or []


def test_an_event_is_about_the_job(control: ControlApi, recorder: EventRecorder) -> None:
    recorder.record(JOB, "Warning", "Preempted", "lost worker digits-worker-1")
    (event,) = written(control, 1)
    about = event["involvedObject"]
    assert (about["kind"], about["name"], about["namespace"], about["uid"]) == ("ElasticJob", "digits", "ml", "job-uid")
    assert (event["type"], event["reason"], event["message"]) == (
        "Warning",
        "Preempted",
        "lost worker digits-worker-1",
    )
    assert event["source"] == {"component": "elasticctl-controller", "host": "me"}
    assert event["firstTimestamp"] == "2023-11-14T22:13:20.000000Z"


def test_the_same_news_is_counted(control: ControlApi, recorder: EventRecorder, clock: Clock) -> None:
    for _ in range(3):
        recorder.record(JOB, "Warning", "FailedCreate", "quota exceeded")
        clock.now += 60
    (event,) = written(control, 3)
    assert event["lastTimestamp"] == "2023-11-14T22:15:20.000000Z"
    clock.now += 600
    recorder.record(JOB, "Warning", "FailedCreate", "quota exceeded")
    assert sorted(item["count"] for item in written(control, 4)) == [1, 3]


def test_different_messages_are_kept_apart_up_to_a_limit(control: ControlApi, recorder: EventRecorder) -> None:
    for number in range(MAX_DIFFERENT + 20):
        recorder.record(JOB, "Warning", "Preempted", f"lost worker {number}")
    events = written(control, MAX_DIFFERENT + 20)
    assert len(events) == MAX_DIFFERENT
    assert max(events, key=lambda event: int(event["count"]))["message"] == f"lost worker {MAX_DIFFERENT + 19}"


def test_an_event_that_was_removed_is_written_again(control: ControlApi, recorder: EventRecorder) -> None:
    recorder.record(JOB, "Normal", "Scaled", "to 4")
    (event,) = written(control, 1)
    control.remove(f"{EVENTS}/{event['metadata']['name']}")
    recorder.record(JOB, "Normal", "Scaled", "to 4")
    assert written(control, 1)[0]["metadata"]["name"] != event["metadata"]["name"]


def test_a_flood_of_one_namespace_leaves_room_for_the_events_of_others(control: ControlApi, clock: Clock) -> None:
    recorder = EventRecorder(LimitedApi(control.connection(), TokenBucket(10_000, 10_000)), "me", clock)
    for number in range(5 * MAX_WAITING):
        recorder.record(ElasticJob(name="flood", namespace="other", uid="flood"), "Warning", "Preempted", str(number))
    recorder.record(JOB, "Normal", "Scaled", "to 4")
    recorder.start()
    (event,) = written(control, 1)
    recorder.stop(600)
    assert event["message"] == "to 4"
    with control.changed:
        flood = [item for path, item in control.objects.items() if path.startswith("/api/v1/namespaces/other/events")]
    assert sum(item["count"] for item in flood) == MAX_WAITING_OF_ONE


def test_an_event_that_cannot_be_written_is_dropped(control: ControlApi, recorder: EventRecorder) -> None:
    control.fail("POST", "events", 403)
    recorder.record(JOB, "Normal", "Scaled", "x" * 5000)
    recorder.record(JOB, "Normal", "Scaled", "y" * 5000)
    (event,) = written(control, 1)
    assert event["message"] == "y" * MESSAGE_CHARS
