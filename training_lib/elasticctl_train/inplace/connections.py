"""Cuts a process group's connections, so that no rank keeps waiting for a peer that will not answer.

gloo cannot do that. A rank whose peers are alive, but have given up the collective that it waits in, waits until its
timeout, and `abort` does not free it. Shutting down a connection frees both ends immediately, except for operations
that gloo has begun to send: it drops them, so anything that waits for them must be made to give up. A rank that still
waits for a peer to connect gets a connection from this process itself. The sockets of a group, including the one to its
store, are those that appeared in this process while the group was made. Collectives on GPUs do not only wait for
sockets, so NCCL has to abort them. torch's own watchdog for NCCL ends the process after a failure, so it is turned off
for ranks that stay (`elasticctl_train.dist.rejoin`). It still records what it sees.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import graph
from torch.nn.parallel import distributed

_CLOSED, _LISTENS = 7, 10
_AGAIN_S = 0.2
_CALL_S = 1.0
_DEAD_S = 1.0
"""An operation that fails because of a cut does so within milliseconds."""

TIMEOUT = "TIMEOUT"
"""The value of `gpu_failure` if a collective has not ended within the group's own limit."""

_WAITS = (os.path.dirname(dist.__file__), distributed.__file__, graph.__file__)
"""Where Python enters a collective: by a direct call, for parameters or buffers, or at the end of a backward pass."""
_STUCK_S = 2.0
_IDLE = 0.2
"""A process that uses less than this share of one core does not compute."""


class GroupConnections:
    """The connections that this process opens for a group of `size` ranks, between construction and `seal`.

    `on_dead(connections)` is called from a thread once anything that still waits on them after a cut will never end.
    `on_gpus` are the process groups on them that use GPUs.
    """

    def __init__(self, size: int, on_dead: Callable[[GroupConnections], None] = lambda connections: None) -> None:
        self._size, self._on_dead = size, on_dead
        self._before = set(_sockets())
        self._mine: set[int] | None = None
        self.on_gpus: Sequence[dist.ProcessGroup] = ()
        self._is_aborted = False
        self._of_gloo: set[int] = set()
        self._lock = threading.Lock()
        self._cut_at: float | None = None

    @classmethod
    def none(cls) -> GroupConnections:
        """Return an object without connections, for the time before the first group."""
        made = cls(0)
        made.seal()
        return made

    def add_gpu_groups(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Also abort what these groups do on GPUs when the connections are cut.

        At the time of this call, gloo has opened all its connections, and NCCL none.
        """
        with self._lock:
            self.on_gpus, self._of_gloo = groups, set(_sockets())

    def seal(self) -> bool:
        """Stop adding connections to this group; return False if they have been cut meanwhile."""
        with self._lock:
            if self._mine is None:
                self._mine = _sockets().keys() - self._before
            return self._cut_at is None

    @property
    def is_cut(self) -> bool:
        """True if the connections have been cut."""
        return self._cut_at is not None

    @property
    def is_dead(self) -> bool:
        """True if anything that still waits on the connections will never end."""
        return self._cut_at is not None and time.monotonic() >= self._cut_at + _DEAD_S

    def cut(self) -> None:
        """Shut down the connections, so that every collective on them fails, here and on the peers. Thread-safe.

        Connections that are opened later are shut down as well, until `seal`, because a peer that has gone may never
        answer on them.
        """
        with self._lock:
            is_first = self._cut_at is None
            if is_first:
                self._cut_at = time.monotonic()  # set before a GPU ends the aborted collectives
            self._shut_down()
            if is_first:
                threading.Thread(target=self._go_on_cutting, name="elasticctl-cut", daemon=True).start()

    def _go_on_cutting(self) -> None:
        while self._mine is None or not self.is_dead:
            time.sleep(_AGAIN_S)
            with self._lock:
                if self._mine is None:
                    self._shut_down()
        self._on_dead(self)

    def _shut_down(self) -> None:
        for inode, descriptor in _sockets().items():
            # Until `seal`, everything opened since the beginning belongs to the group; then it is a fixed set.
            if inode in self._before if self._mine is None else inode not in self._mine:
                continue
            with suppress(OSError):  # closed meanwhile
                duplicate = socket.socket(fileno=os.dup(descriptor))
                with duplicate, suppress(OSError):  # not connected
                    # The number of the descriptor may have been reused for another socket since it was listed.
                    if os.fstat(duplicate.fileno()).st_ino != inode:
                        continue
                    # gloo ends the process if a socket fails that it listens on, or is about to; NCCL does not.
                    is_nccl = bool(self.on_gpus) and inode not in self._of_gloo
                    state = _state(duplicate)
                    if is_nccl or state not in (_CLOSED, _LISTENS):
                        duplicate.shutdown(socket.SHUT_RDWR)
                    elif state == _LISTENS and self._mine is None:
                        self._knock(duplicate.getsockname())
        if self.on_gpus and not self._is_aborted:
            self._is_aborted = True
            _abort(self.on_gpus)

    def _knock(self, address: Any) -> None:
        """Connect to gloo's listening socket in place of each peer, and hang up: a peer that has gone will not connect.

        A connection begins with the number of the pair of ranks that it is for.
        """
        for pair in range(self._size):
            with socket.create_connection(address[:2], _CALL_S) as call:
                call.sendall(struct.pack("=q", pair))


def _sockets() -> dict[int, int]:
    """The sockets of this process, as inode -> file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def _state(of: socket.socket) -> int:
    """The socket's state, as in linux/tcp.h. Raises OSError if it is not a TCP socket."""
    return of.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]


def gpu_failure(groups: Iterable[dist.ProcessGroup]) -> str:
    """Return torch's name for a failure on GPUs in one of the groups; empty if there is none."""
    names = (backend.get_error().name for backend in _backends(groups) if hasattr(backend, "get_error"))
    return next((str(name) for name in names if name != "SUCCESS"), "")


def _abort(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort everything that the groups do on GPUs, together as torch does, because they may wait for each other."""
    backends = _backends(groups)
    if not backends:
        return
    backends[0]._group_start()
    for backend in backends:
        backend.abort()
    backends[0]._group_end()


def _backends(groups: Iterable[dist.ProcessGroup]) -> list[Any]:
    """The NCCL backend of each group that has one."""
    found: list[Any] = []
    for group in groups:
        try:
            backend: Any = group._get_backend(torch.device("cuda"))
        except RuntimeError:  # the group does not use GPUs
            continue
        if backend.name() == "nccl":
            found.append(backend)
    return found


def is_stuck(thread: int) -> bool:
    """Return whether the thread with this identifier waits for peers in a call of torch that can no longer end.

    Observes it for two seconds. False if it moves or is not in such a call, and if the process computes.
    """
    before, used_s = _position(thread), time.process_time()
    time.sleep(_STUCK_S)
    return before is not None and before == _position(thread) and time.process_time() - used_s < _IDLE * _STUCK_S


def _position(thread: int) -> tuple[FrameType, int] | None:
    """The thread's frame and position in a call that may wait for peers; None if it is in no such call, or over."""
    frame = sys._current_frames().get(thread)
    if frame is None or not frame.f_code.co_filename.startswith(_WAITS):
        return None
    return frame, frame.f_lasti
