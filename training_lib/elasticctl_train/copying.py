"""Copies of many tensors into one buffer, while training stands still.

torch's own copy brings up all its threads for each tensor and waits for the last of them, which on a busy machine, with
DataLoader workers about, takes many times as long as the copy. Here two threads take chunks off one list, and the
second one is a help that nobody waits for but to finish the chunk it has begun.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Sequence

import torch

from elasticctl_train.background import Background

_CHUNK_BYTES = 2 << 20
_SMALL_BYTES = 128 << 10  # less is copied faster than the threads can take turns
_HELP_FROM_BYTES = 8 << 20

Chunk = tuple[int, int, int]
"""Address to copy to, address to copy from, bytes."""


class Copier:
    """Copies tensors in memory with two threads, where there are two processors."""

    def __init__(self) -> None:
        self._helper = Background("elasticctl-copy") if len(os.sched_getaffinity(0)) > 1 else None

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target: contiguous, of the same dtype and shape, in the CPU's memory."""
        large: deque[Chunk] = deque()
        small: list[Chunk] = []
        large_bytes = 0
        for target, source in zip(targets, sources, strict=True):
            if not source.is_cpu or not source.is_contiguous() or source.is_conj() or source.is_neg():
                target.copy_(source)
                continue
            size_bytes = source.nbytes
            chunk = target.data_ptr(), source.data_ptr(), size_bytes
            if size_bytes < _SMALL_BYTES:
                small.append(chunk)
            else:
                large_bytes += size_bytes
                large.extend(_chunks(*chunk))
        helper = self._helper if large_bytes >= _HELP_FROM_BYTES else None
        if helper is not None:
            helper.start(lambda: _work_off(large))
        for chunk in small:
            ctypes.memmove(*chunk)
        _work_off(large)
        if helper is not None:
            helper.join()


def _chunks(to: int, source: int, size_bytes: int) -> list[Chunk]:
    starts = range(0, size_bytes, _CHUNK_BYTES)
    return [(to + start, source + start, min(_CHUNK_BYTES, size_bytes - start)) for start in starts]


def _work_off(chunks: deque[Chunk]) -> None:
    while True:
        try:
            chunk = chunks.popleft()
        except IndexError:
            return
        ctypes.memmove(*chunk)
