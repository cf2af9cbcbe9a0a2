"""Measures how long a rank waits for the gradients of others at the end of its backward passes.

Gradients are reduced while the pass still computes others, which costs nothing. The wait begins when the last bucket is
handed in, and ends when all buckets are reduced. On a GPU, the device waits, so its own clock is used.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_MOST_MARKS = 512
"""How many passes may wait for the device's clock to be read."""


class ReduceWaits:
    """The sum of waits, which DistributedDataParallel's hook reports."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=_MOST_MARKS)

    def add(self, took_s: float) -> None:
        """Add a wait for the last bucket of a pass on a CPU, in seconds."""
        self._sum_s += took_s

    def begin_on_gpu(self) -> Any:
        """Mark that the last bucket of a pass is about to be reduced; return the mark for `take_on_gpu`."""
        return _mark()

    def take_on_gpu(self, since: Any | None) -> None:
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
