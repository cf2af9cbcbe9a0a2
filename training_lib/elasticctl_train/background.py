"""A thread that is there already when it is needed: to start one can take longer than what it is started for."""

from __future__ import annotations

import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable

Job = Callable[[], None]


class Background:
    """A daemon thread that does one job at a time. Jobs must not raise.

    With `niceness` above 0 it, and every thread that a job starts, leaves the processors to others that want them.
    """

    def __init__(self, name: str, niceness: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=_work, args=(self._jobs, self._idle, niceness), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)  # the thread holds no reference to this object, and ends with it

    @property
    def busy(self) -> bool:
        """Is a job still being done?"""
        return not self._idle.is_set()

    def start(self, job: Job) -> None:
        """Have `job` done; the one before must be over."""
        self._idle.clear()
        self._jobs.put(job)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the job is done, or for `timeout_s` seconds."""
        self._idle.wait(timeout_s)


def _work(jobs: queue.SimpleQueue[Job | None], idle: threading.Event, niceness: int) -> None:
    if niceness and sys.platform == "linux":  # where it belongs to a thread, and not to the process
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(niceness, os.getpriority(os.PRIO_PROCESS, own)))
    while (job := jobs.get()) is not None:
        try:
            job()
        finally:
            del job  # and with it what it holds on to
            idle.set()
