"""Which tests come first, and in how many processes they run.

Long tests mostly wait for processes that they have started, so there are more workers than processors. The
last test to begin must not be a long one: those that are given more time than others come first, dealt out among the
workers, then what starts processes, then the rest. pytest-xdist hands each worker its share of the list in order, and
a worker that is done takes over tests from the end of another's list.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from tests.support.selection import only_quick

WAITING = 2
"""How many workers there are beyond the processors, where tests wait. With more, what they start is so slow that tests
which measure time fail."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """What `-n auto` and `-n logical` come to."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return processors + (0 if only_quick(config) else WAITING)


@pytest.hookimpl(trylast=True)  # when tests/support/slow.py has set its marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
    if workers:
        items[:] = dealt(items, [_patience_s(item) for item in items], workers)


def dealt(items: Sequence[pytest.Item], patience_s: Sequence[float], workers: int) -> list[pytest.Item]:
    """The items in shares of about the same length, one for each worker, each with its part of the long ones first."""
    ordered = [item for _, item in sorted(zip(patience_s, items, strict=True), key=lambda pair: -pair[0])]
    count = sum(patience > 0 for patience in patience_s)
    long, rest = ordered[:count], ordered[count:]
    rest.sort(key=lambda item: item.get_closest_marker("slow") is None)
    size = -(-len(items) // workers)
    found: list[pytest.Item] = []
    for worker in range(workers):
        own = long[worker::workers]
        found += own
        found += rest[: max(0, size - len(own))]
        del rest[: max(0, size - len(own))]
    return found


def _patience_s(item: pytest.Item) -> float:
    """The time limit of a test that has one of its own; 0 for the others."""
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else 0.0
