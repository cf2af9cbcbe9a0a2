"""Blocking calls beside the event loop, in threads that hold up no exit: a cluster may take its time to answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def beside(call: Callable[[], T]) -> T:
    """Run `call` in a thread of its own, and return or raise what it does; left alone when this is cancelled."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # from here on it can be left alone, but not be cancelled

    def run() -> None:
        try:
            result = call()
        except BaseException as e:  # noqa: BLE001 - handed over to who waits
            outcome.set_exception(e)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name="dashboard-call", daemon=True).start()
    return await asyncio.wrap_future(outcome)
