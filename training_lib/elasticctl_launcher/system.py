"""Operating system services for the launcher: file descriptors, connections, orphans, and out-of-memory kills."""

from __future__ import annotations

import errno
import os
import re
import resource
import socket
import subprocess
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
"""The errors of `accept` once a listening socket has been closed or shut down."""


def raise_file_limit() -> None:
    """Raise the limit of open files for this process and its ranks to the hard limit; ignore a refusal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):  # macOS enforces a lower limit than the one it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def serve_connections(
    server: socket.socket, serve: Callable[[socket.socket], None], name: str, most: int = 1024
) -> None:
    """Call `serve(connected)`, in a thread called `name`, for each connection to `server`, until `server` is closed.

    Closes each connection once it has been served. Closes connections beyond the `most` that are open at a time at
    once. A lack of file descriptors or threads, or a caller that has already gone, does not end the loop.
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
        if not slots.acquire(blocking=False):
            connected.close()
            continue
        try:
            start_thread(run, connected, name=name)
        except OSError:
            slots.release()
            connected.close()


def start_thread(run: Callable[..., None], *arguments: object, name: str) -> threading.Thread:
    """Start a daemon thread. Raises OSError if the system allows this process no more of them."""
    thread = threading.Thread(target=run, args=arguments, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(
            f"cannot start the thread {name!r}: {error}. FIX: allow this worker more processes and threads"
            " (`ulimit -u`, the PID limit of the container), or start fewer in the script"
        ) from error
    return thread


def code_of_ended(process: subprocess.Popen[bytes], *, wait: bool = False) -> int | None:
    """Return the code of a child as `Popen.returncode` has it, but do not reap it; None if it runs, unless `wait`.

    Until it is reaped, the kernel gives neither its pid nor its process group's number to another process.
    """
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.wait() if wait else process.poll()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG))
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class OrphanReaper:
    """Reaps the children that this process has adopted as the first process of its container, or as a subreaper.

    `own_pids()` returns the children that other code waits for. Any other child is reaped once it has been dead for a
    whole round, so that the code that started it, perhaps in a library, has had time to wait for it.
    """

    def __init__(self, own_pids: Callable[[], Iterable[int]]) -> None:
        self._own_pids = own_pids
        self._dead_before: set[int] = set()
        self._closed = threading.Event()

    def start(self) -> None:
        """Start a thread, if this is the first process of its namespace; no other process adopts orphans."""
        if os.getpid() == 1 and sys.platform == "linux":
            start_thread(self._run, name="orphans")

    def close(self) -> None:
        """Stop; returns immediately."""
        self._closed.set()

    def reap(self) -> list[int]:
        """Reap the children that were already dead at the last call; return their pids."""
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
    """The children of this process that have ended and have not been waited for; none where there is no /proc."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) == os.getpid():
                found.add(int(folder.name))
    return found


class MemoryKills:
    """Counts the out-of-memory kills in this process's control group, of version 2 or 1.

    `membership` is the file that names the group; `root` is where control groups are mounted.
    """

    def __init__(self, root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> None:
        self._file = _find_kill_counter(root, membership)

    def count(self) -> int:
        """Return the count so far; 0 if the system does not report it."""
        if self._file is None:
            return 0
        try:
            found = re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE)
        except OSError:
            return 0
        return int(found[1]) if found else 0


def _find_kill_counter(root: Path, membership: Path) -> Path | None:
    """The file with a line `oom_kill N`.

    In a container, the group's own path may not be mounted, but its files are at the root.
    """
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
