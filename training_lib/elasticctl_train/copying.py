"""Copies of many tensors into one buffer, while training stands still.

torch's own copy brings up all its threads for each tensor and waits for the last of them, which on a busy machine, with
DataLoader workers about, takes many times as long as the copy. Here two threads take chunks off one list, and the
second one is a help that nobody waits for but to finish the chunk it has begun.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elasticctl_train import processors
from elasticctl_train.background import Background

_CHUNK_BYTES = 2 << 20
_SMALL_BYTES = 128 << 10  # less is copied faster than the threads can take turns
_HELP_FROM_BYTES = 8 << 20

Chunk = tuple[int, int, int]
"""Address to copy to, address to copy from, bytes."""


@dataclass(frozen=True, slots=True)
class Target:
    """A contiguous tensor in memory, looked up once. `by_bytes`: what is copied to it may be moved as bytes."""

    view: torch.Tensor
    address: int
    size_bytes: int
    by_bytes: bool

    @classmethod
    def of(cls, view: torch.Tensor) -> Target:
        """What there is to know of `view`. Complex numbers may have been conjugated in name only."""
        return cls(view, view.data_ptr(), view.nbytes, not view.is_complex())


class Copier:
    """Copies tensors in memory with two threads, where a rank has two processors."""

    def __init__(self) -> None:
        self._helper = Background("elasticctl-copy") if processors.per_rank() > 1 else None

    def copy(self, targets: Sequence[Target], sources: Sequence[torch.Tensor]) -> None:
        """Copy each source to its target, of the same dtype and shape."""
        large: deque[Chunk] = deque()
        small: list[Chunk] = []
        large_bytes = 0
        for target, source in zip(targets, sources, strict=True):
            if not (target.by_bytes and source.is_cpu and source.is_contiguous()) or source.is_neg():
                target.view.copy_(source)
                continue
            size_bytes = target.size_bytes
            chunk = target.address, source.data_ptr(), size_bytes
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
