"""How many processors this process may use."""

from __future__ import annotations

import os
import sys


def available() -> int:
    """Those it is bound to, where the system knows such a thing (Linux), else all; at least 1."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
