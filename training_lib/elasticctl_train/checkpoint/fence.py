"""Check, beside training, whether a newer run has taken over the storage: between two saves nobody else would notice.

A zombie, a group that was cut off and replaced, may have minutes until its next save. Two small requests per minute
tell it that it is over.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from elasticctl_store.errors import FencedError, StorageError

LOOK_EVERY_S = 30.0


class FenceWatch:
    """Checks for as long as it exists; `found` is the error once there is one."""

    def __init__(self, look: Callable[[], None]) -> None:
        """`look` raises FencedError once there is a newer run. It may block while the storage is unavailable."""
        self._found: list[FencedError] = []
        over = threading.Event()
        arguments = look, self._found, over
        threading.Thread(target=_watch, args=arguments, name="elasticctl-fence", daemon=True).start()
        weakref.finalize(self, over.set)  # the thread does not reference this object, and ends with it

    @property
    def found(self) -> FencedError | None:
        """Why this run is over; None if it is not."""
        return self._found[0] if self._found else None


def _watch(look: Callable[[], None], found: list[FencedError], over: threading.Event) -> None:
    while not over.wait(LOOK_EVERY_S):
        try:
            look()
        except FencedError as e:
            found.append(e)
            return
        except StorageError:  # the next save reports it
            continue
