"""What this worker uses of its machine while it trains: CPUs, memory, network and GPUs, and how its ranks spend time.

`UsageWatch` measures every `EVERY_S` seconds, for the next report to the service. The figures come from /proc, the
worker's control group and NVIDIA's management library (NVML); the shares of the ranks' time from the sums that the
training library reports with steps.

In a container of its own, a worker's memory is what its control group counts (the kernel kills it for that), and its
network interfaces are its own. On a shared machine, memory is that of the worker's processes, and its network traffic
is unknown.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from elasticctl_launcher.hangs.process_activity import family, read_activity
from elasticctl_launcher.system import start_thread
from elasticctl_protocol.reports import GpuUsage, StepShares, StepSums, UsageReport
from elasticctl_store import parallel
from elasticctl_store.parallel import CGROUP

PROC = Path("/proc")
UNLIMITED = 1 << 60
"""A control group of version 1 reports a number of this size if there is no limit."""


@dataclass(frozen=True, slots=True)
class MachineUse:
    """Counters and levels at one moment. `cpu_s` and the network's byte counters only grow.

    `cpus` and `memory_total_bytes` are what is available to this worker. A value is None if the system does not report
    it.
    """

    cpu_s: float
    cpus: float
    memory_bytes: int
    memory_total_bytes: int | None
    received_bytes: int | None = None
    sent_bytes: int | None = None


def read_machine(pid: int, *, alone: bool, cgroup: Path = CGROUP, proc: Path = PROC) -> MachineUse | None:
    """Measure the process `pid` and its descendants; return None where there is no /proc.

    `alone`: no other processes run in their container.
    """
    activity = read_activity(pid)
    if activity is None:
        return None
    used, limit = _group_memory(cgroup) if alone else (None, None)
    received, sent = _traffic(proc / "net/dev") if alone else (None, None)
    return MachineUse(
        cpu_s=activity.cpu_s,
        cpus=_cpus(cgroup if alone else None),
        memory_bytes=sum(_private_memory(proc, member) for member in family(pid)) if used is None else used,
        memory_total_bytes=limit or _memory_of_machine(proc),
        received_bytes=received,
        sent_bytes=sent,
    )


def _group_memory(cgroup: Path) -> tuple[int | None, int | None]:
    """(used bytes without reclaimable cache, limit in bytes) of the container's control group, version 2 or 1."""
    for used, limit, folder in (
        ("memory.current", "memory.max", cgroup),
        ("memory.usage_in_bytes", "memory.limit_in_bytes", cgroup / "memory"),
    ):
        whole = _number(folder / used)
        if whole is not None:
            cache = _named(folder / "memory.stat", "inactive_file", "total_inactive_file")
            most = _number(folder / limit)
            return max(0, whole - cache), most if most is not None and most < UNLIMITED else None
    return None, None


def _private_memory(proc: Path, pid: int) -> int:
    """The memory that only this process holds, in bytes; mapped files are cache that all ranks share."""
    return _named(proc / str(pid) / "status", "RssAnon", "RssShmem", add=True) * 1024


def _memory_of_machine(proc: Path) -> int | None:
    return _named(proc / "meminfo", "MemTotal") * 1024 or None


def _cpus(cgroup: Path | None) -> float:
    """The number of CPUs that this process may use."""
    count = float(parallel.bound())
    return count if cgroup is None else min(count, parallel.quota(cgroup))


def _traffic(table: Path) -> tuple[int | None, int | None]:
    """(received, sent) bytes over all interfaces except loopback."""
    rows = [line.partition(":") for line in _read(table).splitlines()[2:]]
    counters = [values.split() for name, _, values in rows if name.strip() != "lo"]
    counted = [(int(row[0]), int(row[8])) for row in counters if len(row) > 8]
    if not counted:
        return None, None
    return sum(row[0] for row in counted), sum(row[1] for row in counted)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None


def _named(path: Path, *names: str, add: bool = False) -> int:
    """The value of the last of `names` in the file, or with `add` the sum of all; 0 if the file has none of them."""
    found = dict(_pairs(path))
    values = [found[name] for name in names if name in found]
    return sum(values) if add else (values[-1] if values else 0)


def _pairs(path: Path) -> Iterator[tuple[str, int]]:
    for line in _read(path).splitlines():
        pair = re.match(r"(\w+):?\s+(\d+)", line)
        if pair:
            yield pair[1], int(pair[2])


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


MOST_GPUS = 32


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU at one moment. A value is None if the GPU does not report it (a MIG slice reports no utilization)."""

    percent: float | None
    memory_bytes: int | None
    memory_total_bytes: int | None
    power_w: float | None
    temperature_c: float | None


class Gpus:
    """The GPUs that this worker may use. `absent` says why there are none; it is empty if there are some."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        self.absent = ""
        self._handles: Sequence[Any] = ()
        self._nvml: ModuleType | None = None
        try:
            import pynvml
        except ImportError:
            self.absent = "nvidia-ml-py is not installed with the workers, so GPUs are not measured"
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handles = _visible(pynvml, environ.get("CUDA_VISIBLE_DEVICES"))[:MOST_GPUS]
        except pynvml.NVMLError as error:
            self.absent = f"NVML: {error}"
            return
        if not self._handles:
            self.absent = "no GPU is visible"

    def read(self) -> list[Gpu]:
        """Measure all of them."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: Any) -> Gpu:
        nvml: Any = self._nvml

        def ask(question: Callable[[], Any]) -> Any:
            try:
                return question()
            except nvml.NVMLError:
                return None

        memory = ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        power_mw = ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        return Gpu(
            percent=ask(lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)),
            memory_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            power_w=None if power_mw is None else power_mw / 1000,
            temperature_c=ask(lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))),
        )


def _visible(nvml: ModuleType, chosen: str | None) -> list[Any]:
    """The devices in CUDA_VISIBLE_DEVICES, up to the first invalid entry; all devices if it is not set.

    Entries are numbers or UUIDs. A container shows only its own devices to NVML.
    """
    if chosen is None:
        return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    found = []
    for word in filter(None, (word.strip() for word in chosen.split(","))):
        try:
            by_number = word.isdecimal()
            found.append(
                nvml.nvmlDeviceGetHandleByIndex(int(word)) if by_number else nvml.nvmlDeviceGetHandleByUUID(word)
            )
        except nvml.NVMLError:
            break
    return found


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
        """Stop; returns immediately."""
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
