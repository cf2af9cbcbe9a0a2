"""What the launcher asks of the operating system: descriptors, connections, orphans, and what was killed for memory."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from elasticctl_store.parallel import CGROUP

REAP_EVERY_S = 5.0
ACCEPT_AGAIN_S = 0.1
_CLOSED = (errno.EBADF, errno.EINVAL)
"""What `accept` says once a listening socket has been closed or shut down."""


def raise_file_limit() -> None:
    """Let this process and its ranks open as many files as the system permits them; quietly, where it refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS has a limit below the one that it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve_connections(
    server: socket.socket, serve: Callable[[socket.socket], None], name: str, most: int = 1024
) -> None:
    """Call `serve(connected)`, in a thread called `name`, for each connection to `server`, until that is closed.

    A connection is closed once it has been served; more than `most` at a time are closed at once. That there is no
    descriptor left for a connection, or that its caller has gone again, ends nothing.
    """
    slots = threading.BoundedSemaphore(most)

    def run(connected: socket.socket) -> None:
        try:
            with connected:
                serve(connected)
        finally:
            slots.release()

    while True:
        try:
            connected, _ = server.accept()
        except OSError as error:
            if error.errno in _CLOSED:
                return
            time.sleep(ACCEPT_AGAIN_S)
            continue
        if slots.acquire(blocking=False):
            threading.Thread(target=run, args=(connected,), name=name, daemon=True).start()
        else:
            connected.close()


class OrphanReaper:
    """Collects the children that this process has adopted, as the first process of its container or as a subreaper.

    `own_pids()` are the children that somebody here waits for. A child is collected if it has been dead for one whole
    round, so that whoever has started it, a library perhaps, has had time to hear of its end.
    """

    def __init__(self, own_pids: Callable[[], Iterable[int]]) -> None:
        self._own_pids = own_pids
        self._dead_before: set[int] = set()
        self._closed = threading.Event()

    def start(self) -> None:
        """Begin, in a thread, if orphans come to this process at all: it is the first one of its namespace."""
        if os.getpid() == 1 and sys.platform == "linux":
            threading.Thread(target=self._run, name="orphans", daemon=True).start()

    def close(self) -> None:
        """Stop; returns at once."""
        self._closed.set()

    def reap(self) -> list[int]:
        """Collect the children that were dead at the last call too; returns their pids."""
        dead = _dead_children() - set(self._own_pids())
        due, self._dead_before = dead & self._dead_before, dead
        for pid in due:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return sorted(due)

    def _run(self) -> None:
        while not self._closed.wait(REAP_EVERY_S):
            self.reap()


def _dead_children() -> set[int]:
    """The children of this process that have ended and that nobody has collected; none where there is no /proc."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.add(int(folder.name))
    return found


class MemoryKills:
    """How many processes the kernel has killed for want of memory in this process's control group, v2 or v1.

    `membership` is the file that names the group, `root` where groups are mounted.
    """

    def __init__(self, root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> None:
        self._file = _find_kill_counter(root, membership)

    def count(self) -> int:
        """The count so far; 0 where the system does not tell."""
        if self._file is None:
            return 0
        try:
            found = re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0


def _find_kill_counter(root: Path, membership: Path) -> Path | None:
    """The file with a line `oom_kill N`. In a container the group's own path may not be mounted, but its content is."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, _, named = line.partition(":")
        controllers, _, path = named.partition(":")
        inside = path.strip("/")
        if controllers == "":
            places = [
                root / inside / "memory.events",
                root / "memory.events",
                root / "unified" / inside / "memory.events",
            ]
        elif "memory" in controllers.split(","):
            places = [root / "memory" / inside / "memory.oom_control", root / "memory" / "memory.oom_control"]
        else:
            continue
        found = next((place for place in places if place.is_file()), None)
        if found is not None:
            return found
    return None
