"""Cuts a process group's connections, so that no rank keeps waiting for a peer that will not answer.

gloo cannot do that. A rank whose peers are alive, but have given up the collective that it waits in, waits until its
timeout, and `abort` does not free it. Shutting down a connection frees both ends at once, except for operations that
gloo has begun to send: it forgets them, so whatever waits for them has to be told to give up. A rank that still waits
for a peer to connect gets a connection from this process itself. The sockets of a group, including the one to its
store, are those that appeared in this process while the group was made. Collectives on GPUs do not only wait for
sockets, so NCCL is told to abort them.
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

from elasticctl_train.inplace.lost_peers import nccl

_CLOSED, _LISTENS = 7, 10
_AGAIN_S = 0.2
_CALL_S = 1.0
_DEAD_S = 1.0
"""An operation that fails because of a cut does so within milliseconds."""


class Connections:
    """The connections that this process opens for a group of `size` ranks, between construction and `settle`.

    `on_dead(connections)` is called from a thread once whatever still waits on them after a cut will never end.
    `on_gpus` are the process groups on them that use GPUs.
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
        """Return an object without connections, for the time before the first group."""
        made = cls(0)
        made.settle()
        return made

    def carry(self, groups: Sequence[dist.ProcessGroup]) -> None:
        """Also abort what these groups do on GPUs when the connections are cut.

        At the time of this call, gloo has opened all its connections, and NCCL none.
        """
        with self._lock:
            self.on_gpus, self._of_gloo = groups, set(_sockets())

    def settle(self) -> bool:
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
        """True if whatever still waits on the connections will never end."""
        return self._cut_at is not None and time.monotonic() >= self._cut_at + _DEAD_S

    def cut(self) -> None:
        """Shut down the connections, so that every collective on them fails, here and on the peers. Thread-safe.

        Connections that are opened later are shut down as well, until `settle`, because a peer that has gone may never
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
            if inode in self._before if self._mine is None else inode not in self._mine:
                continue
            with suppress(OSError):  # closed meanwhile
                duplicate = socket.socket(fileno=os.dup(descriptor))
                with duplicate, suppress(OSError):  # not connected
                    is_same = os.fstat(duplicate.fileno()).st_ino == inode  # the number may have been reused
                    if not is_same:
                        continue
                    is_nccl = bool(self.on_gpus) and inode not in self._of_gloo
                    state = _state(duplicate)
                    if is_nccl or state not in (_CLOSED, _LISTENS):  # gloo may be about to listen on a closed one
                        duplicate.shutdown(socket.SHUT_RDWR)
                    elif state == _LISTENS and self._mine is None:
                        self._knock(duplicate.getsockname())
        if self.on_gpus and not self._is_aborted:
            self._is_aborted = True
            nccl.abort(self.on_gpus)

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
