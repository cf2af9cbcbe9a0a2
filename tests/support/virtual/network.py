"""Messages between launchers and the service: they take time, get lost, and are cut off with the node.

A real launcher renews a long poll every 20 s, and gives it up 40 s after it was sent. Where polls are held without
limit instead, a cut ends those whose next renewal would have been lost, at the time when the launcher would notice.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.support.virtual.clock import VirtualLoop
from tests.support.virtual.service import ControlPlane

RENEWAL_S, POLL_TIMEOUT_S, TIMEOUT_S = 20.0, 40.0, 5.0
"""Of the launcher: how long the service holds a poll, and how long the launcher waits for polls and other requests."""
KEEPALIVE_S = 2.0
"""How soon the service's kernel finds that a host does not answer."""
LONG_POLLS = frozenset({"join", "watch", "finish", "fail"})

Answer = tuple[int, Mapping[str, Any]] | None
"""An HTTP status and the answer; None: no answer."""


@dataclass(slots=True)
class Weather:
    """The state of the network: delays of messages, and the share that is lost."""

    delay_s: float = 0.002
    late_share: float = 0.0
    late_s: float = 0.0
    lost_share: float = 0.0


@dataclass(eq=False, slots=True)
class Call:
    """A request that is under way. `sent_at` is when it was sent, or last renewed before the node was cut off."""

    node: str
    worker: tuple[str, str]
    verb: str
    sent_at: float
    on_answer: Callable[[Answer], None]
    timeout_s: float
    task: asyncio.Task[tuple[int, str]] | None = None
    timer: asyncio.TimerHandle | None = None
    is_over: bool = False


@dataclass(slots=True)
class Network:
    """`cut` are the nodes from which the service cannot be reached, and since when."""

    loop: VirtualLoop
    dice: random.Random
    plane: ControlPlane
    weather: Weather = field(default_factory=Weather)
    cut: dict[str, float] = field(default_factory=dict)
    calls: dict[str, dict[Call, None]] = field(default_factory=dict)
    renews: bool = False
    """Polls are held for ever, and renewals are computed."""

    def call(
        self, node: str, job: tuple[str, str], verb: str, body: Mapping[str, Any], on_answer: Callable[[Answer], None]
    ) -> Call:
        """Send a request for the job (key, uid) from a node."""
        timeout_s = POLL_TIMEOUT_S if verb in LONG_POLLS else TIMEOUT_S
        call = Call(node, (job[0], str(body.get("uid"))), verb, self.loop.time(), on_answer, timeout_s)
        self.calls.setdefault(node, {})[call] = None
        delay_s = self._delay_s()
        if delay_s > timeout_s:  # the launcher gives up, and the message arrives all the same
            self.loop.after(delay_s, self._arrive_late, job, verb, body)
            call.timer = self.loop.after(timeout_s, self._deliver, call, None)
        else:
            call.timer = self.loop.after(delay_s, self._arrive, call, job, body)
        return call

    def drop(self, call: Call) -> None:
        """The launcher waits for it no longer."""
        call.is_over = True
        if call.timer is not None:
            call.timer.cancel()
        if call.task is not None:
            call.task.cancel()
        self.calls[call.node].pop(call, None)

    def drop_all(self, node: str) -> None:
        """The launcher on that node is gone."""
        for call in list(self.calls.get(node, ())):
            self.drop(call)

    def hang_up(self, node: str) -> None:
        """The launcher on that node ends, and the kernel closes its connections."""
        for call in self.calls.get(node, ()):
            if call.task is not None and call.verb == "watch" and node not in self.cut:
                self.loop.after(self._delay_s(), partial(self.plane.lose_host, *call.worker, hung_up=True))

    def lose_host(self, node: str, *, for_good: bool = False) -> None:
        """A node no longer answers: the service finds out if it holds a poll of it, unless that is over by then."""
        for call in self.calls.get(node, ()):
            if call.task is not None and call.verb in LONG_POLLS:
                self.loop.after(KEEPALIVE_S * (0.5 + self.dice.random() / 2), self._find_lost, call, for_good)

    def _find_lost(self, call: Call, for_good: bool) -> None:
        if for_good or call.node in self.cut:
            self.plane.lose_host(*call.worker)

    def renewed_at(self, call: Call) -> float:
        """When a poll was last sent again."""
        if not self.renews or call.verb not in LONG_POLLS or call.node in self.cut:
            return call.sent_at
        return call.sent_at + RENEWAL_S * math.floor((self.loop.time() - call.sent_at) / RENEWAL_S)

    def cut_off(self, node: str) -> None:
        """Cut a node off from the service."""
        if node in self.cut:
            return
        for call in list(self.calls.get(node, ())):
            call.sent_at = self.renewed_at(call)
            if call.task is not None and self.renews and call.verb in LONG_POLLS:
                self.loop.at(call.sent_at + RENEWAL_S, self._renew, call)
        self.lose_host(node)
        self.cut[node] = self.loop.time()

    def heal(self, node: str) -> None:
        """Connect it again."""
        self.cut.pop(node, None)

    def break_all(self) -> None:
        """The service has died: the operating system closes the connections of all who wait for an answer."""
        for calls in list(self.calls.values()):
            for call in list(calls):
                if call.task is not None and call.node in self.cut:
                    self._lose(call)
                elif call.task is not None:
                    self._end(call, self._delay_s(), None)

    def _delay_s(self) -> float:
        weather = self.weather
        if weather.late_share and self.dice.random() < weather.late_share:
            return self.dice.uniform(0.0, weather.late_s)
        return weather.delay_s * (0.5 + self.dice.random())

    def _is_lost(self, call: Call) -> bool:
        return call.node in self.cut or (self.weather.lost_share > 0 and self.dice.random() < self.weather.lost_share)

    def _arrive_late(self, job: tuple[str, str], verb: str, body: Mapping[str, Any]) -> None:
        if self.plane.is_up:
            self.plane.request(job[0], verb, body, job[1])

    def _arrive(self, call: Call, job: tuple[str, str], body: Mapping[str, Any]) -> None:
        call.timer = None
        if self._is_lost(call):
            self._lose(call)
        elif not self.plane.is_up:
            self._end(call, self._delay_s(), None)
        else:
            call.task = self.plane.request(job[0], call.verb, body, job[1])
            call.task.add_done_callback(lambda task: self._answered(call, task))

    def _answered(self, call: Call, task: asyncio.Task[tuple[int, str]]) -> None:
        if call.is_over or task.cancelled():
            return
        call.task = None
        status, text = task.result()
        if self._is_lost(call):
            self._lose(call)
            return
        self._end(call, self._delay_s(), None if status >= 500 or status == 429 else (status, json.loads(text)))

    def _renew(self, call: Call) -> None:
        if not call.is_over and call.task is not None and call.node in self.cut:
            self._lose(call)

    def _lose(self, call: Call) -> None:
        """A message has been lost: the launcher gives up after its timeout."""
        self._end(call, max(0.0, self.renewed_at(call) + call.timeout_s - self.loop.time()), None)

    def _end(self, call: Call, delay_s: float, answer: Answer) -> None:
        task, call.task = call.task, None
        if task is not None:
            task.cancel()
        call.timer = self.loop.after(delay_s, self._deliver, call, answer)

    def _deliver(self, call: Call, answer: Answer) -> None:
        if call.is_over:
            return
        call.is_over = True
        self.calls[call.node].pop(call, None)
        call.on_answer(answer)
