"""`CopyHolder`: keeps copies of shares in this launcher's memory, those of its own ranks and of one other launcher.

A rank writes its share to the folder of copies and reports it on a Unix socket (`CopyRequest`, `CopyAnswer`).

The copies go to the next launcher in the group that is on another host, or to the next one if all share one host.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import shutil
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from elasticctl_launcher.peers.copy_protocol import CopiedFile, PeerError, receive_files, send_files
from elasticctl_launcher.system import serve_connections, start_thread
from elasticctl_protocol.local import CopyAnswer, CopyRequest, to_line
from elasticctl_protocol.requests import WIRE, Member
from elasticctl_store.checkpoints.entries import DATA, save_of
from elasticctl_store.parallel import CGROUP

KEPT_SAVES = 2
"""While one save is being written, the previous one has to be complete."""
MAX_CONNECTIONS = 64
MAX_LINE_BYTES = 8 << 10
CONNECT_TIMEOUT_S = 5.0
ALONE = "this is the only worker"
MARGIN_BYTES = 256 << 20
"""The memory that copies leave to other users."""
MEMINFO = Path("/proc/meminfo")

log = logging.getLogger(__name__)


class CopyHolder:
    """Listens on TCP at `host`, and on the Unix socket `path` for this worker's ranks, until `close`.

    `folder` holds the copies. `read_key()` returns a secret that only this job's workers have. Raises OSError.
    """

    def __init__(self, host: str, path: str, folder: Path, read_key: Callable[[], bytes]) -> None:
        self.path, self.folder = path, folder
        self._read_key = read_key
        self._lock = threading.Lock()
        self._find_peer: Callable[[], tuple[str, int] | None] = lambda: None
        self._todo: queue.SimpleQueue[list[CopiedFile] | None] = queue.SimpleQueue()
        self._sending, self._lack = 0, "no copy was made yet"
        folder.mkdir(mode=0o700, exist_ok=True)
        self._tcp = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MAX_CONNECTIONS
        )
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(path)
        self._unix.listen(MAX_CONNECTIONS)
        self.address: tuple[str, int] = (host, self._tcp.getsockname()[1])
        for work in (
            lambda: serve_connections(self._tcp, self._receive, "copies-line", MAX_CONNECTIONS),
            lambda: serve_connections(self._unix, self._answer, "copies-line", MAX_CONNECTIONS),
            self._send_all,
        ):
            start_thread(work, name="copies")

    def join_group(self, find_peer: Callable[[], tuple[str, int] | None]) -> None:
        """Send copies to the address that `find_peer()` returns, from now on.

        It is called from a thread; None means that there is no other worker.
        """
        with self._lock:
            self._find_peer = find_peer

    def close(self) -> None:
        """Stop listening and sending."""
        self._todo.put(None)
        for server in (self._tcp, self._unix):
            with suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()

    def _receive(self, line: socket.socket) -> None:
        with suppress(OSError):
            try:
                key = self._read_key()
                receive_files(line, key, self.folder, lambda size_bytes: why_no_room(self.folder, size_bytes))
            except PeerError as error:
                log.warning("a copy from another worker was refused: %s", error)
            for own in self.folder.iterdir():
                delete_old_saves(own)

    def _answer(self, line: socket.socket) -> None:
        with suppress(OSError, ValueError, TypeError, RecursionError), line.makefile("rb") as asked:
            while request := asked.readline(MAX_LINE_BYTES):
                line.sendall(to_line(self._reply(WIRE.decode(CopyRequest, json.loads(request)))))

    def _reply(self, request: CopyRequest) -> CopyAnswer:
        if request.room is not None:
            return CopyAnswer(refused=why_no_room(self.folder, request.room))
        if request.copied is not None:
            try:
                files = [CopiedFile(*row) for row in request.copied]
                if not files:
                    raise PeerError("no file was copied")
            except (TypeError, PeerError) as error:
                return CopyAnswer(refused=str(error))
            with self._lock:
                self._sending += 1
            self._todo.put(files)
            delete_old_saves(self.folder / files[0].name.partition("/")[0])
        with self._lock:
            return CopyAnswer(sending=self._sending > 0, lack=self._lack)

    def _send_all(self) -> None:
        while (files := self._todo.get()) is not None:
            lack = self._send(files)
            with self._lock:
                self._sending -= 1
                is_news, self._lack = bool(lack) and lack != self._lack, lack
            if is_news and lack != ALONE:
                log.warning("the state of this worker's ranks is not copied to another worker: %s", lack)

    def _send(self, files: Sequence[CopiedFile]) -> str:
        """Send a share to the next launcher; return why that failed, or an empty string."""
        try:
            peer = self._find_peer()
            if peer is None:
                return ALONE
            with contextlib.closing(socket.create_connection(peer, CONNECT_TIMEOUT_S)) as line:
                send_files(line, self._read_key(), self.folder, files)
        except (PeerError, OSError, RuntimeError) as error:  # RuntimeError: the group's store is gone
            return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        return ""


def delete_old_saves(folder: Path) -> None:
    """Keep the newest saves in a folder of copies, and delete the others."""
    with suppress(OSError):
        saves = [(save.order, path) for path in (folder / DATA).iterdir() if (save := save_of(f"{DATA}{path.name}/"))]
        for _, path in sorted(saves)[:-KEPT_SAVES]:
            shutil.rmtree(path, ignore_errors=True)


def find_peer(
    members: Sequence[Member], mine: int, read_address: Callable[[int], str | None]
) -> tuple[str, int] | None:
    """Return the (host, port) that receives the copies of member number `mine`; None if there is no other member.

    `read_address(number)` returns the `host:port` that a member has published. Raises PeerError if it has not yet.
    """
    ring = [number % len(members) for number in range(mine + 1, mine + len(members))]
    if not ring:
        return None
    other = next((number for number in ring if members[number].host != members[mine].host), ring[0])
    host, _, port = (read_address(other) or "").rpartition(":")
    if not port.isdigit():
        raise PeerError(f"{members[other].name} does not accept copies")
    return host, int(port)


def peer_of(
    holder: CopyHolder, members: Sequence[Member], mine: int, store: Any
) -> Callable[[], tuple[str, int] | None]:
    """Publish the address of `holder` in the group's store; return a function that finds the peer for its copies.

    The function reads the store until it has found the peer, and then remembers it. It raises PeerError if the peer has
    not published its address yet, and RuntimeError if the store is gone.
    """
    host, port = holder.address
    with suppress(RuntimeError):
        store.set(f"copies/{mine}", f"{host}:{port}")
    found: list[tuple[str, int] | None] = []

    def read_address(number: int) -> str | None:
        key = f"copies/{number}"
        return store.get(key).decode() if store.check([key]) else None

    def find() -> tuple[str, int] | None:
        if not found:
            found.append(find_peer(members, mine, read_address))
        return found[0]

    return find


def why_no_room(folder: Path, size_bytes: int) -> str:
    """Return why `size_bytes` more do not fit into `folder`, which is in shared memory; empty if they do."""
    left = min(_left_bytes(folder))
    if size_bytes + MARGIN_BYTES <= left:
        return ""
    return f"{size_bytes >> 20} MB do not fit in the host's memory: {max(0, left - MARGIN_BYTES) >> 20} MB are left"


def _left_bytes(folder: Path) -> list[int]:
    found = os.statvfs(folder)
    left = [found.f_bavail * found.f_frsize]
    with suppress(OSError):
        found_kb = re.search(r"^MemAvailable: +(\d+) kB$", MEMINFO.read_text(), re.MULTILINE)
        left += [int(found_kb[1]) << 10] if found_kb else []
    with suppress(OSError, ValueError):  # no limit is the word "max"
        left.append(int((CGROUP / "memory.max").read_text()) - int((CGROUP / "memory.current").read_text()))
    return left
