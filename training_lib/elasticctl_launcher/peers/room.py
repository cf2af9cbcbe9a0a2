"""How much memory there is for copies: what the host, this worker's own limit and its shared memory all allow."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

MARGIN_BYTES = 256 << 20
"""What is left to others."""
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def why_no_room(folder: Path, size_bytes: int) -> str:
    """Why so much more does not fit in `folder`, which is in shared memory; empty if it does."""
    left = min(_left_bytes(folder))
    if size_bytes + MARGIN_BYTES <= left:
        return ""
    return f"{size_bytes >> 20} MB do not fit in the host's memory: {max(0, left - MARGIN_BYTES) >> 20} MB are left"


def _left_bytes(folder: Path) -> list[int]:
    found = os.statvfs(folder)
    left = [found.f_bavail * found.f_frsize]
    with suppress(OSError):
        told = re.search(r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
        left += [int(told[1]) << 10] if told else []
    with suppress(OSError, ValueError):  # no limit is the word "max"
        left.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return left
