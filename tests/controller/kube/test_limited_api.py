"""Requests in moderation, counted, and none by who does not lead."""

from __future__ import annotations

import pytest

from elasticctl.api.errors import BusyError, ConflictError, NotFoundError, UnreachableError
from elasticctl_controller.kube.limited_api import LimitedApi, TokenBucket
from tests.support.control import ControlApi

PODS = "/api/v1/namespaces/ns/pods"


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now, self.slept = 0.0, 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds


def test_a_burst_is_free_and_then_the_rate_holds() -> None:
    time = Time()
    bucket = TokenBucket(10.0, 5, time.clock, time.sleep)
    for _ in range(5):
        bucket.take_token()
    assert time.slept == 0
    for _ in range(20):
        bucket.take_token()
    assert time.slept == pytest.approx(2.0)
    time.now += 3600
    before = time.slept
    for _ in range(5):
        bucket.take_token()
    assert time.slept == before


def test_all_requests_wait_while_the_server_is_busy() -> None:
    time = Time()
    bucket = TokenBucket(1000.0, 100, time.clock, time.sleep)
    bucket.close_for(7.0)
    bucket.close_for(2.0)
    bucket.take_token()
    assert time.slept == pytest.approx(7.0)


def test_waiting_requests_wait_longer_when_the_server_is_busy() -> None:
    time = Time()
    bucket = TokenBucket(1.0, 1, time.clock, lambda seconds: busy(seconds))
    said = iter([5.0])

    def busy(seconds: float) -> None:
        time.sleep(seconds)
        for more in said:
            bucket.close_for(more)

    bucket.take_token()
    bucket.take_token()
    assert time.slept == pytest.approx(1.0 + 5.0)


def test_a_watch_that_is_refused_is_obeyed_too(control: ControlApi) -> None:
    api, time, _ = limited(control)
    control.fail("GET", PODS, 429, times=1, Retry_After="3")
    with pytest.raises(BusyError):
        api.stream(PODS, {"watch": "1"})
    api.request("GET", PODS)
    assert time.slept == pytest.approx(3.0)


def limited(control: ControlApi, leads: bool = True) -> tuple[LimitedApi, Time, list[str]]:
    time, seen = Time(), []
    bucket = TokenBucket(1000.0, 100, time.clock, time.sleep)
    api = LimitedApi(
        control.connection(), bucket, lambda: leads, lambda verb, outcome: seen.append(f"{verb} {outcome}")
    )
    return api, time, seen


def test_a_busy_server_is_obeyed_and_asked_again(control: ControlApi) -> None:
    api, time, seen = limited(control)
    control.fail("POST", PODS, 429, times=2, Retry_After="3")
    assert api.request("POST", PODS, {"metadata": {"name": "a"}})["metadata"]["name"] == "a"
    assert time.slept == pytest.approx(6.0)
    assert seen == ["POST 429", "POST 429", "POST ok"]


def test_patience_has_an_end(control: ControlApi) -> None:
    api, _, seen = limited(control)
    control.fail("GET", PODS, 429, times=9, Retry_After="1")
    with pytest.raises(BusyError):
        api.request("GET", f"{PODS}/a")
    assert len(seen) == 5
    control.fail("PUT", PODS, 503)
    with pytest.raises(BusyError):  # it does not say for how long: that is for the loop to decide
        api.request("PUT", f"{PODS}/a", {})


def test_a_replica_that_does_not_lead_reads_and_writes_nothing(control: ControlApi) -> None:
    api, _, _ = limited(control, leads=False)
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        with pytest.raises(UnreachableError, match="does not lead"):
            api.request(method, f"{PODS}/a", {})
    assert control.requests == []
    assert api.request("GET", PODS)["items"] == []


def test_outcomes_are_counted_by_status(control: ControlApi) -> None:
    api, _, seen = limited(control)
    control.put(f"{PODS}/a", {"metadata": {"name": "a"}})
    with pytest.raises(ConflictError):
        api.request("POST", PODS, {"metadata": {"name": "a"}})
    with pytest.raises(NotFoundError):
        api.request("GET", "/apis/none/v1")
    control.close()
    assert seen == ["POST 409", "GET 404"]


def test_what_goes_apart_holds_nothing_up(control: ControlApi) -> None:
    api, time, seen = limited(control)
    events = api.with_own_rate(1.0, 1)
    for name in "abc":
        events.request("POST", PODS, {"metadata": {"name": name}})
    assert time.slept == pytest.approx(2.0)
    for name in "def":
        api.request("POST", PODS, {"metadata": {"name": name}})
    assert time.slept == pytest.approx(2.0)
    assert seen == ["POST ok"] * 6


@pytest.mark.parametrize("closed", [0, 1])
def test_a_busy_server_is_left_alone_by_what_goes_apart_too(closed: int) -> None:
    time = Time()
    bucket = TokenBucket(1000.0, 100, time.clock, time.sleep)
    both = [bucket, bucket.with_own_rate(1000.0, 100)]
    both[closed].close_for(7.0)
    both[1 - closed].take_token()
    assert time.slept == pytest.approx(7.0)
