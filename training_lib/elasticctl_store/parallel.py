"""Run several pieces of work in parallel, on threads that never keep the process from exiting.

The interpreter joins the threads of a `ThreadPoolExecutor` at exit, so a hanging upload would hold up a run that has to
stop. These threads are daemons and last for one call.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

CGROUP = Path("/sys/fs/cgroup")


def bound() -> int:
    """Return the number of processors this process may run on (its affinity on Linux, elsewhere all of the machine)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available(cgroup: Path = CGROUP) -> int:
    """Return the number of processors that can be used, at least 1: the affinity, capped by the container's CPU quota.

    More threads than that would only be throttled.
    """
    return max(1, int(min(bound(), quota(cgroup))))


def quota(cgroup: Path = CGROUP) -> float:
    """Return the CPU quota of this container's control group, in processors; infinity if there is no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # cgroup v2, then v1
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max" is not a number, and -1 means no limit
            allowed, period = " ".join((cgroup / name).read_text() for name in names).split()
            if int(allowed) > 0:
                return int(allowed) / int(period)
    return math.inf


def per_rank() -> int:
    """Return this rank's part of the available processors, if the worker's ranks share them evenly; at least 1."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, available() // ranks)


T = TypeVar("T")


def each(work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call `work` for every item, on this thread and on up to `threads` - 1 others.

    After an error no further item is started; the first error is raised once nothing runs any more. An exception in the
    calling thread that does not derive from Exception, such as that of a signal handler, is raised immediately.
    """
    queue, lock, errors = list(items), threading.Lock(), list[BaseException]()
    queue.reverse()
    caller = threading.current_thread()

    def run() -> None:
        while True:
            with lock:
                if errors or not queue:
                    return
                item = queue.pop()
            try:
                work(item)
            except BaseException as e:
                errors.append(e)
                if threading.current_thread() is caller and not isinstance(e, Exception):
                    raise

    others = []
    for _ in range(min(threads, len(queue)) - 1):
        thread = threading.Thread(target=run, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the container's limit on processes; fewer threads do the same work
            break
        others.append(thread)
    run()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
