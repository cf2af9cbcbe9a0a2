"""What the kernel reports about a rank and its descendants, to find out whether they are working."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
IO_COUNTERS = ("rchar", "wchar", "read_bytes", "write_bytes")
"""Bytes read and written with system calls, and from and to disks. The first two do not count what `recv` receives."""
MAX_PROCESSES = 512
"""Further processes of a rank are ignored."""


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """The total CPU time and I/O of a rank's process and its descendants, and whether one of them is running now.

    `wakeups` is how often the main thread of the rank itself has gone to sleep.
    """

    cpu_s: float
    io_bytes: int
    wakeups: int
    running: bool


def read_activity(pid: int) -> ProcessActivity | None:
    """Inspect the process `pid`; return None if it is gone, or where there is no /proc."""
    cpu_s, io_bytes, running, wakeups = 0.0, 0, False, _wakeups(pid)
    if wakeups is None:
        return None
    for member in family(pid):
        stat = _read(f"/proc/{member}/stat").rpartition(")")[2].split()
        if len(stat) > 14:
            # utime, stime, and the same of the children that it has waited for: proc_pid_stat(5)
            cpu_s += sum(map(int, stat[11:15])) / TICKS_PER_S
            running |= stat[0] == "R"
        counters = dict(line.split(": ") for line in _read(f"/proc/{member}/io").splitlines())
        io_bytes += sum(int(counters.get(name, 0)) for name in IO_COUNTERS)
    return ProcessActivity(cpu_s, io_bytes, wakeups, running)


def family(pid: int) -> Iterator[int]:
    """Yield `pid` and its descendants, parents first."""
    waiting, count = deque([pid]), 0
    while waiting and count < MAX_PROCESSES:
        count += 1
        member = waiting.popleft()
        yield member
        try:
            threads = os.listdir(f"/proc/{member}/task")
        except OSError:
            continue
        for thread in threads:
            waiting.extend(map(int, _read(f"/proc/{member}/task/{thread}/children").split()))


def _wakeups(pid: int) -> int | None:
    for line in _read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(":")
        if name == "voluntary_ctxt_switches":
            return int(value)
    return None


def _read(path: str) -> str:
    """The file's text; empty if it cannot be read, for example because the process has ended."""
    try:
        return Path(path).read_text("utf-8", "replace")
    except OSError:
        return ""
