"""Memory that a share is read into and that its large tensors keep: each owns its part, and nothing is copied.

A tensor that stays is the only one in its storage, as if it had been allocated alone. The pages below it return to the
system when it is freed, and all other pages once the share has been unpacked.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from math import prod

import torch

from elasticctl_train.checkpoint.memory import buffers

KEPT_FROM_BYTES = 128 << 10
"""Smaller tensors are copied: keeping them in place would save less than the bookkeeping costs."""
_ALIGNMENT = 64
"""The alignment of torch's own tensors. With another one, matrix products may round differently."""
_DROP = getattr(mmap, "MADV_DONTNEED", None)


class ReadBuffer:
    """Untouched private memory of this process; `data` (uint8) is all of it, until `close`."""

    def __init__(self, size_bytes: int) -> None:
        """Raises NoMemoryError."""
        self._memory = buffers.anonymous(size_bytes)
        self._kept: list[tuple[int, int]] = []
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)

    def keep(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor | None:
        """Return the tensor at byte `start`, with a storage of its own; None if it cannot stay there and has to be
        copied."""
        end = start + prod(shape) * dtype.itemsize
        if end - start < KEPT_FROM_BYTES or start % _ALIGNMENT:
            return None
        part = memoryview(self._memory)[start:end]
        weakref.finalize(part, _give_back, self._memory, start, end).atexit = False
        self._kept.append((start, end))
        return torch.frombuffer(part, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Free what no tensor has kept. `data` must not be read any more."""
        end = 0
        for start, next_end in sorted(self._kept):
            _give_back(self._memory, end, start)
            end = next_end
        _give_back(self._memory, end, len(self._memory))


def _give_back(memory: mmap.mmap, start: int, end: int) -> None:
    """Free the pages that are entirely between two bytes."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if _DROP is not None and first < last:
        memory.madvise(_DROP, first, last - first)
