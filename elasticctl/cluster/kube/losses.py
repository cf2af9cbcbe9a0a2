"""How long a lost worker takes to be created again: the controller's own promise, measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FORGET_S = 600.0
"""Whoever is not replaced by then has been removed on purpose, or waits for something else than the controller."""
MAX_KEPT = 10_000


class Losses:
    """Losses that wait for their replacement, by `job's uid/pod`; thread-safe. `clock` is monotonic seconds."""

    def __init__(self, on_replaced: Callable[[float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._on_replaced, self._clock = on_replaced, clock
        self._lock = threading.Lock()
        self._lost_at: dict[str, float] = {}
        self._unwanted: dict[str, float] = {}

    def removing(self, uid: str) -> None:
        """This pod is about to be removed on purpose: its end is no loss."""
        with self._lock:
            self._unwanted[uid] = self._clock()
            self._tidy(self._unwanted)

    def lost(self, key: str, uid: str) -> None:
        """This pod has just been found lost; the first word of it counts."""
        with self._lock:
            if uid not in self._unwanted:
                self._lost_at.setdefault(key, self._clock())
                self._tidy(self._lost_at)

    def settled(self, key: str) -> None:
        """There is nothing to replace any more: another replica has made the pod again."""
        with self._lock:
            self._lost_at.pop(key, None)

    @contextmanager
    def replacing(self, key: str) -> Iterator[None]:
        """A pod of this name is being created: measure it, unless that fails. A watch may tell of it even before."""
        with self._lock:
            at = self._lost_at.pop(key, None)
        try:
            yield
        except BaseException:
            if at is not None:
                with self._lock:
                    self._lost_at[key] = at
            raise
        if at is not None:
            self._on_replaced(self._clock() - at)

    def _tidy(self, times: dict[str, float]) -> None:
        """Forget the oldest: an entry is added behind all others."""
        oldest_kept = self._clock() - FORGET_S
        while times and (len(times) > MAX_KEPT or next(iter(times.values())) < oldest_kept):
            del times[next(iter(times))]
