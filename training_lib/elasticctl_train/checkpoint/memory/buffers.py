"""The warm memory that a rank copies its share to: one buffer, which is free again once the save is over.

With a local tier there are two: one holds the last snapshot, the other is filled next.

Memory that has never been touched is allocated page by page on first use, which makes a first copy ten times as slow as
a second. So a thread touches every page beforehand, and page-locks the memory if tensors come from a GPU.

A restore reads into a `ReadBuffer` instead, whose large tensors keep their memory, so that nothing is copied.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from elasticctl_store.errors import NoMemoryError
from elasticctl_train.checkpoint.memory.copying import CopyTarget
from elasticctl_train.checkpoint.memory.local_tier import Tier

log = logging.getLogger("elasticctl_train")

_SLACK_BYTES = 1 << 20  # so that a state whose small tensors change their shape needs no new buffers
_PAGE_BYTES = mmap.PAGESIZE
KEPT_FROM_BYTES = 128 << 10
"""Smaller tensors are copied: keeping them in place would save less than the bookkeeping costs."""
_ALIGNMENT = 64
"""The alignment of torch's own tensors. With another one, matrix products may round differently."""
_DROP = getattr(mmap, "MADV_DONTNEED", None)


@dataclass(slots=True)
class Buffer:
    """`data` (uint8) is the memory; `index` is 0 or 1. `pinned`: page-locked.

    `targets` are the tensors in it as laid out for `plan`; its user sets both.
    """

    index: int
    data: torch.Tensor
    in_tier: bool
    pinned: bool = False
    plan: object = None
    targets: list[CopyTarget] = field(default_factory=list)


class Buffers:
    """A rank's buffer, or with a tier its two buffers, each slightly larger than `size_bytes`, made in the
    background."""

    def __init__(self, size_bytes: int, *, tier: Tier | None, pin: torch.device | None, one_at_first: bool) -> None:
        """`pin` is the GPU that will copy into them. `one_at_first`: only `turn` makes a second one."""
        self._size_bytes = size_bytes + _SLACK_BYTES
        self._tier, self._pin = tier, pin
        self._made: dict[int, Future[Buffer]] = {}
        self._next = 0
        self._start_making([0] if one_at_first or tier is None else [0, 1])

    def fit(self, size_bytes: int) -> bool:
        """Return whether these have the right size for that many bytes."""
        return self._size_bytes - 2 * _SLACK_BYTES <= size_bytes <= self._size_bytes

    def next(self) -> Buffer:
        """Return the buffer to be filled now, once it is warm. Raises NoMemoryError; a later call tries again."""
        self._start_making([self._next])
        return self._made[self._next].result()

    def turn(self) -> None:
        """Keep what was filled: with a tier, the other buffer is next, and is made in the background if it does not
        exist."""
        if self._tier is not None:
            self._next = 1 - self._next
            self._start_making([self._next])

    def close(self) -> None:
        """Make no more buffers, and wait for the one that is being made, because its successor's file has the same
        name."""
        for made in self._made.values():
            made.cancel()
        wait(self._made.values())

    def _start_making(self, indices: list[int]) -> None:
        todo = [index for index in indices if index not in self._made or _failed(self._made[index])]
        self._made |= {index: Future() for index in todo}
        if todo:
            threading.Thread(target=self._make, args=(todo,), name="elasticctl-buffers", daemon=True).start()

    def _make(self, indices: list[int]) -> None:
        for index in indices:
            made = self._made[index]
            if not made.set_running_or_notify_cancel():
                continue
            try:
                made.set_result(self.make_one(index))
            except BaseException as e:  # noqa: BLE001 - the edge of a thread: `next` raises it
                made.set_exception(e)

    def make_one(self, index: int) -> Buffer:
        shared = self._tier.create(index, self._size_bytes) if self._tier is not None else None
        data = _map_for_buffer(self._size_bytes) if shared is None else _tensor(shared)
        touch(data)
        return Buffer(index, data, in_tier=shared is not None, pinned=self._pin is not None and _pin(data, self._pin))


def _failed(made: Future[Buffer]) -> bool:
    return made.done() and made.exception() is not None


def anonymous(size_bytes: int) -> mmap.mmap:
    """Return untouched private memory of this process. Raises NoMemoryError.

    It uses small pages: large ones may first have to be freed, or be assigned to a virtual machine by its host, and a
    restore would wait for that.
    """
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise NoMemoryError(f"no {size_bytes >> 20} MB of memory for a checkpoint: {e.strerror}") from e


def _map_for_buffer(size_bytes: int) -> torch.Tensor:
    """Return the same for a buffer, in large pages if the kernel has them: nothing waits while buffers are made.

    Processes that are forked from this one, such as DataLoader workers, do not get it: otherwise the first write to
    each page after a fork would copy the page.
    """
    memory = anonymous(size_bytes)
    for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        if hasattr(mmap, name):
            with suppress(OSError):  # a kernel without large pages
                memory.madvise(getattr(mmap, name))
    return _tensor(memory)


def _tensor(memory: mmap.mmap) -> torch.Tensor:
    return torch.frombuffer(memory, dtype=torch.uint8)


def touch(data: torch.Tensor) -> None:
    """Bring every page of `data` into memory.

    This uses numpy, which is C: a daemon thread that the interpreter ends while it is in torch's C++ aborts the
    process.
    """
    data.numpy()[::_PAGE_BYTES] = 0


def _pin(data: torch.Tensor, device: torch.device) -> bool:
    """Page-lock `data` until it is freed, for asynchronous copies from a GPU; return False if that is refused."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0))
    if failed:
        log.warning("could not page-lock %d MB (CUDA error %d): saves take longer", data.nbytes >> 20, failed)
        return False
    weakref.finalize(data, runtime.cudaHostUnregister, data.data_ptr()).atexit = False
    return True


class ReadBuffer:
    """Untouched private memory of this process; `data` (uint8) is all of it, until `close`.

    A tensor that stays is the only one in its storage, as if it had been allocated alone. The pages below it return to
    the system when it is freed, and all other pages once the share has been unpacked.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises NoMemoryError."""
        self._memory = anonymous(size_bytes)
        self._kept: list[tuple[int, int]] = []
        self.data = torch.frombuffer(self._memory, dtype=torch.uint8)

    def keep_tensor(self, start: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor | None:
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
