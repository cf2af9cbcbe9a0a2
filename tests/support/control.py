"""The fake API server with what a controller needs of one: status writes, grace periods, bookmarks, old versions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.objects import at
from elasticctl.kubeapi.connection import Connection, open_transport
from elasticctl.kubeapi.credentials import Access
from tests.support.fakeapi import FakeApi, Object, Request, is_in, selects

FIRST_VERSION = 100


class ControlApi(FakeApi):
    """`fail` plans refusals; `silent` holds all watches up; `cuts` is how many watches are broken off immediately."""

    def __init__(self) -> None:
        self.silent, self.cuts, self.watches, self.page_objects, self.expired_below = False, 0, 0, 0, 0
        self.cut_lists = False
        self.served: set[str] = set()
        self.resources: dict[str, list[Object]] = {}
        self._faults: list[tuple[str, str, int, dict[str, str]]] = []
        super().__init__()
        self._versions = itertools.count(FIRST_VERSION)
        self.refuse = self._planned

    def fail(self, method: str, part: str, status: int, times: int = 1, **headers: str) -> None:
        """Refuse the next `times` requests of `method` whose path contains `part`."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self._faults += [(method, part, status, named)] * times

    def expire(self) -> None:
        """Keep no history: what begins before now is refused with 410, and so are the watches that are open."""
        with self.changed:
            self.expired_below = self._newest()
            self.changed.notify_all()

    def asked(self, method: str, part: str = "") -> int:
        """How many requests of `method` had `part` in their path."""
        return sum(request.method == method and part in request.path for request in list(self.requests))

    def names(self, part: str) -> list[str]:
        """The names of the objects whose path contains `part`."""
        with self.changed:
            return sorted(path.rpartition("/")[2] for path in self.objects if part in path)

    def told(self, reason: str) -> list[str]:
        """The messages of the events of this reason."""
        with self.changed:
            events = [item for path, item in self.objects.items() if "/events/" in path]
        return [event["message"] for event in events if event["reason"] == reason]

    def connection(self) -> Connection:
        """A connection to it, without a kubeconfig."""
        return Connection(lambda: open_transport(Access(self.url)))

    def answer(self, request: Request) -> tuple[int, Any]:
        """As the simpler one, and PUT, /status, grace periods, expired and short pages."""
        method, path, body = request.method, request.path, request.body
        if path in self.served or (path.startswith("/apis/") and path.count("/") == 3):
            return (
                (200, {"resources": self.resources.get(path, [])})
                if path in self.served
                else (404, {"message": "the server could not find it"})
            )
        if self.page_objects and request.params.get("limit"):
            request.params["limit"] = str(self.page_objects)
        with self.changed:
            if method == "PUT":
                return self._replace(path, body)
            if method == "PATCH" and path.endswith("/status"):
                return self._patch_status(path.removesuffix("/status"), request)
            stored = self.objects.get(path)
            if method == "DELETE" and stored is not None and _has_to_stop(path, stored, body or {}):
                grace_s = (body or {}).get("gracePeriodSeconds", 30)
                deletion = {"deletionTimestamp": to_rfc3339(time.time()), "deletionGracePeriodSeconds": grace_s}
                metadata = {**stored["metadata"], **deletion}
                return 200, self.put(path, {**stored, "metadata": metadata})
            status, answer = super().answer(request)
            if method == "GET" and "items" in answer:
                answer["metadata"]["resourceVersion"] = str(self._newest())
            return status, answer

    def watch(self, request: Request) -> Iterator[Any]:
        """As the simpler one, and bookmarks, expiry and faults."""
        self.watches += 1
        if self.cuts:
            self.cuts -= 1
            raise ConnectionAbortedError
        while self.silent and not self._closed:
            time.sleep(0.02)
        if "sendInitialEvents" in request.params:
            yield from self._whole_list(request)
            return
        since = int(request.params["resourceVersion"])
        until = time.monotonic() + float(request.params["timeoutSeconds"])
        path = request.path
        while True:
            with self.changed:
                expired, position = since < self.expired_below, self._newest()
                news = [change for change in self._changes if change[0] > since]
            if expired:
                yield {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}}
                return
            for _, kind, item in news:
                selected = selects(request.params, item)
                if is_in(item["__path"], path) and (selected or kind == "MODIFIED"):
                    told = {k: v for k, v in item.items() if k != "__path"}
                    # For who watches a selection, what leaves it is gone.
                    yield {"type": kind if selected else "DELETED", "object": told}
            since = position
            if self._closed or time.monotonic() > until:
                yield {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(since)}}}
                return
            with self.changed:
                if self._newest() == since and self.expired_below <= since:
                    self.changed.wait(0.05)

    def _whole_list(self, request: Request) -> Iterator[Any]:
        """The list, one object at a time; with `cut_lists`, without its end. The last object goes away meanwhile."""
        with self.changed:
            listed = [item for path, item in self.objects.items() if is_in(path, request.path)]
            version = str(self._newest())
        yield from ({"type": "ADDED", "object": item} for item in listed if selects(request.params, item))
        going = {"metadata": {"namespace": "ns", "name": "going", "resourceVersion": version}}
        yield from ({"type": kind, "object": going} for kind in ("ADDED", "MODIFIED", "DELETED"))
        end = {"resourceVersion": version, "annotations": {"k8s.io/initial-events-end": "true"}}
        if not self.cut_lists:
            yield {"type": "BOOKMARK", "object": {"metadata": end}}

    def _newest(self) -> int:
        return self._changes[-1][0] if self._changes else FIRST_VERSION - 1

    def _replace(self, path: str, body: Object) -> tuple[int, Any]:
        target = path.removesuffix("/status")
        stored = self.objects.get(target)
        if stored is None:
            return 404, {"message": f'"{target}" not found', "code": 404, "details": {"name": "x"}}
        if body["metadata"].get("resourceVersion") not in (None, stored["metadata"]["resourceVersion"]):
            return 409, {"message": "the object has been modified", "code": 409}
        if path != target:
            return 200, self.put(target, {**stored, "metadata": dict(stored["metadata"]), "status": body["status"]})
        return 200, self.put(target, {**body, "metadata": {**stored["metadata"], **body["metadata"]}})

    def _patch_status(self, path: str, request: Request) -> tuple[int, Any]:
        if path not in self.objects:
            return 404, {"message": f'"{path}" not found', "code": 404, "details": {"name": "x"}}
        if isinstance(request.body, list):
            return self._patch_tested(path, request.body)
        status = {key: request.body[key] for key in ("metadata", "status") if key in request.body}
        return self._patch(path, self.objects[path], replace(request, body=status))

    def _patch_tested(self, path: str, operations: list[Any]) -> tuple[int, Any]:
        """A JSON patch whose tests hold replaces the whole status."""
        stored = self.objects[path]
        told = {**stored, "metadata": {"generation": 0, **stored["metadata"]}}
        for operation in operations:
            if operation["op"] == "test" and at(told, *operation["path"].split("/")[1:]) != operation["value"]:
                return 422, {"message": "the server rejected our request due to an error in our request"}
        status = next(one["value"] for one in operations if (one["op"], one["path"]) == ("replace", "/status"))
        return 200, self.put(path, {**stored, "metadata": dict(stored["metadata"]), "status": status})

    def _planned(self, request: Request) -> tuple[int, Any, dict[str, str]] | None:
        with self.changed:
            for fault in self._faults:
                method, part, status, headers = fault
                if method == request.method and part in request.path:
                    self._faults.remove(fault)
                    return status, {"message": "as planned", "code": status}, headers
        return None


def _has_to_stop(path: str, pod: Object, options: Object) -> bool:
    """True for a pod that runs somewhere and is given time to end, and for one that somebody else holds on to."""
    ours = options.get("preconditions", {}).get("uid", pod["metadata"]["uid"]) == pod["metadata"]["uid"]
    runs = bool(pod.get("spec", {}).get("nodeName"))
    held = bool(pod["metadata"].get("finalizers"))
    return "/pods/" in path and ours and (held or (runs and options.get("gracePeriodSeconds") != 0))


@pytest.fixture
def control() -> Iterator[ControlApi]:
    """An API server on loopback that a controller can work against, empty."""
    api = ControlApi()
    yield api
    api.close()
