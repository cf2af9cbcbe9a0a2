"""A queue of job keys (`namespace/name`): each is queued at most once, and never worked on by two threads at a time.

A key that is added while it is being worked on is queued again when that is done, so no change is missed. If a key is
delayed several times, the earliest time counts. Failures back off exponentially, with jitter. Namespaces take turns, so
a namespace with thousands of jobs to work on delays the jobs of another by one of its own jobs, not by all of them.
"""

from __future__ import annotations

import heapq
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

BASE_DELAY_S = 0.05
MAX_DELAY_S = 60.0
LONGEST_WAIT_S = 3600.0
"""The longest sleep: locks take no timeout beyond some 292 years, and a job's spec may ask for more."""
SPARE_TIMERS = 64
"""How many outdated timers are allowed, in addition to one per key, before they are removed."""


def namespace_of(key: str) -> str:
    """The namespace in `namespace/name`."""
    return key.partition("/")[0]


def fair_pause_s(keys: Iterable[str], key: str, per_s: float) -> float:
    """Seconds between two tries of the job `key`, if all of `keys` together may try `per_s` times a second.

    Each namespace gets the same share of the tries, and its jobs divide that share among themselves.
    """
    jobs = Counter(map(namespace_of, keys))
    return jobs[namespace_of(key)] * len(jobs) / per_s


class WorkQueue:
    """A thread-safe queue of keys; `clock` is monotonic seconds, `jitter` gives numbers in [0, 1).

    At most `most_at_once` keys of one namespace are worked on at a time: with more threads than that, some are always
    left for the other namespaces, however long a pass takes.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        most_at_once: int = sys.maxsize,
    ) -> None:
        self._clock, self._jitter, self._most_at_once = clock, jitter, most_at_once
        self._changed = threading.Condition()
        self._ready: dict[str, deque[str]] = {}  # by namespace; the first is next
        self._busy = Counter[str]()  # how many keys of each namespace are being worked on
        self._waiting: set[str] = set()
        self._working: set[str] = set()
        self._due: dict[str, float] = {}
        self._timers: list[tuple[float, str]] = []
        self._failures: dict[str, int] = {}
        self._shut_down = False

    def __len__(self) -> int:
        """The number of keys that are queued now."""
        with self._changed:
            return len(self._waiting)

    def add(self, key: str) -> None:
        """Queue `key` now."""
        with self._changed:
            self._add(key)

    def add_after(self, key: str, delay_s: float) -> None:
        """Queue `key` in `delay_s` seconds, unless it is due earlier anyway."""
        with self._changed:
            due = self._clock() + max(0.0, delay_s)
            if due < self._due.get(key, float("inf")):
                self._due[key] = due
                heapq.heappush(self._timers, (due, key))
                self._drop_outdated_timers()
                self._changed.notify()

    def add_rate_limited(self, key: str) -> None:
        """Queue `key` after a pause that doubles with each consecutive failure."""
        with self._changed:
            failures = self._failures.get(key, 0)
            self._failures[key] = failures + 1
        delay_s = min(BASE_DELAY_S * 2.0 ** min(failures, 30), MAX_DELAY_S)
        self.add_after(key, delay_s * (0.5 + self._jitter() / 2))

    def reset_failures(self, key: str) -> None:
        """Reset the failures of `key`, after it has been worked on successfully."""
        with self._changed:
            self._failures.pop(key, None)

    def get(self, timeout_s: float | None = None) -> str | None:
        """Wait at most `timeout_s` seconds (None: forever) for the next key; None if there is none, or at shutdown.

        The caller must call `done` with the key afterwards.
        """
        with self._changed:
            deadline = None if timeout_s is None else self._clock() + timeout_s
            while not self._shut_down:
                self._promote()
                key = self._pop_ready()
                if key is not None:
                    return key
                if deadline is not None and self._clock() >= deadline:
                    return None
                self._changed.wait(self._pause_s(deadline))
            return None

    def done(self, key: str) -> None:
        """The caller of `get` has finished with `key`."""
        with self._changed:
            namespace = namespace_of(key)
            self._working.discard(key)
            self._busy[namespace] -= 1
            if not self._busy[namespace]:
                del self._busy[namespace]
            if key in self._waiting:
                self._make_ready(key)
            elif namespace in self._ready:
                self._changed.notify()  # the namespace may have been at its limit

    def shut_down(self) -> None:
        """Make every `get` return None from now on."""
        with self._changed:
            self._shut_down = True
            self._changed.notify_all()

    def _add(self, key: str) -> None:
        if key in self._waiting:
            return
        self._waiting.add(key)
        if key not in self._working:
            self._make_ready(key)

    def _make_ready(self, key: str) -> None:
        self._ready.setdefault(namespace_of(key), deque()).append(key)
        self._changed.notify()

    def _pop_ready(self) -> str | None:
        """Take the next key of the first namespace that may have one more worked on; None if there is none."""
        namespace = next((name for name in self._ready if self._busy[name] < self._most_at_once), None)
        if namespace is None:
            return None
        keys = self._ready.pop(namespace)
        key = keys.popleft()
        if keys:
            self._ready[namespace] = keys  # after all others
        self._waiting.discard(key)
        self._working.add(key)
        self._busy[namespace] += 1
        return key

    def _promote(self) -> None:
        """Queue the keys that are due."""
        now = self._clock()
        while self._timers and self._timers[0][0] <= now:
            due, key = heapq.heappop(self._timers)
            if self._due.get(key) == due:  # not replaced by an earlier one
                del self._due[key]
                self._add(key)

    def _drop_outdated_timers(self) -> None:
        """Drop timers that an earlier one has replaced.

        A job that is queued every second and has a deadline in a week would leave hundreds of thousands.
        """
        if len(self._timers) > 2 * len(self._due) + SPARE_TIMERS:
            self._timers = [(due, key) for key, due in self._due.items()]
            heapq.heapify(self._timers)

    def _pause_s(self, deadline: float | None) -> float | None:
        """Seconds until the next timer or the deadline, whichever is first (0 if it is due); None: until notified."""
        times = [time_ for time_ in (deadline, self._timers[0][0] if self._timers else None) if time_ is not None]
        return min(LONGEST_WAIT_S, max(0.0, min(times) - self._clock())) if times else None
