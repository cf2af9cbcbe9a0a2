"""Several pieces of work at once, on threads that never keep the process from ending.

A `ThreadPoolExecutor` is joined when the interpreter exits, so an upload that hangs would hold up a run that has to
stop; these threads are daemons and last for one call.
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
    """How many processors this process is bound to, where the system knows such a thing (Linux), else all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available(cgroup: Path = CGROUP) -> int:
    """Of those, no more than its container may use: threads beyond that only have all of them held up; at least 1."""
    return max(1, int(min(bound(), quota(cgroup))))


def quota(cgroup: Path = CGROUP) -> float:
    """How many processors' time the control group of this container allows; infinity where it sets no limit."""
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of version 2, and of version 1
        with suppress(OSError, ValueError, ZeroDivisionError):  # "max" is no number, and -1 no limit
            allowed, period = " ".join((cgroup / name).read_text() for name in names).split()
            if int(allowed) > 0:
                return int(allowed) / int(period)
    return math.inf


def per_rank() -> int:
    """This rank's part of them, where the worker's ranks share them evenly; at least 1."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, available() // ranks)


T = TypeVar("T")


def each(work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call `work` for every item, on this thread and up to `threads` - 1 others.

    After an error no further item is begun; the first error is raised when nothing runs any more. What is no error but
    ends this thread, a signal's handler mostly, ends it at once.
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
        except RuntimeError:  # the container's limit on processes: fewer threads do the same
            break
        others.append(thread)
    run()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
