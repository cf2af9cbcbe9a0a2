"""How many processors this process may use."""

from __future__ import annotations

import os


def available() -> int:
    """Those it is bound to, where the system knows such a thing (Linux), else all; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
