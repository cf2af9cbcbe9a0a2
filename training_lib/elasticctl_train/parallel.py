"""Several pieces of work at once, on threads that never keep the process from ending.

A `ThreadPoolExecutor` is joined when the interpreter exits, so an upload that hangs would hold up a run that has to
stop; these threads are daemons and last for one call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


def each(work: Callable[[T], None], items: Iterable[T], threads: int) -> None:
    """Call `work` for every item, on this thread and up to `threads` - 1 others.

    After an error no further item is begun; the first error is raised when nothing runs any more.
    """
    queue, lock, errors = list(items), threading.Lock(), list[BaseException]()
    queue.reverse()

    def run() -> None:
        while True:
            with lock:
                if errors or not queue:
                    return
                item = queue.pop()
            try:
                work(item)
            except BaseException as e:  # noqa: BLE001 - handed to the caller's thread, whatever it is
                errors.append(e)

    others = [threading.Thread(target=run, daemon=True) for _ in range(min(threads, len(queue)) - 1)]
    for thread in others:
        thread.start()
    run()
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
