"""Watches: a `Reflector` keeps an `ObjectStore` in step with one resource of the API server, in a thread.

Objects stay raw JSON. The list is streamed, one object at a time, because a page of large objects could take more
memory than there is. Servers that stream no lists, such as 1.33, are asked for pages
(https://kubernetes.io/docs/reference/using-api/api-concepts/#streaming-lists). The watch starts at the list's version
and asks for bookmarks, so that after a disconnect it resumes where it stopped; if the server no longer keeps that
version (410), everything is listed again and compared. A silent connection is closed: the server ends each watch by
itself before that.

Three things keep the store true. A relist is compared with what is stored, so that subscribers see only real changes.
Of two states of an object the one with the higher resourceVersion wins, so that a late event does no harm. And what
this process has written itself is stored immediately, until the watch has caught up: no pass acts on a state from
before our own last write, so nothing is done twice.
"""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from elasticctl.api.codec import Manifest
from elasticctl.api.errors import (
    BusyError,
    ClusterError,
    ElasticctlError,
    ExpiredError,
    ForbiddenError,
    SpecError,
)
from elasticctl.kubeapi.connection import Requests, Stream, list_pages
from elasticctl.kubeapi.responses import NoSuchApiError, parse_json, refusal

WATCH_S = 60.0
"""After this time the server ends a watch; the next one resumes where it stopped."""
SILENCE_S = 15.0
"""How much longer than WATCH_S a connection may be silent before it counts as dead."""
LIST_S = 300
"""A list that is not over by then is asked for in pages. Kubernetes gives a list in pages 60 s for each."""
_LIST_ENDS = "k8s.io/initial-events-end"
"""The annotation of the bookmark after the last object."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.1, 10.0

log = logging.getLogger(__name__)

OnChange = Callable[[Manifest | None, Manifest | None], None]
"""Called with (old, new): old is None for a new object, new is None for a deleted one."""


class ObjectStore:
    """The objects that a watch has shown, with one index. Thread-safe; returned objects are shared: do not change them.

    `prune` reduces an object to what is read of it, `index_of` names the group of a pruned object, and `keep` says
    whether a pruned object is stored at all.
    """

    def __init__(
        self,
        prune: Callable[[Manifest], Manifest] = lambda item: item,
        index_of: Callable[[Manifest], str] = lambda item: "",
        keep: Callable[[Manifest], bool] = lambda item: True,
    ) -> None:
        self._prune, self._index_of, self._keep = prune, index_of, keep
        self._lock = threading.RLock()
        self._objects: dict[str, Manifest] = {}
        self._groups: defaultdict[str, set[str]] = defaultdict(set)
        self._position = 0
        self._ended: set[str] = set()  # uids of deleted objects that the watch may still show
        self._subscribers: list[OnChange] = []
        self._changes: list[tuple[Manifest | None, Manifest | None]] = []

    def subscribe(self, callback: OnChange) -> None:
        """Call `callback` for every stored object, and from now on for every change, in order."""
        with self._notifying():
            self._subscribers.append(callback)
            existing = list(self._objects.values())
            for item in existing:
                callback(None, item)

    def get(self, key: str) -> Manifest | None:
        """Return the object at `namespace/name`, or None."""
        with self._lock:
            return self._objects.get(key)

    def items(self) -> list[Manifest]:
        """Return all objects."""
        with self._lock:
            return list(self._objects.values())

    def group(self, name: str) -> list[Manifest]:
        """Return the objects of the group `name`, sorted by key."""
        with self._lock:
            return [self._objects[key] for key in sorted(self._groups.get(name, ()))]

    def prune_page(self, objects: Iterable[Manifest]) -> list[Manifest]:
        """Prune a page of a list right away, so that the whole list is never held at full size."""
        return [item for item in map(self._prune, objects) if self._keep(item)]

    def replace(self, objects: Iterable[Manifest], version: str) -> None:
        """Take over a whole list, pruned, as of `version`; what we wrote after it stays."""
        with self._notifying():
            restored = version_number(version) < self._position  # from a backup: versions start again from an older one
            self._position = version_number(version)
            listed = {object_key(item): item for item in objects}
            self._ended &= set() if restored else set(map(_uid, listed.values()))
            for key, item in list(self._objects.items()):
                if restored or (key not in listed and not self._is_ahead(item)):
                    self._remove(key)
            for key, item in listed.items():
                self._put(key, item)

    def apply(self, kind: str, item: Manifest) -> None:
        """Apply one event of the watch: ADDED, MODIFIED, DELETED or BOOKMARK."""
        with self._notifying():
            self._position = max(self._position, _version(item))
            key = object_key(item)
            pruned = self._prune(item) if kind in ("ADDED", "MODIFIED") else None
            if pruned is not None and self._keep(pruned):
                self._put(key, pruned)
            elif kind != "BOOKMARK":
                if kind == "DELETED":
                    self._ended.discard(_uid(item))
                stored = self._objects.get(key)
                if stored is not None and _version(stored) <= _version(item):
                    self._remove(key)

    def record_write(self, item: Manifest) -> None:
        """Store the answer to a write of ours until the watch has caught up; ignored if it already has."""
        with self._notifying():
            if self._is_ahead(item):
                self._put(object_key(item), self._prune(item))

    def record_deletion(self, key: str, uid: str) -> None:
        """Remove this very object, as the answer to our deletion says.

        Later events of the watch about it do not bring it back: a worker's end would count twice.
        """
        with self._notifying():
            stored = self._objects.get(key)
            if stored is not None and _uid(stored) == uid:
                self._remove(key)
                self._ended.add(uid)

    def _is_ahead(self, item: Manifest) -> bool:
        return _version(item) > self._position

    def _put(self, key: str, new: Manifest) -> None:
        old = self._objects.get(key)
        if _uid(new) in self._ended or (old is not None and _version(old) >= _version(new) > 0):
            return
        if old is not None:
            self._leave_group(key, old)
        self._objects[key] = new
        self._groups[self._index_of(new)].add(key)
        if old is None or _content(old) != _content(new):  # else only a heartbeat, or a field that was pruned
            self._changes.append((old, new))

    def _remove(self, key: str) -> None:
        old = self._objects.pop(key)
        self._leave_group(key, old)
        self._changes.append((old, None))

    def _leave_group(self, key: str, item: Manifest) -> None:
        name = self._index_of(item)
        self._groups[name].discard(key)
        if not self._groups[name]:  # or changing a pod's label again and again would leave many groups
            del self._groups[name]

    @contextmanager
    def _notifying(self) -> Iterator[None]:
        """Hold the lock; then call the subscribers with what changed under it, in order."""
        with self._lock:
            yield
            changes, self._changes = self._changes, []
            for old, new in changes:
                for callback in self._subscribers:
                    callback(old, new)


def object_key(item: Manifest) -> str:
    """`namespace/name`, or only the name of a cluster-scoped object."""
    metadata = item.get("metadata", {})
    namespace, name = metadata.get("namespace"), metadata.get("name", "")
    return f"{namespace}/{name}" if namespace else str(name)


def version_number(version: str) -> int:
    """A resourceVersion as a number, as every API server on etcd has them; 0 for anything else."""
    return int(version) if version.isascii() and version.isdigit() else 0


def _content(item: Manifest) -> Manifest:
    """The object without its version."""
    return {**item, "metadata": {**item.get("metadata", {}), "resourceVersion": ""}}


def _uid(item: Manifest) -> str:
    return str(item.get("metadata", {}).get("uid", ""))


def _version(item: Manifest) -> int:
    return version_number(str(item.get("metadata", {}).get("resourceVersion", "")))


class ListerWatcher(Requests, Protocol):
    """What a reflector needs of a connection; the controller's counts and limits requests."""

    def stream(self, path: str, params: Mapping[str, str] | None = None, *, timeout_s: float | None = None) -> Stream:
        """Start a watch."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What to watch: the path of a collection, and label and field selectors."""

    path: str
    labels: str = ""
    fields: str = ""

    def params(self, **more: str) -> dict[str, str]:
        """Query parameters of a list or a watch."""
        selectors = {"labelSelector": self.labels, "fieldSelector": self.fields}
        return {**{name: value for name, value in selectors.items() if value}, **more}


