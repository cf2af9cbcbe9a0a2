"""Patience with a cluster: its API server shares a machine with all that is waited for, so it is asked less often."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tests.support import waiting

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout_s: float = 20.0, *, every_s: float = 0.1) -> T:
    """See `tests.support.waiting.wait_until`."""
    return waiting.wait_until(condition, timeout_s, every_s=every_s)
