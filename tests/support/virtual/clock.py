"""Virtual time: an asyncio event loop that never waits, but jumps to the time of its next timer.

Everything in a scenario runs on it, the real rendezvous service too, so a run is the same each time.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any

TICK_S = 1e-6
EPOCH = 1_700_000_000.0
"""The true time when a scenario begins, in seconds since the epoch."""


class _Waiting:
    """Stands in for the selector: there are no sockets, so time passes immediately."""

    def __init__(self) -> None:
        self.now = 0.0

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("nothing will ever happen again")
        self.now += max(0.0, timeout)
        return []

    def close(self) -> None:
        """Nothing is open."""


class VirtualLoop(asyncio.BaseEventLoop):
    """`time()` is in seconds since the scenario began; `events` counts what has happened."""

    def __init__(self) -> None:
        super().__init__()
        self._selector = self._waiting = _Waiting()
        self._clock_resolution = 1e-9
        self.events = 0
        self.errors: list[BaseException] = []
        self.set_exception_handler(self._note_error)

    def time(self) -> float:
        """Seconds since the scenario began."""
        return self._waiting.now

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, **context: Any) -> asyncio.TimerHandle:
        """As asyncio's, but even the shortest delay takes time, so that a repeated wait makes progress."""
        return super().call_later(max(delay, TICK_S) if delay > 0 else delay, callback, *args, **context)

    def at(self, when: float, call: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Do that at a time; a past one means now."""
        self.events += 1
        return self.call_at(max(when, self.time()), call, *args, context=_CONTEXT)

    def after(self, delay_s: float, call: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        """Do that after so many seconds."""
        return self.at(self.time() + delay_s, call, *args)

    def run_until(self, when: float) -> None:
        """Let time pass until then, or until `stop`; raises the first error of a call."""
        ending = self.at(when, self.stop)
        self.run_forever()
        ending.cancel()
        if self.errors:
            raise self.errors[0]

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Call it immediately, in this thread: while another thread worked, hours of virtual time could pass."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)
        return future

    def finish(self) -> None:
        """Let cancelled tasks end, and close the loop."""
        self.call_soon(self.call_soon, self.stop)
        self.run_forever()
        self.close()

    def _note_error(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None:
            self.errors.append(error)
            self.stop()

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no sockets."""

    def _write_to_self(self) -> None:
        """There is only one thread, so nothing has to be woken."""


_CONTEXT = contextvars.Context()


class WallClock:
    """The clock of one machine in seconds since the epoch: true time, but for `offset_s`."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.offset_s = 0.0

    def __call__(self) -> float:
        return EPOCH + self._loop.time() + self.offset_s


class VirtualTime:
    """Stands in for the module `time` where the service asks it."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.monotonic = loop.time

    def time(self) -> float:
        """True time."""
        return EPOCH + self.monotonic()
