"""The places of scenarios: a folder, a small disk, and buckets on real servers of S3 and GCS.

The servers are versitygw and fake-gcs-server, on a small disk of their own.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from elasticctl_store import storage as storages
from elasticctl_store.errors import StorageError
from elasticctl_store.storage import Patience, Storage
from tests.support import servers
from tests.support.broken_network import BrokenNetwork, Link
from tests.support.cleanup import memory_folder
from tests.support.ports import free_port
from tests.support.storage_soak.lies import LyingFolder, LyingGate
from tests.support.waiting import wait_until

QUICK = Patience(tries=12, first_pause_s=0.005, longest_pause_s=0.05, silence_s=30.0)
"""No scenario has a server that is silent without end; one that gets no processor is silent for seconds."""
DISK_BYTES, SERVERS_DISK_BYTES = 600_000, 8_000_000


@dataclass(frozen=True, slots=True)
class Place:
    """One scenario's URL.

    `root`: its files, where it is a folder. `files`: also those of a server. `disk`: the small disk they lie on.
    """

    kind: str
    url: str
    root: Path | None = None
    files: Path | None = None
    disk: Path | None = None
    liar: LyingFolder | LyingGate | None = None
    link: Link | None = None
    opened: list[Storage] = field(default_factory=list)

    @property
    def gate(self) -> LyingGate | None:
        """What stands before a server."""
        return self.liar if isinstance(self.liar, LyingGate) else None

    def open(self) -> Storage:
        """A client: the same each time, because one of S3 takes a tenth of a second to make."""
        if not self.opened:
            self.opened.append(storages.open(self.url, QUICK))
        return self.opened[0]

    def trusted(self) -> AbstractContextManager[None]:
        """While it lasts, no answer is a lie."""
        return self.liar.trusted() if self.liar is not None else nullcontext()

    def free_bytes(self) -> int:
        """How much room there is."""
        assert self.disk is not None
        found = os.statvfs(self.disk)
        return found.f_bavail * found.f_frsize

    def fill(self, leave_bytes: int) -> None:
        """Have somebody else's file take the room but for so many bytes."""
        assert self.disk is not None
        self.empty()
        with suppress(OSError), (self.disk / "of-somebody-else").open("wb", buffering=0) as file:
            file.write(bytes(max(0, self.free_bytes() - leave_bytes)))

    def is_filled(self) -> bool:
        """Whether that file exists."""
        return self.disk is not None and (self.disk / "of-somebody-else").exists()

    def empty(self) -> None:
        """Take that file away."""
        assert self.disk is not None
        (self.disk / "of-somebody-else").unlink(missing_ok=True)


@contextmanager
def small_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A file system of its own in memory, with so much room, for a test that `needs` tmpfs."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Places:
    """Makes places, and the servers once; a context."""

    def __init__(self) -> None:
        self._stack, self._numbers = ExitStack(), itertools.count()
        self._ports: dict[str, int] = {}

    def __enter__(self) -> Places:
        self.folder = memory_folder()
        self.folder.chmod(0o711)  # for runs of somebody else
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def place(self, kind: str) -> Iterator[Place]:
        """Yield an unused URL."""
        name = f"{kind}-{next(self._numbers)}"
        with ExitStack() as stack:
            if kind == "folder":
                root = self.folder / name / "state"
                stack.callback(shutil.rmtree, root.parent, ignore_errors=True)
                liar = LyingFolder(root, QUICK)
                yield Place(kind, str(root), root, root, None, liar, None, [liar])
            elif kind == "disk":
                disk = stack.enter_context(small_disk(self.folder / name, DISK_BYTES))
                yield Place(kind, str(disk / "state"), disk / "state", disk / "state", disk)
            else:
                if not self._ports:
                    self._serve()
                gate = LyingGate(kind, self._ports[kind])
                stack.callback(gate.close)
                link = self._network.link(name, f"127.0.0.1:{gate.port}")
                port = int(link.address.rpartition(":")[2])
                url = gate.url(f"scenarios/{name}").replace(f":{gate.port}", f":{port}")
                files = self._disk / kind / servers.BUCKET / "scenarios" / name
                place = Place(kind, url, None, files, self._disk, gate, link)
                stack.callback(place.empty)
                stack.callback(shutil.rmtree, files, ignore_errors=True)
                yield place

    def _serve(self) -> None:
        disk = self._disk = self._stack.enter_context(small_disk(self.folder / "servers", SERVERS_DISK_BYTES))
        self._ports = {"s3": free_port(), "gs": free_port()}
        for kind in self._ports:
            (disk / kind / servers.BUCKET).mkdir(parents=True)
        s3_argv = ["versitygw", "--port", f"127.0.0.1:{self._ports['s3']}", "--quiet", "posix", str(disk / "s3")]
        at = f"127.0.0.1:{self._ports['gs']}"
        gs_argv = [
            "fake-gcs-server",
            "-scheme",
            "http",
            "-host",
            "127.0.0.1",
            "-port",
            at.rpartition(":")[2],
            "-public-host",
            at,
        ]
        gs_argv += ["-backend", "filesystem", "-filesystem-root", str(disk / "gs"), "-log-level", "error"]
        keys = servers.KEYS
        env = {"ROOT_ACCESS_KEY": keys["AWS_ACCESS_KEY_ID"], "ROOT_SECRET_KEY": keys["AWS_SECRET_ACCESS_KEY"]}
        for argv in (s3_argv, gs_argv):
            process = subprocess.Popen(
                argv, env={**os.environ, **env}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            self._stack.callback(process.wait)
            self._stack.callback(process.kill)
        self._network = BrokenNetwork()
        self._stack.callback(self._network.close)
        for kind, port in self._ports.items():
            probe = LyingGate(kind, port)
            storage = storages.open(probe.url("probe"), Patience(tries=1))
            wait_until(lambda: answers(storage))  # noqa: B023
            probe.close()


def answers(storage: Storage) -> bool:
    """Whether the storage answers at the moment."""
    try:
        storage.list("")
    except StorageError:
        return False
    return True
