"""Each job's share of the one thread that serves all of them.

The work for each job waits in a queue, and the job that has used the least time is next: a single job gets all of the
time, and a job that floods the service delays only itself. Turns are given for a couple of milliseconds at a time; in
between, the event loop reads and writes.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)

SLICE_S = 0.002
LEAST_S = 0.0002
_WEIGHT = 0.2
"""The weight of one turn in an average."""


class Turns:
    """Gives turns on the event loop. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._usual_s = LEAST_S  # with what follows a turn unmeasured: HTTP, for one
        self._given, self._given_at = 0, 0.0
        self._queues: dict[str, deque[Callable[[], None]]] = {}
        self._used_s: dict[str, float] = {}  # only differences count
        self._turn_s: dict[str, float] = {}
        self._ready: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._least_s = 0.0
        self._due: asyncio.Handle | None = None

    def queue(self, job: str, work: Callable[[], None]) -> None:
        """Have `work` done at the job's next turn. An error is logged, and affects no other work."""
        queue = self._queues.get(job)
        if queue is None:
            queue = self._queues[job] = deque()
            # A job that had nothing to do does not save up time.
            used_s = self._used_s[job] = max(self._used_s.get(job, 0.0), self._least_s)
            heapq.heappush(self._ready, (used_s, next(self._numbers), job))
        queue.append(work)
        if self._due is None:
            self._due = asyncio.get_running_loop().call_soon(self._give)

    @contextmanager
    def measure(self, job: str) -> Iterator[None]:
        """Measure what is done inside as the cost of one of the job's turns."""
        began = self._clock()
        try:
            yield
        finally:
            spent_s, before_s = self._clock() - began, self._turn_s.get(job, LEAST_S)
            self._turn_s[job] = max(LEAST_S, before_s + _WEIGHT * (spent_s - before_s))

    def drop_job(self, job: str) -> None:
        """Drop what is stored of a job that has ended."""
        self._turn_s.pop(job, None)

    def _give(self) -> None:
        self._due = None
        now = self._clock()
        if self._given:  # nothing but these turns has been done since
            self._usual_s += _WEIGHT * ((now - self._given_at) / self._given - self._usual_s)
            self._usual_s = min(SLICE_S, max(LEAST_S, self._usual_s))
        self._given, self._given_at = 0, now
        left_s = SLICE_S
        while self._ready and left_s > 0:
            self._least_s, _, job = heapq.heappop(self._ready)
            queue = self._queues[job]
            cost_s = max(self._usual_s, self._turn_s.get(job, 0.0))
            self._used_s[job] = self._least_s + cost_s
            left_s -= cost_s
            self._given += 1
            try:
                queue.popleft()()
            except Exception:  # the edge of a turn: the job's next one comes all the same
                log.exception("job %s: what was due at its turn failed", job, extra={"job": job})
            if queue:
                heapq.heappush(self._ready, (self._used_s[job], next(self._numbers), job))
            else:
                del self._queues[job]
        if self._ready:
            self._due = asyncio.get_running_loop().call_soon(self._give)
        else:
            self._given = 0
            self._used_s.clear()  # no job waits, so none is behind; also drops jobs that have ended
