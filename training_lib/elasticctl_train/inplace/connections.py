"""Cut a process group's connections, so that nobody waits any longer for a peer that will not answer.

gloo offers no way to do that: a rank whose peers are alive, but have given up the collective that it waits in, waits
until its timeout, and `abort` does not free it. A connection that is shut down frees both of its ends at once. The
sockets of a group are those that appeared in this process while the group was made, that to its store included.
"""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

_LISTEN = "0A"
_AGAIN_S = 0.2


class Connections:
    """Those that this process opens from the construction of this object until `settle`."""

    def __init__(self) -> None:
        self._before = set(_sockets())
        self._mine: set[int] | None = None
        self._lock = threading.Lock()
        self._is_cut = False

    def settle(self) -> bool:
        """No more are opened for this group; False if it has been cut off meanwhile."""
        with self._lock:
            if self._mine is None:
                self._mine = _sockets().keys() - self._before
            return not self._is_cut

    def cut(self) -> None:
        """Shut them down, from any thread; every collective on them fails, here and on the peers.

        Those that are opened later are shut down too, until `settle`: a peer that has gone may never answer them.
        """
        with self._lock:
            self._is_cut = True
            if self._mine is None:
                again = threading.Timer(_AGAIN_S, self.cut)
                again.daemon = True
                again.start()
            self._shut_down()

    def _shut_down(self) -> None:
        if dist.is_initialized() and dist.get_backend() == "nccl":
            _abort_process_group()
        listening = _listening()
        for inode, descriptor in _sockets().items():
            is_mine = inode not in self._before if self._mine is None else inode in self._mine
            if not is_mine or inode in listening:
                continue
            with suppress(OSError):  # closed meanwhile
                duplicate = socket.socket(fileno=os.dup(descriptor))
                with duplicate, suppress(OSError):  # not connected
                    is_same = os.fstat(duplicate.fileno()).st_ino == inode  # its number may be another's by now
                    if is_same and duplicate.family != socket.AF_UNIX:
                        duplicate.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, int]:
    """The sockets of this process: inode -> descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[int(target[8:-1])] = int(name)
    return found


def _listening() -> set[int]:
    """The inodes of sockets that listen."""
    found = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/self/net/{table}") as lines:
            next(lines, None)
            found |= {int(fields[9]) for fields in map(str.split, lines) if fields[3] == _LISTEN}
    return found
