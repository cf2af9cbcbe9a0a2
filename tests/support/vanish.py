"""Let processes vanish as a machine does that loses its power: no connection of theirs is closed, nothing is answered.

They are stopped, and their sockets drop what arrives. Only what was in the kernel's buffers before may still be sent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
PIDFD_GETFD = 438
"""The number of the system call, the same on every architecture."""
_libc = ctypes.CDLL(None, use_errno=True)


def vanish(pid: int) -> list[int]:
    """Stop a process and its descendants, and cut their TCP connections without a word; returns their pids.

    Until `come_back`. Raises PermissionError where that is forbidden.
    """
    pids = [pid, *_descendants(pid)]
    for each in pids:
        os.kill(each, signal.SIGSTOP)
    for each in pids:
        for sock in _connections(each):
            with sock:
                drop_all(sock)
    return pids


def come_back(pids: Iterable[int]) -> None:
    """Let what has vanished run again, and its connections find out what has become of their other ends."""
    for pid in pids:
        for sock in _connections(pid):
            with sock, suppress(OSError):  # one that has been opened since has no filter
                sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        os.kill(pid, signal.SIGCONT)


def drop_all(sock: socket.socket) -> None:
    """Have the kernel drop everything that arrives for a socket, before it is acknowledged."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)  # what the kernel would send by itself
    sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))


def _descendants(pid: int) -> list[int]:
    parents = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{number}/stat") as file:
            parents[int(number)] = int(file.read().rpartition(")")[2].split()[1])
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def _connections(pid: int) -> Iterator[socket.socket]:
    """The TCP sockets of another process."""
    handle = os.pidfd_open(pid)
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):
                if not os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
                    continue
            fd = _libc.syscall(PIDFD_GETFD, handle, int(number), 0)
            if fd < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
            sock = socket.socket(fileno=fd)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                yield sock
            else:
                sock.close()
    finally:
        os.close(handle)
