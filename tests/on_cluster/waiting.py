"""Patience with a cluster: its API server shares a machine with all that is waited for, so it is asked less often."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elasticctl.api.errors import BusyError, UnreachableError
from tests.support import waiting

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], timeout_s: float = 480.0, *, every_s: float = 0.1) -> T:
    """See `tests.support.waiting.wait_until`; an API server that does not answer in time is asked again, too."""

    def answered() -> T | None:
        try:
            return condition()
        except (UnreachableError, BusyError) as error:
            print(f"asked again: {error}")
            return None

    found = waiting.wait_until(answered, timeout_s, every_s=every_s)
    assert found is not None
    return found
