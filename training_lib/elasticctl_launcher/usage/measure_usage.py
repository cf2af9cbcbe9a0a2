"""Measures every `EVERY_S` seconds what this worker uses of its machine, for the next report to the service.

How its ranks spend their time is computed from the sums that the training library reports with steps.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from elasticctl_launcher.system import start_thread
from elasticctl_launcher.usage.machine import Gpu, Gpus, MachineUse, read_machine
from elasticctl_protocol.reports import GpuUsage, StepShares, StepSums, UsageReport

PARTS = ("data", "all_reduce", "save")
KEEP_S = 120.0
"""How long the last known shares are reported, because a step may take longer than the time between two reports."""
_MOST_RANKS = 4096

Sums = dict[str, float]


class StepTimeShares:
    """Collects reports of ranks with `add`; `shares` returns what is new since its last call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = -1
        self._newest: dict[int, Sums] = {}
        self._before: dict[int, Sums] = {}
        self._shares = StepShares()
        self._known_s = -math.inf

    def add(self, generation: int, rank: int, times: StepSums) -> None:
        """Store the sums of a rank in a generation."""
        known = {part: getattr(times, part) for part in ("wall", *PARTS)}
        sums = {part: float(value) for part, value in known.items() if _is_time(value)}
        if "wall" not in sums:
            return
        with self._lock:
            if generation != self._generation:
                self._generation, self._newest, self._before = generation, {}, {}
            if rank in self._newest or len(self._newest) < _MOST_RANKS:
                self._newest[rank] = sums

    def shares(self) -> StepShares:
        """Return the share of each part (0 to 1) in the time since the last call, over all ranks.

        `compute` is the remainder. Nothing is known if no rank has reported any time for `KEEP_S` seconds.
        """
        with self._lock:
            newest, before = dict(self._newest), self._before
            self._before = newest
        passed = [_difference(sums, before.get(rank, {})) for rank, sums in newest.items()]
        wall_s, now_s = sum(times["wall"] for times in passed), time.monotonic()
        if wall_s > 0:
            names = [name for name in PARTS if all(name in times for times in passed)]
            shares = {name: min(1.0, sum(times[name] for times in passed) / wall_s) for name in names}
            shares["compute"] = max(0.0, 1.0 - sum(shares.values()))
            self._shares = StepShares(**{name: round(share, 4) for name, share in shares.items()})
            self._known_s = now_s
        return self._shares if now_s - self._known_s < KEEP_S else StepShares()


def _difference(now: Sums, before: Sums) -> Sums:
    """The increase of each sum. Sums that have become smaller were restarted from 0."""
    base = before if before.get("wall", 0.0) <= now["wall"] else {}
    return {name: max(0.0, value - base.get(name, 0.0)) for name, value in now.items()}


def _is_time(value: float | None) -> bool:
    return value is not None and 0 <= value < 1e9


EVERY_S, FIRST_S = 10.0, 3.0
IDLE_PERCENT = 5.0
"""A GPU with less utilization than this counts as idle; the driver alone causes none."""


class UsageWatch:
    """Calls `report(usage)` from its own thread until `close`.

    `step_times()` returns how the ranks spent their time since the last call. `alone`: the worker has its own
    container.
    """

    def __init__(
        self, report: Callable[[UsageReport], None], step_times: Callable[[], StepShares], *, alone: bool
    ) -> None:
        self._report, self._step_times, self._alone = report, step_times, alone
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
        before, before_s = self._measure(), time.monotonic()
        while not self._closed.wait(pause_s):
            now, now_s = self._measure(), time.monotonic()
            if before is not None and now is not None:
                self._report(
                    replace(
                        describe_machine(before, now, now_s - before_s),
                        gpus=self.describe_gpus(gpus.read(), now_s),
                        no_gpus=gpus.absent or None,
                        step_times=self._step_times(),
                    )
                )
            before, before_s, pause_s = now, now_s, EVERY_S

    def _measure(self) -> MachineUse | None:
        return read_machine(os.getpid(), alone=self._alone)

    def describe_gpus(self, gpus: Sequence[Gpu], now_s: float) -> GpuUsage | None:
        """Return the use of the GPUs; None if there are none.

        `idle_s` is how many seconds each GPU has been idle, in whole seconds.
        """
        if not gpus:
            return None
        for number, gpu in enumerate(gpus):
            if gpu.percent is None or gpu.percent >= IDLE_PERCENT:
                self._idle_since.pop(number, None)
            else:
                self._idle_since.setdefault(number, now_s)
        return GpuUsage(
            percent=tuple(gpu.percent for gpu in gpus),
            memory_bytes=tuple(gpu.memory_bytes for gpu in gpus),
            memory_total_bytes=tuple(gpu.memory_total_bytes for gpu in gpus),
            power_w=tuple(None if gpu.power_w is None else round(gpu.power_w, 1) for gpu in gpus),
            temperature_c=tuple(gpu.temperature_c for gpu in gpus),
            idle_s=tuple(round(now_s - self._idle_since.get(number, now_s)) for number in range(len(gpus))),
        )


def describe_machine(before: MachineUse, now: MachineUse, took_s: float) -> UsageReport:
    """Return the use of CPUs, memory and network, with rates over the `took_s` seconds between both.

    The CPU time of a process that has ended is no longer counted, so the difference may be negative; it is reported as
    0.
    """

    def rate(earlier: int | None, later: int | None) -> float | None:
        return None if earlier is None or later is None else round(max(0, later - earlier) / took_s)

    return UsageReport(
        cpus_used=round(max(0.0, now.cpu_s - before.cpu_s) / took_s, 2),
        cpus=now.cpus,
        memory_bytes=now.memory_bytes,
        memory_total_bytes=now.memory_total_bytes,
        received_bytes_per_s=rate(before.received_bytes, now.received_bytes),
        sent_bytes_per_s=rate(before.sent_bytes, now.sent_bytes),
    )
