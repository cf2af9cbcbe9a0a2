"""Where this rank's training time goes: fetching data, waiting for others' gradients, saving. The rest is computation,
evaluation and whatever else the script does.

Times are summed up, and reported as sums that only grow. The receiver takes differences, so a lost report loses
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TELL_EVERY_S = 0.5


class StepTimes:
    """Sums in seconds since the first step of this group. `data_s` is the time spent fetching batches; None if unknown.

    `all_reduce_s()` is how long this rank has waited for the gradients of others; None if unknown.
    """

    def __init__(self) -> None:
        self.data_s: float | None = None
        self.save_s = 0.0
        self.all_reduce_s: Callable[[], float | None] = lambda: None
        self._since: tuple[float, float | None, float | None, float] | None = None
        self._told_s = 0.0

    def restart(self) -> None:
        """Start again: another group makes the next step."""
        self._since = None

    def add_data(self, took_s: float) -> None:
        """Record that fetching a batch took `took_s` seconds."""
        self.data_s = (self.data_s or 0.0) + took_s

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Record the time spent inside, during which training is stopped for a save."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.save_s += time.monotonic() - began_s

    def told(self, now_s: float) -> dict[str, float] | None:
        """Return the sums to report with the step that has just been made; None if it is too early."""
        if self._since is None:
            self._since = now_s, self.data_s, self.all_reduce_s(), self.save_s
            return None
        if now_s - self._told_s < TELL_EVERY_S:
            return None
        self._told_s = now_s
        names = ("wall", "data", "all_reduce", "save")
        pairs = zip(names, (now_s, self.data_s, self.all_reduce_s(), self.save_s), self._since, strict=True)
        return {name: round(value - (since or 0.0), 4) for name, value, since in pairs if value is not None}
