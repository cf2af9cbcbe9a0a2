"""Measures every `EVERY_S` seconds what this worker uses of its machine, for the next report to the service."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticctl_launcher.system import start_thread
from elasticctl_launcher.usage.gpus import Gpu, Gpus
from elasticctl_launcher.usage.machine import Machine, read_machine

EVERY_S, FIRST_S = 10.0, 3.0
IDLE_PERCENT = 5.0
"""A GPU with less utilization than this counts as idle; the driver alone causes none."""


class UsageWatch:
    """Calls `tell(message)` from its own thread until `close`.

    `step_times()` returns how the ranks spent their time since the last call. `alone`: the worker has its own
    container.
    """

    def __init__(
        self, tell: Callable[[dict[str, Any]], None], step_times: Callable[[], Mapping[str, float]], *, alone: bool
    ) -> None:
        self._tell, self._step_times, self._alone = tell, step_times, alone
        self._closed = threading.Event()
        self._idle_since: dict[int, float] = {}

    def start(self) -> None:
        """Start to measure."""
        start_thread(self._run, name="usage")

    def close(self) -> None:
        """Stop; returns at once."""
        self._closed.set()

    def _run(self) -> None:
        gpus, pause_s = Gpus(), FIRST_S
        before, before_s = self._look(), time.monotonic()
        while not self._closed.wait(pause_s):
            now, now_s = self._look(), time.monotonic()
            if before is not None and now is not None:
                used = {**describe_machine(before, now, now_s - before_s), **self.describe_gpus(gpus.read(), now_s)}
                no_gpus = {"no_gpus": gpus.absent} if gpus.absent else {}
                self._tell({**used, **no_gpus, "step_times": dict(self._step_times())})
            before, before_s, pause_s = now, now_s, EVERY_S

    def _look(self) -> Machine | None:
        return read_machine(os.getpid(), alone=self._alone)

    def describe_gpus(self, gpus: Sequence[Gpu], now_s: float) -> dict[str, Any]:
        """Return the part of a message about GPUs, as columns; empty if there are none.

        `idle_s` is how many seconds each GPU has been idle, in whole seconds.
        """
        if not gpus:
            return {}
        for number, gpu in enumerate(gpus):
            if gpu.percent is None or gpu.percent >= IDLE_PERCENT:
                self._idle_since.pop(number, None)
            else:
                self._idle_since.setdefault(number, now_s)
        idle = [now_s - self._idle_since.get(number, now_s) for number in range(len(gpus))]
        return {
            "gpus": {
                "percent": [gpu.percent for gpu in gpus],
                "memory_bytes": [gpu.memory_bytes for gpu in gpus],
                "memory_total_bytes": [gpu.memory_total_bytes for gpu in gpus],
                "power_w": [None if gpu.power_w is None else round(gpu.power_w, 1) for gpu in gpus],
                "temperature_c": [gpu.temperature_c for gpu in gpus],
                "idle_s": [round(idle_s) for idle_s in idle],
            }
        }


def describe_machine(before: Machine, now: Machine, took_s: float) -> dict[str, Any]:
    """Return the part of a message about CPUs, memory and network, with rates over the `took_s` seconds between both.

    The CPU time of a process that has ended is no longer counted, so the difference may be negative; it is reported as
    0.
    """

    def rate(earlier: int | None, later: int | None) -> float | None:
        return None if earlier is None or later is None else round(max(0, later - earlier) / took_s)

    found = {
        "cpus_used": round(max(0.0, now.cpu_s - before.cpu_s) / took_s, 2),
        "cpus": now.cpus,
        "memory_bytes": now.memory_bytes,
        "memory_total_bytes": now.memory_total_bytes,
        "received_bytes_per_s": rate(before.received_bytes, now.received_bytes),
        "sent_bytes_per_s": rate(before.sent_bytes, now.sent_bytes),
    }
    return {name: value for name, value in found.items() if value is not None}
