"""Looks, beside training, whether a newer run has taken the storage over: between two saves nobody else would notice.

A zombie, a group that was cut off and replaced, may have minutes to its next save. Two small requests a minute tell it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from elasticctl_store.errors import FencedError, StorageError

LOOK_EVERY_S = 30.0


class FenceWatch:
    """Looks for as long as it lives; `found` is the error that has been seen."""

    def __init__(self, look: Callable[[], None]) -> None:
        """`look` raises FencedError once there is a newer run; it may take as long as the storage is away."""
        self._found: list[FencedError] = []
        over = threading.Event()
        arguments = look, self._found, over
        threading.Thread(target=_watch, args=arguments, name="elasticctl-fence", daemon=True).start()
        weakref.finalize(self, over.set)  # the thread holds no reference to this object, and ends with it

    @property
    def found(self) -> FencedError | None:
        """Why this run is over; None: it is not."""
        return self._found[0] if self._found else None


def _watch(look: Callable[[], None], found: list[FencedError], over: threading.Event) -> None:
    while not over.wait(LOOK_EVERY_S):
        try:
            look()
        except FencedError as e:
            found.append(e)
            return
        except StorageError:  # whoever saves will say so
            continue
