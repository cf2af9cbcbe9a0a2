"""CPUs, memory, network and GPUs of this worker, from /proc, its control group and NVIDIA's management library (NVML).

In a container of its own, a worker's memory is what its control group counts (the kernel kills it for that), and its
network interfaces are its own. On a shared machine, memory is that of the worker's processes, and its network traffic
is unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from elasticctl_launcher.hangs.process_activity import family, read_activity
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
