"""Patience for tests: wait on a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = 240.0, *, every_s: float = 0.02) -> T:
    """Return the first true value of `condition()`, asked `every_s`; fails with the last value after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s:.0f} s; last: {value!r}")
        time.sleep(every_s)
