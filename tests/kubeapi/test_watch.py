"""Lists and watches over real HTTP: pages, changes, cuts, expired versions, silence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from elasticctl.kubeapi import watch as module
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from tests.support.control import ControlApi
from tests.support.waiting import wait_until

PODS = "/api/v1/pods"


def path(name: str) -> str:
    return f"/api/v1/namespaces/ns/pods/{name}"


def put(control: ControlApi, item: dict[str, Any]) -> None:
    control.put(path(item["metadata"]["name"]), item)


def pod(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"namespace": "ns", "name": name, "labels": {"app": "x", **labels}}}


@pytest.fixture
def watched(control: ControlApi) -> Iterator[Reflector]:
    reflector = Reflector(control.connection(), Resource(PODS, "app=x"), ObjectStore())
    yield reflector
    reflector.stop()


def names(reflector: Reflector) -> list[str]:
    return sorted(item["metadata"].get("name", "") for item in reflector.store.items())


def begun(control: ControlApi, reflector: Reflector) -> None:
    reflector.start()
    assert reflector.wait_synced()
    wait_until(lambda: control.watches)


def test_everything_is_listed_in_pages_and_then_followed(control: ControlApi, watched: Reflector) -> None:
    control.page_objects = 3
    for number in range(8):
        put(control, pod(f"p{number}"))
    put(control, {"metadata": {"namespace": "ns", "name": "other"}})
    begun(control, watched)
    assert names(watched) == [f"p{number}" for number in range(8)]
    put(control, pod("new"))
    control.remove(path("p0"))
    wait_until(lambda: names(watched) == ["new", *(f"p{number}" for number in range(1, 8))])
    assert watched.relists == 1


@pytest.mark.parametrize(("cut", "pages"), [(False, 0), (True, 1)])
def test_a_list_is_streamed_where_the_server_can(
    control: ControlApi, watched: Reflector, cut: bool, pages: int
) -> None:
    control.streams_lists, control.cut_lists = True, cut
    for number in range(3):
        put(control, pod(f"p{number}"))
    put(control, {"metadata": {"namespace": "ns", "name": "other"}})
    begun(control, watched)
    put(control, pod("new"))
    wait_until(lambda: names(watched) == ["new", "p0", "p1", "p2"])
    assert sum("limit" in request.params for request in control.requests) == pages


def test_a_watch_that_was_cut_off_resumes(
    control: ControlApi, watched: Reflector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_S", 2.0)
    begun(control, watched)
    control.cuts = 2
    wait_until(lambda: control.watches >= 2)
    put(control, pod("late"))
    wait_until(lambda: names(watched) == ["late"])
    assert watched.relists == 1


def test_an_expired_version_leads_to_a_new_list(control: ControlApi, watched: Reflector) -> None:
    put(control, pod("old"))
    begun(control, watched)
    with control.changed:
        put(control, pod("between"))
        control.remove(path("old"))
        control.expire()
    wait_until(lambda: names(watched) == ["between"])
    assert watched.relists == 2


def test_a_server_whose_every_version_is_too_old_is_not_hammered(control: ControlApi, watched: Reflector) -> None:
    control.expired_below = 1_000_000
    began = time.monotonic()
    watched.start()
    wait_until(lambda: watched.relists >= 5)
    assert time.monotonic() - began >= 0.7  # at least half of 0.1, 0.2, 0.4 and 0.8 s
    put(control, pod("a"))
    control.expired_below = 0
    wait_until(lambda: names(watched) == ["a"])


def test_a_server_in_trouble_is_asked_again(control: ControlApi, watched: Reflector) -> None:
    put(control, pod("a"))
    control.fail("GET", PODS, 500, times=2)
    control.fail("GET", PODS, 429, times=1, Retry_After="0")
    begun(control, watched)
    assert names(watched) == ["a"]


def test_a_silent_connection_is_given_up(
    control: ControlApi, watched: Reflector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_S", 1.0)
    monkeypatch.setattr(module, "SILENCE_S", 0.2)
    control.silent = True
    begun(control, watched)
    put(control, pod("unheard"))
    wait_until(lambda: control.watches >= 2)
    control.silent = False
    wait_until(lambda: names(watched) == ["unheard"])


def test_nonsense_in_the_stream_does_not_end_the_thread(control: ControlApi, watched: Reflector) -> None:
    begun(control, watched)
    put(control, {"metadata": {"namespace": "ns", "name": "odd", "labels": {"app": "x"}}, "spec": "text"})
    control.put("/api/v1/namespaces/ns/pods/none", {"metadata": {"labels": {"app": "x"}}, "spec": ["no", "pod"]})
    put(control, pod("next"))
    wait_until(lambda: "next" in names(watched))
    assert watched.alive
