"""For how long a rank stands at the end of its backward passes for the gradients of others.

Gradients are reduced while the pass still computes others, which costs nothing. What is counted begins when the last
bucket is handed in, and ends when the last one is there. On a GPU it is the device that waits: its own clock is read.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

_MOST_MARKS = 512
"""Passes of which the device's clock has not been read yet."""


class ReduceWaits:
    """Told by DistributedDataParallel's hook."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=_MOST_MARKS)

    def add(self, took_s: float) -> None:
        """The last bucket of a pass has been waited for, on a CPU."""
        self._sum_s += took_s

    def begin_on_gpu(self) -> Any:
        """The last bucket of a pass is about to be reduced; returns what `take_on_gpu` takes."""
        return _mark()

    def take_on_gpu(self, since: Any | None) -> None:
        """The stream that is the current one goes on once a bucket has been reduced."""
        if since is not None:
            self._marks.append((since, _mark()))

    def total_s(self) -> float:
        """The sum so far, as far as the device has come."""
        while self._marks and self._marks[0][1].query():
            since, until = self._marks.popleft()
            self._sum_s += max(0.0, since.elapsed_time(until)) / 1000
        return self._sum_s


def _mark() -> Any:
    """This moment of the current stream, as a `torch.cuda.Event`, which has no annotations."""
    module: Any = torch.cuda
    mark = module.Event(enable_timing=True)
    mark.record()
    return mark
