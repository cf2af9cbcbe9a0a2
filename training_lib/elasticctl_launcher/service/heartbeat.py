"""Reports to the rendezvous service what this launcher is doing, which also proves that it is alive.

An outstanding long poll proves it too, and reports at its beginning what the launcher is doing. A thread sends a
heartbeat while there is no long poll (the launcher unpacks the workspace, starts ranks, waits for them to stop), and
whenever the launcher starts to do something that no long poll has reported yet. No other thread waits for a heartbeat.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from elasticctl_launcher.service.client import POLL_TIMEOUT_S, ServiceClient, ServiceError
from elasticctl_launcher.system import start_thread
from elasticctl_protocol.requests import WIRE, Doing, Heartbeat, Polled

BEAT_S = 3.0
SETTLE_S = 0.05
"""States that last no longer than this are not reported: a long poll may follow soon and report the next state."""
BEAT_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


class HeartbeatSender:
    """Reports what the worker `uid` is doing, from its own thread between `start` and `close`."""

    def __init__(self, client: ServiceClient, uid: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.client, self._uid, self._clock = client, uid, clock
        self._changed = threading.Condition()
        self._doing, self._since, self._generation = Doing.PREPARING, clock(), 0
        self._reported: Doing | None = None
        self._polls = 0
        self._closed = False

    def start(self) -> None:
        """Start to send; the first heartbeat reports PREPARING."""
        start_thread(self._run, name="heartbeat")

    def close(self) -> None:
        """Stop sending; return immediately."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def doing(self) -> Doing:
        """What the launcher is doing."""
        return self._doing

    def say(self, doing: Doing, generation: int) -> None:
        """Record what the launcher is doing, and its newest generation; return immediately."""
        with self._changed:
            self._generation = generation
            if doing is self._doing:
                return
            self._doing, self._since = doing, self._clock()
            self._changed.notify_all()

    def poll(self, request: Polled) -> Mapping[str, Any]:
        """Make one long poll that also reports what the launcher is doing. Raises ServiceAway or ServiceRefused."""
        with self._polling():
            doing, since_s = self._describe()
            body = WIRE.encode(replace(request, doing=doing, since_s=since_s))
            return self.client.call(request.verb, body, POLL_TIMEOUT_S)

    def beat(self) -> None:
        """Send one heartbeat; ignore a service that is away or older than heartbeats."""
        with self._changed:
            generation = self._generation
        doing, since_s = self._describe()
        request = Heartbeat(uid=self._uid, generation=generation, doing=doing, since_s=since_s)
        try:
            self.client.call(request.verb, WIRE.encode(request), BEAT_TIMEOUT_S)
        except ServiceError as error:
            log.debug("heartbeat: %s", error)

    def is_due(self, idle_s: float) -> bool:
        """True if a heartbeat has to be sent, `idle_s` seconds after the last one."""
        with self._changed:
            return self._reported is not self._doing or (not self._polls and idle_s >= BEAT_S)

    @contextmanager
    def _polling(self) -> Iterator[None]:
        with self._changed:
            self._polls += 1
        try:
            yield
        finally:
            with self._changed:
                self._polls -= 1
                self._changed.notify_all()

    def _describe(self) -> tuple[Doing, float]:
        """What the launcher is doing and for how many seconds, for a request that is about to be sent."""
        with self._changed:
            self._reported = self._doing
            return self._doing, round(self._clock() - self._since, 3)

    def _run(self) -> None:
        beaten = -BEAT_S
        while not self._closed:
            if self.is_due(time.monotonic() - beaten):
                beaten = time.monotonic()
                self.beat()
            with self._changed:
                if self._reported is self._doing and not self._closed:
                    self._changed.wait(BEAT_S)
            time.sleep(SETTLE_S)
