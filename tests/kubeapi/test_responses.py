"""Objects that are nested thousands of levels deep, where their schema allows anything."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticctl.kubeapi.connection import Connection
from elasticctl.kubeapi.responses import MOST_LEVELS, parse_json
from elasticctl.kubeapi.watch import ObjectStore, Reflector, Resource
from elasticctl_controller.kube.pruning import prune_job
from tests.support.anything import JSON
from tests.support.fakeapi import FakeApi
from tests.support.waiting import wait_until

JOBS = "/apis/elastic.pytorch.org/v1alpha1/elasticjobs"


def nested(levels: int, inner: str = "1") -> str:
    """Lists in objects in lists, with brackets and quotes in the text between them."""
    opened, closed = ('{"}]\\"{[\\\\": [', "]}") if levels > 1 else ("", "")
    return opened * (levels // 2) + inner + closed * (levels // 2)


def job(name: str, version: int, template: str = "{}") -> str:
    metadata = {"namespace": "ns", "name": name, "uid": name, "resourceVersion": str(version)}
    return f'{{"metadata": {json.dumps(metadata)}, "spec": {{"replicaSpecs": {{"Worker": {template}}}}}}}'


def depth(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth, inner), default=0)


@pytest.mark.parametrize("levels", [2, MOST_LEVELS - 2, MOST_LEVELS, MOST_LEVELS + 2, 990, 20_000])
def test_values_nested_too_deeply_read_as_null(levels: int) -> None:
    found = parse_json(f'{{"a": [{nested(levels - 2)}, "b]"], "c": {{}}}}'.encode())
    assert (found["a"][1], found["c"]) == ("b]", {})
    assert depth(found) == min(levels, MOST_LEVELS)


@given(JSON)
def test_anything_else_reads_as_json_does(value: object) -> None:
    text = json.dumps([value, [[]] * MOST_LEVELS]).encode()
    assert parse_json(text) == json.loads(text)


@given(st.binary(max_size=40))
def test_invalid_json_is_a_value_error(text: bytes) -> None:
    for cut in (text, nested(2000).encode()[:9000] + text):
        try:
            parse_json(cut)
        except ValueError:
            continue


def test_an_answer_with_such_an_object_is_read(api: FakeApi, connection: Connection) -> None:
    listed = f'{{"items": [{job("deep", 1, nested(9000))}, {job("next", 2)}]}}'
    api.refuse = lambda request: (200, listed.encode(), {})
    names = [item["metadata"]["name"] for item in connection.request("GET", JOBS)["items"]]
    assert names == ["deep", "next"]


class Streams:
    """An API server that streams these jobs as a list, and then others as changes."""

    def __init__(self, listed: list[str], changed: list[str]) -> None:
        end = '{"metadata": {"resourceVersion": "5", "annotations": {"k8s.io/initial-events-end": "true"}}}'
        self._streams = [
            [*(self._event("ADDED", item) for item in listed), self._event("BOOKMARK", end)],
            [self._event("MODIFIED", item) for item in changed],
        ]
        self.ended = threading.Event()

    def stream(self, path: str, params: object = None, *, timeout_s: float | None = None) -> Any:
        return self

    def request(self, *args: object) -> dict[str, Any]:
        raise AssertionError("the list is streamed")

    def __iter__(self) -> Iterator[bytes]:
        if not self._streams:
            self.ended.wait()
            return
        yield from self._streams.pop(0)

    def close(self) -> None:
        self.ended.set() if not self._streams else None

    @staticmethod
    def _event(kind: str, item: str) -> bytes:
        return f'{{"type": "{kind}", "object": {item}}}\n'.encode()


@pytest.mark.parametrize("levels", [sys.getrecursionlimit() - 60, 9000])
def test_such_a_job_hides_no_other(levels: int) -> None:
    """Before, the list of all jobs failed again and again, and with it the controller, for all users."""
    deep = nested(levels)
    streams = Streams(
        [job("deep", 1, deep), job("other", 2)],
        [job("deep", 6, deep), job("deep", 7, nested(levels, "2")), job("other", 8, '{"replicas": 3}')],
    )
    store = ObjectStore(prune_job)
    reflector = Reflector(streams, Resource(JOBS), store)
    reflector.start()
    try:
        assert reflector.wait_synced()
        wait_until(lambda: (store.get("ns/other") or {}).get("spec") == {"replicaSpecs": {"Worker": {"replicas": 3}}})
        assert (store.get("ns/deep") or {})["metadata"]["resourceVersion"] == "7"
        assert reflector.relists == 1
    finally:
        streams.ended.set()
        reflector.stop()
