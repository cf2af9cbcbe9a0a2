"""Cut a process group's connections, so that nobody waits any longer for a peer that will not answer.

gloo offers no way to do that: a rank whose peers are alive, but have given up the collective that it waits in, waits
until its timeout, and `abort` does not free it. A connection that is shut down frees both of its ends at once, but for
what gloo has begun to send on it: that it forgets, and whoever waits for its end has to be told to give up. A rank that
still waits for a peer's call is called. The sockets of a group are those that appeared in this process while the group
was made, that to its store included. Collectives on GPUs do not wait for sockets alone: NCCL is told to abort them.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from elasticctl_train.inplace import nccl

_CLOSED, _LISTENS = 7, 10
_AGAIN_S = 0.2
_CALL_S = 1.0
_DEAD_S = 1.0
"""What fails after a cut does so within some milliseconds."""


class Connections:
    """Those that this process opens for a group of `size` ranks, from the construction of this object to `settle`.

    `on_dead(connections)` is called, from a thread, when what still waits on them after a cut will never end.
    `on_gpus`: the groups that were made on them, as far as they use GPUs.
    """

    def __init__(self, size: int, on_dead: Callable[[Connections], None] = lambda connections: None) -> None:
        self._size, self._on_dead = size, on_dead
        self._before = set(_sockets())
        self._mine: set[int] | None = None
        self.on_gpus: Sequence[dist.ProcessGroup] = ()
        self._is_aborted = False
        self._of_gloo: set[int] = set()
        self._lock = threading.Lock()
        self._cut_at: float | None = None

    @classmethod
    def none(cls) -> Connections:
        """Those of no group."""
        made = cls(0)
        made.settle()
        return made

    def carry(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """From now on, what these groups do on GPUs is aborted too. gloo's connections are all there, NCCL's follow."""
        with self._lock:
            self.on_gpus, self._of_gloo = groups, set(_sockets())

    def settle(self) -> bool:
        """No more are opened for this group; False if it has been cut off meanwhile."""
        with self._lock:
            if self._mine is None:
                self._mine = _sockets().keys() - self._before
            return self._cut_at is None

    @property
    def is_cut(self) -> bool:
        """Has the group been given up?"""
        return self._cut_at is not None

    @property
    def is_dead(self) -> bool:
        """Will what still waits on them never end?"""
        return self._cut_at is not None and time.monotonic() >= self._cut_at + _DEAD_S

    def cut(self) -> None:
        """Shut them down, from any thread; every collective on them fails, here and on the peers.

        Those that are opened later are shut down too, until `settle`: a peer that has gone may never answer them.
        """
        with self._lock:
            is_first = self._cut_at is None
            if is_first:
                self._cut_at = time.monotonic()  # known before a GPU ends what is aborted
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
            if inode in self._before if self._mine is None else inode not in self._mine:
                continue
            with suppress(OSError):  # closed meanwhile
                duplicate = socket.socket(fileno=os.dup(descriptor))
                with duplicate, suppress(OSError):  # not connected
                    is_same = os.fstat(duplicate.fileno()).st_ino == inode  # its number may be another's by now
                    if not is_same:
                        continue
                    is_nccl = bool(self.on_gpus) and inode not in self._of_gloo
                    state = _state(duplicate)
                    if is_nccl or state not in (_CLOSED, _LISTENS):  # gloo may have a closed one listen next
                        duplicate.shutdown(socket.SHUT_RDWR)
                    elif state == _LISTENS and self._mine is None:
                        self._knock(duplicate.getsockname())
        if self.on_gpus and not self._is_aborted:
            self._is_aborted = True
            nccl.abort(self.on_gpus)

    def _knock(self, address: Any) -> None:
        """Call where gloo listens in the place of each peer, and hang up: one that has gone will not call any more.

        A caller says the number of the pair of ranks that it is for.
        """
        for pair in range(self._size):
            with socket.create_connection(address[:2], _CALL_S) as call:
                call.sendall(struct.pack("=q", pair))


def _sockets() -> dict[int, int]:
    """The sockets of this process: inode -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def _state(of: socket.socket) -> int:
    """One of the states in linux/tcp.h. Raises OSError for what is no TCP socket."""
    return of.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
