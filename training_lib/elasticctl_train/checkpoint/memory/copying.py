"""Copy tensors in memory with several threads, and run one job at a time in a background thread."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from elasticctl_store import parallel
from elasticctl_store.errors import SaveError

log = logging.getLogger("elasticctl_train")

CHUNK_BYTES = 2 << 20
SMALL_BYTES = 128 << 10  # less is copied faster than threads can take turns
HELP_FROM_BYTES = 8 << 20  # use one more helper for each
MOST_THREADS = 8  # more gain little: some eight processors saturate the memory of a socket
CONFIRM_S = 2.0  # no operation on an existing tensor takes this long
LATE_CHUNK_BYTES = 256 << 10  # training may wait for one to be copied by a thread that yields the processors to it

Job = Callable[[], None]
Chunk = tuple[int, int, int]
"""(address to copy to, address to copy from, bytes)"""
Late = tuple[Chunk, torch.Tensor, torch.Tensor, int]
"""(what to copy, tensor to copy to, tensor to copy from, version of the latter)"""


class Background:
    """A daemon thread that runs one job at a time. Errors of jobs are only logged.

    With `niceness` above 0 it, and every thread that a job starts, yields the processors to others that need them.
    """

    def __init__(self, name: str, niceness: int = 0) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        threading.Thread(target=_work, args=(self._jobs, self._idle, niceness), name=name, daemon=True).start()
        weakref.finalize(self, self._jobs.put, None)  # the thread does not reference this object, and ends with it

    @property
    def busy(self) -> bool:
        """Whether a job is running."""
        return not self._idle.is_set()

    def start(self, job: Job) -> None:
        """Run `job`. The one before must be over."""
        self._idle.clear()
        self._jobs.put(job)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the job is done, or for `timeout_s` seconds."""
        self._idle.wait(timeout_s)


def _work(jobs: queue.SimpleQueue[Job | None], idle: threading.Event, niceness: int) -> None:
    if niceness and sys.platform == "linux":  # where niceness belongs to a thread, not to the process
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, max(niceness, os.getpriority(os.PRIO_PROCESS, own)))
    while (job := jobs.get()) is not None:
        try:
            job()
        except Exception:
            log.exception("a job in the background failed")
        finally:
            del job  # and what it references
            idle.set()


@dataclass(frozen=True, slots=True)
class CopyTarget:
    """A contiguous tensor in memory, looked up once. `by_bytes`: what is copied to it may be copied as bytes."""

    view: torch.Tensor
    address: int
    size_bytes: int
    by_bytes: bool

    @classmethod
    def of(cls, view: torch.Tensor) -> CopyTarget:
        """Return the target for `view`. Complex numbers may be conjugated lazily, so they are not copied as bytes."""
        return cls(view, view.data_ptr(), view.nbytes, not view.is_complex())


class Copier:
    """Copies tensors in memory, with as many threads as the rank has processors.

    Training is stopped for what is copied immediately, and one processor cannot use the full speed of the memory.
    """

    def __init__(self) -> None:
        helpers = min(parallel.per_rank(), MOST_THREADS) - 1
        self._helpers = [Background(f"elasticctl-copy-{number}") for number in range(helpers)]
        self._background = Background("elasticctl-late-copy")

    def copy(
        self, targets: Sequence[CopyTarget], sources: Sequence[torch.Tensor], may_wait: Sequence[bool] | None = None
    ) -> LateCopy | None:
        """Copy each source to its target, which has the same dtype and shape.

        Sources for which `may_wait` is true, and that are large enough, are not copied yet but by the returned
        LateCopy.
        """
        large: deque[Chunk] = deque()
        small: list[Chunk] = []
        late: list[Late] = []
        large_bytes = 0
        flags = may_wait if may_wait is not None else [False] * len(targets)
        for target, source, waits in zip(targets, sources, flags, strict=True):
            if not (target.by_bytes and source.is_cpu and source.is_contiguous()) or source.is_neg():
                target.view.copy_(source)
                continue
            size_bytes = target.size_bytes
            chunk = target.address, source.data_ptr(), size_bytes
            if size_bytes < SMALL_BYTES:
                small.append(chunk)
            elif waits and not source.is_inference():
                late.append((chunk, target.view, source, source._version))
            else:
                large_bytes += size_bytes
                large.extend(_chunks(*chunk, CHUNK_BYTES))
        helpers = self._helpers[: large_bytes // HELP_FROM_BYTES]
        for helper in helpers:
            helper.start(lambda: _work_off(large))
        for chunk in small:
            ctypes.memmove(*chunk)
        _work_off(large)
        for helper in helpers:
            helper.join()
        return LateCopy(late, self._background) if late else None


class LateCopy:
    """Copies that are made in the background, or by a thread that cannot wait any longer; several threads share the
    work.

    The thread `background` must have normal priority: training may have to wait for a chunk that it has started.

    Whether a tensor was written to meanwhile is known from its version, which every operation on it increments, but
    only after it has written. While an operation is running, the version says nothing. So the thread that trains has to
    check (`confirm`), between two operations. If it never does, an operation is assumed to be over after `CONFIRM_S`.
    """

    def __init__(self, copies: Sequence[Late], background: Background) -> None:
        self._background = background
        self._chunks = deque(part for chunk, *_ in copies for part in _chunks(*chunk, LATE_CHUNK_BYTES))
        self._tensors = [(to, source, version, source.untyped_storage()) for _, to, source, version in copies]  # kept
        self._lock = threading.Lock()
        self._copying = 0
        self._done, self._confirmed = threading.Event(), threading.Event()
        self.waited_s = 0.0
        self.is_torn = False

    def finish(self) -> None:
        """Copy what is left; everything is copied when this returns."""
        while not self._done.is_set():
            with self._lock:
                chunk = self._chunks.popleft() if self._chunks else None
                self._copying += chunk is not None
            if chunk is None:
                self._done.wait()
                return
            ctypes.memmove(*chunk)
            with self._lock:
                self._copying -= 1
                is_last = not self._copying and not self._chunks
            if is_last:
                self._done.set()

    def confirm(self) -> None:
        """If everything is copied, check whether that was in time. Called by the thread that trains, between two
        operations."""
        if self._done.is_set():
            self._check_versions()

    def _check_versions(self) -> None:
        with self._lock:
            if not self._confirmed.is_set():
                self.is_torn = any(source._version != version for _, source, version, _ in self._tensors)
                self._tensors.clear()
                self._confirmed.set()

    def synchronize(self) -> None:
        """Like `finish`, for a thread with low priority: another thread copies. Named as for an event of a GPU."""
        if not self._done.is_set():
            self._background.start(self.finish)
            self._background.join()

    def check(self) -> None:
        """Wait until it is known whether everything was copied in time. Raises SaveError if something was not."""
        self.synchronize()
        began_s = time.monotonic()
        self._confirmed.wait(CONFIRM_S)
        self.waited_s = time.monotonic() - began_s
        self._check_versions()
        if self.is_torn:
            raise SaveError("the optimizer's state was changed outside of its step, before it was copied")


def _chunks(to: int, source: int, size_bytes: int, chunk_bytes: int) -> list[Chunk]:
    starts = range(0, size_bytes, chunk_bytes)
    return [(to + start, source + start, min(chunk_bytes, size_bytes - start)) for start in starts]


def _work_off(chunks: deque[Chunk]) -> None:
    while True:
        try:
            chunk = chunks.popleft()
        except IndexError:
            return
        ctypes.memmove(*chunk)
