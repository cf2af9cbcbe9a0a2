"""Keep an `ObjectStore` like what the API server has: list once, then watch, for one resource, in a thread.

Raw JSON throughout. The list is read in pages. The watch begins at the list's version and asks for bookmarks, so that
one that was cut off goes on where it stood; when the server no longer keeps that version (410) everything is listed
again and compared. A connection that has gone silent is given up: the server ends each watch by itself before that.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import BusyError, ClusterError, ElasticctlError, ExpiredError
from elasticctl.kubeapi.cache import ObjectStore
from elasticctl.kubeapi.connection import Stream
from elasticctl.kubeapi.refusals import refusal

PAGE_OBJECTS = 500
WATCH_S = 60.0
"""After this time the server ends a watch, and the next one begins where it stood."""
SILENCE_S = 15.0
"""How much longer than that a connection may be silent before it counts as dead."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0

log = logging.getLogger(__name__)


class Api(Protocol):
    """What of `connection.Connection` is used here; the controller counts and limits its requests on the way."""

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Make one request and return the answer's JSON."""

    def stream(self, path: str, params: Mapping[str, str] | None = None, *, timeout_s: float | None = None) -> Stream:
        """Begin a watch."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What is watched: the path of a collection, and the labels and fields of those of its objects that are wanted."""

    path: str
    labels: str = ""
    fields: str = ""

    def params(self, **more: str) -> dict[str, str]:
        """Query parameters of a list or a watch."""
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {**{name: value for name, value in selectors.items() if value}, **more}


@dataclass(slots=True)
class _Pause:
    """Seconds to wait after failures in a row: doubling, with jitter, unless the server has said how long."""

    next_s: float = MIN_PAUSE_S

    def after(self, error: ElasticctlError) -> float:
        pause_s, self.next_s = self.next_s, min(MAX_PAUSE_S, self.next_s * 2)
        asked_s = error.retry_after_s if isinstance(error, BusyError) else None
        return max(asked_s or 0.0, pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - jitter, not a secret


@dataclass(slots=True)
class _State:
    version: str = ""
    stream: Stream | None = None
    pause: _Pause = field(default_factory=_Pause)


class Reflector:
    """Fills `store` from `resource`, as long as it runs."""

    def __init__(self, api: Api, resource: Resource, store: ObjectStore) -> None:
        self.store, self.relists = store, 0
        self._api, self._resource = api, resource
        self._synced, self._stopping = threading.Event(), threading.Event()
        self._state = _State()
        self._thread = threading.Thread(target=self._run, name=f"watch{resource.path.replace('/', '-')}", daemon=True)

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch and the thread."""
        self._stopping.set()
        if (stream := self._state.stream) is not None:
            stream.close()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """False once the thread has died, which is an error."""
        return self._thread.is_alive()

    def wait_synced(self, timeout_s: float | None = None) -> bool:
        """Wait until the store holds a whole list; True once it does."""
        return self._synced.wait(timeout_s)

    def _run(self) -> None:
        state = self._state
        while not self._stopping.is_set():
            try:
                if not state.version:
                    state.version = self._list()
                    self._synced.set()
                self._watch()
            except ExpiredError as e:
                log.info("%s: %s; listing again", self._resource.path, e)
                state.version = ""
                self._stopping.wait(state.pause.after(e))  # a server whose every version is too old is not hammered
            except ElasticctlError as e:
                if self._stopping.is_set():
                    return
                log.warning("%s: %s; trying again", self._resource.path, e)
                self._stopping.wait(state.pause.after(e))
            except Exception:  # the thread's edge: without it the controller would be blind for good
                log.exception("%s: the watch failed; listing again", self._resource.path)
                state.version = ""
                self._stopping.wait(MAX_PAUSE_S)

    def _list(self) -> str:
        """Read the whole list, page by page, and return its version."""
        self.relists += 1
        started, items, token = time.monotonic(), [], ""
        while True:
            params = self._resource.params(limit=str(PAGE_OBJECTS), **({"continue": token} if token else {}))
            page = self._api.request("GET", self._resource.path, None, params)
            items += self.store.pruned(page.get("items") or [])
            metadata = page.get("metadata", {})
            token = metadata.get("continue") or ""
            if not token:
                break
        version = str(metadata.get("resourceVersion", ""))
        self.store.replace(items, version)
        log.info("%s: %d objects listed in %.1f s", self._resource.path, len(items), time.monotonic() - started)
        return version

    def _watch(self) -> None:
        """Follow the changes until the server ends the watch; raises what cut it off."""
        seconds = WATCH_S * random.uniform(0.9, 1.0)  # noqa: S311 - all replicas' watches need not end together
        params = self._resource.params(
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=self._state.version,
            timeoutSeconds=str(int(seconds)),
        )
        began = time.monotonic()
        with closing(self._api.stream(self._resource.path, params, timeout_s=seconds + SILENCE_S)) as stream:
            self._state.stream = stream
            if self._stopping.is_set():  # whoever stopped us may not have seen this stream
                return
            for kind, item in _events(stream, self._resource.path):
                self.store.apply(kind, item)
                self._state.version = item["metadata"]["resourceVersion"]
                self._state.pause.next_s = MIN_PAUSE_S
        if time.monotonic() - began < 1.0 and not self._stopping.is_set():
            raise BusyError(f"the watch of {self._resource.path} ended at once")
        self._state.pause.next_s = MIN_PAUSE_S  # it has worked, though there was nothing to tell


def _events(stream: Stream, path: str) -> Iterator[tuple[str, Manifest]]:
    """The events of a watch as (type, object); raises what an ERROR event says."""
    for line in stream:
        if not line.strip():
            continue
        try:
            event = json.loads(line)
            kind, item = str(event["type"]), event["object"]
            if kind == "ERROR":
                raise refusal(int(item.get("code") or 500), json.dumps(item).encode(), {}, f"watch {path}")
            _ = item["metadata"]["resourceVersion"]
        except (ValueError, KeyError, TypeError) as e:
            raise ClusterError(f"the watch of {path} sent what is no event: {line[:200]!r}") from e
        yield kind, item
