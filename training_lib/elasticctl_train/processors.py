"""How many processors this process may use, and its part of them beside the other ranks."""

from __future__ import annotations

import os


def available() -> int:
    """Those it is bound to, where the system knows such a thing (Linux), else all; at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def per_rank() -> int:
    """This rank's part of them, where the worker's ranks share them evenly; at least 1."""
    ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))
    return max(1, available() // ranks)
