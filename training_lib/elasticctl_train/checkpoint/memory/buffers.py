"""The warm memory that a rank copies its share to: one buffer, which is free again once the save is over.

With a local tier there are two: one holds the last snapshot, the other is filled next.

Memory that has never been touched is given out page by page on first use, which makes a first copy ten times as slow
as a second. So a thread touches every page beforehand, and page-locks the memory where tensors come from a GPU.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from elasticctl_store.errors import NoMemoryError
from elasticctl_train.checkpoint.memory.copying import CopyTarget
from elasticctl_train.checkpoint.memory.local_tier import Tier

log = logging.getLogger("elasticctl_train")

_SLACK_BYTES = 1 << 20  # so that a state whose small tensors change in shape needs no new buffers
_PAGE_BYTES = mmap.PAGESIZE


@dataclass(slots=True)
class Buffer:
    """`data` (uint8) is the memory; of two, `index` tells which. `pinned`: page-locked.

    `targets` are the tensors in it as laid out for `plan`: both are its user's.
    """

    index: int
    data: torch.Tensor
    in_tier: bool
    pinned: bool = False
    plan: object = None
    targets: list[CopyTarget] = field(default_factory=list)


class Buffers:
    """A rank's one, or with a tier two, each a little more than `size_bytes` large, made in the background."""

    def __init__(self, size_bytes: int, *, tier: Tier | None, pin: torch.device | None, one_at_first: bool) -> None:
        """`pin` is the GPU that will copy into them. `one_at_first`: a second is made by `turn` only."""
        self._size_bytes = size_bytes + _SLACK_BYTES
        self._tier, self._pin = tier, pin
        self._made: dict[int, Future[Buffer]] = {}
        self._next = 0
        self._begin([0] if one_at_first or tier is None else [0, 1])

    def fit(self, size_bytes: int) -> bool:
        """Are these of the right size for that much?"""
        return self._size_bytes - 2 * _SLACK_BYTES <= size_bytes <= self._size_bytes

    def next(self) -> Buffer:
        """The buffer to be filled now; waits until it is warm. Raises NoMemoryError; a later call tries again."""
        self._begin([self._next])
        return self._made[self._next].result()

    def turn(self) -> None:
        """What was filled is to be kept: with a tier, the other one is next, made beside training if there is none."""
        if self._tier is not None:
            self._next = 1 - self._next
            self._begin([self._next])

    def close(self) -> None:
        """Make no more of them, and wait for the one that is being made: its file has the name of its successor's."""
        for made in self._made.values():
            made.cancel()
        wait(self._made.values())

    def _begin(self, indices: list[int]) -> None:
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
            except BaseException as e:  # noqa: BLE001 - the edge of a thread: who waits for the buffer raises it
                made.set_exception(e)

    def make_one(self, index: int) -> Buffer:
        shared = self._tier.create(index, self._size_bytes) if self._tier is not None else None
        data = _map_for_buffer(self._size_bytes) if shared is None else _tensor(shared)
        touch(data)
        return Buffer(index, data, in_tier=shared is not None, pinned=self._pin is not None and _pin(data, self._pin))


def _failed(made: Future[Buffer]) -> bool:
    return made.done() and made.exception() is not None


def anonymous(size_bytes: int) -> mmap.mmap:
    """Untouched memory of this process's own. Raises NoMemoryError.

    In small pages: large ones may have to be made free first, or given to a virtual machine by its host, and whoever
    restores waits for that.
    """
    try:
        return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as e:
        raise NoMemoryError(f"no {size_bytes >> 20} MB of memory for a checkpoint: {e.strerror}") from e


def _map_for_buffer(size_bytes: int) -> torch.Tensor:
    """The same for a buffer: in large pages where the kernel has them, for nobody waits while these are made.

    Processes that are forked from this one, DataLoader workers mostly, do not get it: or else the first write to each
    page after a fork would copy the page.
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
    """Have every page of `data` in memory, and mapped.

    With numpy, which is C: a daemon thread that the interpreter ends in the midst of torch's C++ aborts the process.
    """
    data.numpy()[::_PAGE_BYTES] = 0


def _pin(data: torch.Tensor, device: torch.device) -> bool:
    """Page-lock `data` until it is freed, for copies from a GPU that nobody waits for; False if that is refused."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        failed = int(runtime.cudaHostRegister(data.data_ptr(), data.nbytes, 0))
    if failed:
        log.warning("%d MB could not be page-locked (CUDA error %d): saves take longer", data.nbytes >> 20, failed)
        return False
    weakref.finalize(data, runtime.cudaHostUnregister, data.data_ptr()).atexit = False
    return True
