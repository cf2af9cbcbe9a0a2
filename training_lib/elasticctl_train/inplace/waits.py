"""For how long a rank stands at the end of its backward passes for the gradients of others.

Gradients are reduced while the pass still computes others, which costs nothing. What is counted begins when the last
bucket is handed in, and ends when the last one is there. On a GPU it is the device that waits: its own clock is read.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import torch

_MOST_MARKS = 512
"""Passes of which the device's clock has not been read yet."""


class ReduceWaits:
    """Told of each bucket by DistributedDataParallel's hook, and by whatever thread completes it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum_s = 0.0
        self._since_s: float | None = None
        self._marks: deque[tuple[Any, Any]] = deque(maxlen=_MOST_MARKS)

    def hand_in(self, *, is_first: bool, is_last: bool, on_gpu: bool) -> Any | None:
        """A bucket is about to be reduced; returns what `take_on_gpu` takes, if it is a pass's last one there."""
        if on_gpu:
            return _mark() if is_last else None
        with self._lock:
            if is_last:
                self._since_s = time.monotonic()
            elif is_first:
                self._since_s = None
        return None

    def take(self) -> None:
        """A bucket that is not on a GPU has been reduced; from any thread."""
        with self._lock:
            if self._since_s is not None:
                now_s = time.monotonic()
                self._sum_s += now_s - self._since_s
                self._since_s = now_s

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