@dataclass(slots=True)
class _Pause:
    """Seconds to wait after consecutive failures: doubling, with jitter, but no less than the server asks for."""

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
    """Fills `store` from `resource` while it runs; `optional`: a server that does not know the resource has none.

    `refused`: the server has denied the right to list or to watch; it is asked again, for rights can be given.
    """

    def __init__(self, api: ListerWatcher, resource: Resource, store: ObjectStore, *, optional: bool = False) -> None:
        self.store, self.relists, self._optional, self.refused = store, 0, optional, False
        self._api, self._resource = api, resource
        self._synced, self._stopping = threading.Event(), threading.Event()
        self._state, self._streams = _State(), True
        self._thread = threading.Thread(target=self._run, name=f"watch{resource.path.replace('/', '-')}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the watch and the thread."""
        self._stopping.set()
        if (stream := self._state.stream) is not None:
            stream.close()
        self._thread.join()

    @property
    def alive(self) -> bool:
        """False if the thread has died, which is an error."""
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
                self._stopping.wait(state.pause.after(e))  # in case every version is too old
            except ElasticctlError as e:
                if self._stopping.is_set():
                    return
                self.refused = isinstance(e, ForbiddenError)
                if self._optional and isinstance(e, NoSuchApiError):
                    self._synced.set()
                log.warning("%s: %s; trying again", self._resource.path, e)
                self._stopping.wait(state.pause.after(e))
            except Exception:  # the thread's edge: if it died, the controller would see nothing any more
                log.exception("%s: the watch failed; listing again", self._resource.path)
                state.version = ""
                self._stopping.wait(MAX_PAUSE_S)

    def _list(self) -> str:
        """Read the whole list, and return its version."""
        self.relists += 1
        started = time.monotonic()
        items, version = (self._stream_list() if self._streams else None) or self._list_pages()
        self.store.replace(items, version)
        log.info("%s: %d objects listed in %.1f s", self._resource.path, len(items), time.monotonic() - started)
        return version

    def _stream_list(self) -> tuple[list[Manifest], str] | None:
        """The list, streamed, and its version; None from a server that does not do that, which is asked only once."""
        params = self._resource.params(
            watch="true",
            sendInitialEvents="true",
            resourceVersionMatch="NotOlderThan",
            allowWatchBookmarks="true",
            timeoutSeconds=str(LIST_S),
        )
        found: dict[str, list[Manifest]] = {}
        try:
            with closing(self._api.stream(self._resource.path, params, timeout_s=WATCH_S)) as stream:
                self._state.stream = stream
                for kind, item in _events(stream, self._resource.path):
                    if kind != "BOOKMARK":  # what changes meanwhile may come before the end, too
                        found[object_key(item)] = self.store.prune_page([item] if kind != "DELETED" else [])
                    elif _LIST_ENDS in (item["metadata"].get("annotations") or {}):
                        return list(chain.from_iterable(found.values())), str(item["metadata"]["resourceVersion"])
        except SpecError as e:
            log.info("%s: the server does not stream lists: %s", self._resource.path, e)
        self._streams = False
        return None

    def _list_pages(self) -> tuple[list[Manifest], str]:
        """The list, page by page, and its version."""
        items, version = [], ""
        for page in list_pages(self._api, self._resource.path, self._resource.params()):
            items += self.store.prune_page(page.get("items") or [])
            version = str(page.get("metadata", {}).get("resourceVersion", ""))
        return items, version

    def _watch(self) -> None:
        """Apply changes until the server ends the watch; raises what interrupted it."""
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
            if self._stopping.is_set():  # `stop` may not have seen this stream
                return
            self.refused = False
            for kind, item in _events(stream, self._resource.path):
                self.store.apply(kind, item)
                self._state.version = item["metadata"]["resourceVersion"]
                self._state.pause.next_s = MIN_PAUSE_S
        if time.monotonic() - began < 1.0 and not self._stopping.is_set():
            raise BusyError(f"the watch of {self._resource.path} ended immediately")
        self._state.pause.next_s = MIN_PAUSE_S  # it worked, though there was no event


def _events(stream: Stream, path: str) -> Iterator[tuple[str, Manifest]]:
    """The events of a watch as (type, object); raises what an ERROR event says."""
    for line in stream:
        if not line.strip():
            continue
        try:
            event = parse_json(line)
            kind, item = str(event["type"]), event["object"]
            if kind == "ERROR":
                raise refusal(int(item.get("code") or 500), json.dumps(item).encode(), {}, f"watch {path}")
            _ = item["metadata"]["resourceVersion"]
        except (ValueError, KeyError, TypeError) as e:
            raise ClusterError(f"the watch of {path} sent something that is not an event: {line[:200]!r}") from e
        yield kind, item
