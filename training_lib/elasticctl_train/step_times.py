"""Where the time of training goes on this rank: fetching data, standing for gradients of others, saving; the rest is
computing, evaluation and whatever else the script does.

It is summed up between two reads of a clock, and told as sums that only grow: whoever is told takes the difference, so
that a report which is lost loses nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TELL_EVERY_S = 0.5


class StepTimes:
    """Sums since the first step of this group. `data_s` is what fetching batches took; None where nobody tells.

    `all_reduce_s()` is for how long the gradients of other ranks were waited for since some moment; None: not known.
    """

    def __init__(self) -> None:
        self.data_s: float | None = None
        self.save_s = 0.0
        self.all_reduce_s: Callable[[], float | None] = lambda: None
        self._since: tuple[float, float | None, float | None, float] | None = None
        self._told_s = 0.0

    def restart(self) -> None:
        """Another group makes the next step."""
        self._since = None

    def add_data(self, took_s: float) -> None:
        """A batch has been fetched."""
        self.data_s = (self.data_s or 0.0) + took_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Training stands still for a save."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.save_s += time.monotonic() - began_s

    def told(self, now_s: float) -> dict[str, float] | None:
        """The sums, to be sent with a step that has just been made; None if it is not time."""
        if self._since is None:
            self._since = now_s, self.data_s, self.all_reduce_s(), self.save_s
            return None
        if now_s - self._told_s < TELL_EVERY_S:
            return None
        self._told_s = now_s
        names = ("wall", "data", "all_reduce", "save")
        pairs = zip(names, (now_s, self.data_s, self.all_reduce_s(), self.save_s), self._since, strict=True)
        return {name: round(value - (since or 0.0), 4) for name, value, since in pairs if value is not None}
