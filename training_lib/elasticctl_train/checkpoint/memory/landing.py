"""Memory that a share is read into, and that its large tensors keep: each owns its part, and nothing is copied.

A tensor that stays is the only thing in its storage, as if it had been allocated alone. The pages under it go back to
the system when it is freed, those under everything else when the share has been taken apart.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from math import prod

import torch

from elasticctl_train.checkpoint.memory import buffers

KEPT_FROM_BYTES = 128 << 10
"""Less is copied: to keep it in place would save less than the bookkeeping costs."""
_ALIGNMENT = 64
"""Where torch puts tensors of its own. Matrix products may round differently elsewhere."""
_DROP = getattr(mmap, "MADV_DONTNEED", None)


class Landing:
    """Untouched memory of this process's own; `data` (uint8) is all of it, until `close`."""

    def __init__(self, size_bytes: int) -> None:
        """Raises NoMemoryError."""
        self._memory = buffers.anonymous(size_bytes)
        self._kept: list[tuple[int, int]] = []
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)

    def keep(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor | None:
        """The tensor that lies at byte `start`, with a storage of its own; None: copy it, for it cannot stay there."""
        end = start + prod(shape) * dtype.itemsize
        if end - start < KEPT_FROM_BYTES or start % _ALIGNMENT:
            return None
        part = memoryview(self._memory)[start:end]
        weakref.finalize(part, _give_back, self._memory, start, end).atexit = False
        self._kept.append((start, end))
        return torch.frombuffer(part, dtype=torch.uint8).view(dtype).view(tuple(shape))

    def close(self) -> None:
        """Give back what no tensor has kept: nobody reads from `data` any more."""
        end = 0
        for start, next_end in sorted(self._kept):
            _give_back(self._memory, end, start)
            end = next_end
        _give_back(self._memory, end, len(self._memory))


def _give_back(memory: mmap.mmap, start: int, end: int) -> None:
    """Free the pages that lie between two bytes as a whole."""
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if _DROP is not None and first < last:
        memory.madvise(_DROP, first, last - first)
