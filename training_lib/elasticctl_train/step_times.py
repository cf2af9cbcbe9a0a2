"""Where this rank's training time goes: fetching data, waiting for others' gradients, saving. The rest is computation,
evaluation and everything else that the script does.

Times are summed up, and reported as sums that only grow. The receiver takes differences, so a lost report loses
nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from elasticctl_protocol.reports import StepSums

REPORT_EVERY_S = 0.5
_MOST_MARKS = 512
"""How many passes may wait for the device's clock to be read."""


class TimeSums:
    """Sums in seconds since the first step of this group.

    `data_s` is the time spent fetching batches; None if unknown.
    """

    def __init__(self, all_reduce_s: Callable[[], float | None] = lambda: None) -> None:
        """`all_reduce_s()` is how long this rank has waited for the gradients of others; None if unknown."""
        self.data_s: float | None = None
        self.save_s = 0.0
        self._all_reduce_s = all_reduce_s
        self._since: tuple[float, float | None, float | None, float] | None = None
        self._reported_s = 0.0

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

    def due_report(self, now_s: float) -> StepSums | None:
        """Return the sums to report with the step that has just been made; None if it is too early."""
        if self._since is None:
            self._since = now_s, self.data_s, self._all_reduce_s(), self.save_s
            return None
        if now_s - self._reported_s < REPORT_EVERY_S:
            return None
        self._reported_s = now_s
        pairs = zip((now_s, self.data_s, self._all_reduce_s(), self.save_s), self._since, strict=True)
        return StepSums(*(None if value is None else round(value - (since or 0.0), 4) for value, since in pairs))


class ReduceWaits:
    """How long this rank waits for the gradients of others at the end of its backward passes, in all.

    Gradients are reduced while the pass still computes others, which costs nothing. The wait begins when the last
    bucket is handed in, and ends when all buckets are reduced. On a GPU, the device waits, so its own clock is used.
    """

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=_MOST_MARKS)

    def add(self, took_s: float) -> None:
        """Add a wait for the last bucket of a pass on a CPU, in seconds."""
        self._sum_s += took_s

    def begin_on_gpu(self) -> Any:
        """Mark that the last bucket of a pass is about to be reduced; return it for `end_on_gpu`."""
        return _mark()

    def end_on_gpu(self, since: Any | None) -> None:
        """Record the end of a wait: the current stream continues once the bucket has been reduced."""
        if since is not None:
            self._marks.append((since, _mark()))

    def total_s(self) -> float:
        """Return the sum in seconds, as far as the device has progressed."""
        while self._marks and self._marks[0][1].query():
            since, until = self._marks.popleft()
            self._sum_s += max(0.0, since.elapsed_time(until)) / 1000
        return self._sum_s


def _mark() -> Any:
    """This moment in the current stream, as a `torch.cuda.Event`, which has no annotations."""
    module: Any = torch.cuda
    mark = module.Event(enable_timing=True)
    mark.record()
    return mark
