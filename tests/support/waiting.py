"""Patience for tests: wait on a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
SHARE, SELDOM_S = 0.05, 0.1
"""Who has waited for long is asked less often, for it costs processor time of all that is waited for: after a pause of
this share of the time so far, but after so long at the latest."""


def wait_until(condition: Callable[[], T], timeout_s: float = 240.0, *, every_s: float = 0.02) -> T:
    """Return the first true value of `condition()`, asked `every_s` at first; fails with the last after `timeout_s`."""
    began = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        waited_s = time.monotonic() - began
        if waited_s > timeout_s:
            raise AssertionError(f"not within {timeout_s:.0f} s; last: {value!r}")
        time.sleep(max(every_s, min(SELDOM_S, waited_s * SHARE)))
