"""The training groups of all jobs under one lock, the long polls that wait for them, and their timers.

Everything that may change a group ends with `apply_due`, which wakes the group's polls if its state has changed, and
sets one timer for its next deadline.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.rendezvous.fair_scheduling import Turns
from elasticctl_controller.rendezvous.requests import Caller, Refused

POLL_S = 20.0
SHORTEST_WAIT_S = 0.01
"""Timers may fire a little early: a group that is asked too soon would be asked again and again."""

T = TypeVar("T")


class Groups:
    """All groups. `by_key` are the groups by job key; `restarted` are the keys of the groups that the service had when
    it last started over (`RendezvousService.start_over`). The lock guards both. `polls` are those under way, by key.

    `report_change(key)` is called on the event loop's thread when a job's view has changed in a way that its status
    should show. `clock` returns seconds since the epoch.
    """

    def __init__(self, report_change: Callable[[str], None], clock: Callable[[], float]) -> None:
        self.report_change, self.clock = report_change, clock
        self.lock = threading.Lock()
        self.by_key: dict[str, Group] = {}
        self.restarted: set[str] = set()
        self.polls: dict[str, dict[asyncio.Future[None], None]] = {}
        self.turns = Turns()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Run on the event loop of the caller."""
        self._loop = asyncio.get_running_loop()

    def of(self, caller: Caller) -> Group:
        """The caller's group. Raises Refused if the job has been deleted since the call, even if its name exists
        again."""
        group = self.by_key.get(caller.key)
        if group is None and caller.key in self.restarted:
            raise Refused(503, f"job {caller.key} has not been reconciled yet")
        if group is None or group.job_uid != caller.job_uid:
            raise Refused(410, f"no running job {caller.key}")
        return group

    def wake(self, key: str) -> None:
        """Apply what is due in a group that another thread has changed."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.apply_due, key, True)

    def apply_due(self, key: str, moved: bool = False) -> None:
        """Let a group do what is due, wake its polls if its state has changed, and set a timer for its next
        deadline."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        with self.lock:
            group = self.by_key.get(key)
            before, silent = (group.situation, len(group.signs.silent)) if group else (None, 0)
            wait_s = group.act_if_due(self.clock()) if group else None
            is_news = group is not None and len(group.signs.silent) > silent
        if is_news:
            self.report_change(key)
        if moved or (group is not None and group.situation is not before):
            for poll in self.polls.pop(key, ()):
                self.turns.queue(key, partial(_wake, poll))
            if group is None:
                self.turns.drop_job(key)
        if wait_s is not None and self._loop is not None:
            self._timers[key] = self._loop.call_later(max(wait_s, SHORTEST_WAIT_S), self.apply_due, key)

    @contextmanager
    def changing(self, caller: Caller) -> Iterator[tuple[Group, float]]:
        """Yield a group and the time, to change the group; what follows from the change is done afterwards."""
        with self.turns.measure(caller.key):
            with self.lock:
                group = self.of(caller)
                before = group.situation
                try:
                    yield group, self.clock()
                finally:
                    moved = group.situation is not before
            self.apply_due(caller.key, moved)

    async def poll(self, caller: Caller, ready: Callable[[Group], T | None], within_s: float | None = None) -> T | None:
        """Wait at most `within_s` seconds, by default and at most `POLL_S`, until `ready` has an answer."""
        deadline = time.monotonic() + (POLL_S if within_s is None else min(within_s, POLL_S))
        while True:
            with self.lock:
                answer = ready(self.of(caller))
            left_s = deadline - time.monotonic()
            if answer is not None or left_s <= 0:
                return answer
            waiting = self.polls.setdefault(caller.key, {})
            poll = asyncio.get_running_loop().create_future()
            waiting[poll] = None
            try:
                await asyncio.wait_for(poll, left_s)
            except TimeoutError:
                continue
            finally:
                waiting.pop(poll, None)


def _wake(poll: asyncio.Future[None]) -> None:
    if not poll.done():
        poll.set_result(None)
