"""What a watch has shown so far: objects by namespace and name, with one index, for many readers.

Three things keep it true. A relist is compared with what is there, so that nobody is told of what has not changed. Of
two states of an object the one with the higher resourceVersion wins, so that an event that is late does no harm. And
what this process has written itself is believed at once, until the watch has come to that version: no pass is made on
a state from before our own last write, and so nothing is done twice.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from elasticctl.api.codec import Manifest

Change = Callable[[Manifest | None, Manifest | None], None]
"""Called with (old, new): old None for an object that is new, new None for one that is gone."""


class ObjectStore:
    """Thread-safe; the objects given out are shared and must not be changed.

    `prune` cuts an object down to what is read of it, `index_of` names the group it is found by; of what is left of
    it, `keep` says whether it is of interest at all.
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
        self._ended: set[str] = set()  # uids of objects that are gone, while the watch may not have come to that
        self._subscribers: list[Change] = []
        self._news: list[tuple[Manifest | None, Manifest | None]] = []

    def subscribe(self, callback: Change) -> None:
        """Call `callback` for every object there is, and from now on for every change, in order."""
        with self._told():
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
        """Return the objects of which `index_of` says `name`, in order of their keys."""
        with self._lock:
            return [self._objects[key] for key in sorted(self._groups.get(name, ()))]

    def pruned(self, objects: Iterable[Manifest]) -> list[Manifest]:
        """Cut a page of a list down at once, so that the whole list is never held at full size."""
        return [item for item in map(self._prune, objects) if self._keep(item)]

    def replace(self, objects: Iterable[Manifest], version: str) -> None:
        """Take over a list, as `pruned` returned it, as of `version`; what was written after it stays."""
        with self._told():
            restored = number(version) < self._position  # from a backup: versions have been given out twice
            self._position = number(version)
            listed = {key_of(item): item for item in objects}
            self._ended &= set() if restored else set(map(_uid, listed.values()))
            for key in [key for key, item in self._objects.items() if restored or self._is_past(key, item, listed)]:
                self._remove(key)
            for key, item in listed.items():
                self._put(key, item)

    def apply(self, kind: str, item: Manifest) -> None:
        """Take over one event of the watch: ADDED, MODIFIED, DELETED or BOOKMARK."""
        with self._told():
            self._position = max(self._position, _version(item))
            key = key_of(item)
            pruned = self._prune(item) if kind in ("ADDED", "MODIFIED") else None
            if pruned is not None and self._keep(pruned):
                self._put(key, pruned)
            elif kind != "BOOKMARK":
                if kind == "DELETED":
                    self._ended.discard(_uid(item))
                stored = self._objects.get(key)
                if stored is not None and _version(stored) <= _version(item):
                    self._remove(key)

    def learn(self, item: Manifest) -> None:
        """Believe the answer to a write of ours until the watch has come to it; one that it has passed is ignored."""
        with self._told():
            if self._is_ahead(item):
                self._put(key_of(item), self._prune(item))

    def forget(self, key: str, uid: str) -> None:
        """Believe that this very object is gone, as the answer to our deletion says.

        What the watch still has to tell of its last moments does not bring it back: a worker's end would count twice.
        """
        with self._told():
            stored = self._objects.get(key)
            if stored is not None and _uid(stored) == uid:
                self._remove(key)
                self._ended.add(uid)

    def _is_past(self, key: str, item: Manifest, listed: Mapping[str, Manifest]) -> bool:
        return key not in listed and not self._is_ahead(item)

    def _is_ahead(self, item: Manifest) -> bool:
        return _version(item) > self._position

    def _put(self, key: str, new: Manifest) -> None:
        old = self._objects.get(key)
        if _uid(new) in self._ended or (old is not None and _version(old) >= _version(new) > 0):
            return
        if old is not None:
            self._groups[self._index_of(old)].discard(key)
        self._objects[key] = new
        self._groups[self._index_of(new)].add(key)
        if old is None or _content(old) != _content(new):  # a heartbeat, or a field that nobody here reads
            self._news.append((old, new))

    def _remove(self, key: str) -> None:
        old = self._objects.pop(key)
        name = self._index_of(old)
        self._groups[name].discard(key)
        if not self._groups[name]:
            del self._groups[name]
        self._news.append((old, None))

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Hold the lock, and tell the subscribers what changed under it, so that they hear it in order."""
        with self._lock:
            yield
            news, self._news = self._news, []
            for old, new in news:
                for callback in self._subscribers:
                    callback(old, new)


def key_of(item: Manifest) -> str:
    """`namespace/name`, or the name alone of what lies in no namespace."""
    metadata = item.get("metadata", {})
    namespace, name = metadata.get("namespace"), metadata.get("name", "")
    return f"{namespace}/{name}" if namespace else str(name)


def number(version: str) -> int:
    """A resourceVersion as a number, as every API server on etcd gives them out; 0 for anything else."""
    return int(version) if version.isascii() and version.isdigit() else 0


def _content(item: Manifest) -> Manifest:
    """The object but for its version."""
    return {**item, "metadata": {**item.get("metadata", {}), "resourceVersion": ""}}


def _uid(item: Manifest) -> str:
    return str(item.get("metadata", {}).get("uid", ""))


def _version(item: Manifest) -> int:
    return number(str(item.get("metadata", {}).get("resourceVersion", "")))
