"""The local tier: the newest snapshot of each rank, kept in its node's shared memory.

The launcher creates a private folder under /dev/shm that outlives its ranks, and names it in $ELASTICCTL_LOCAL_TIER.
The buffers that ranks save from are files there:

    <URL>/g<generation>-r<rank>-<0 or 1>.data    whole tensor files, as they were stored, and some spare room
    <URL>/g<generation>-r<rank>-<0 or 1>.json    the objects in it, and where each starts: key, size, checksum

The second file exists only once these objects have been stored, and is deleted before the first is written to again. A
save is written to the buffer that does not hold the last snapshot known to be committed. A restore uses a file for an
object of the commit only if all three agree, and also verifies the bytes. Files of an older generation are never
written to, because a process that was thought dead may still map them; they are deleted once this one has a commit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import mmap
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from elasticctl_protocol import variables
from elasticctl_store.checkpoints.entries import ObjectRef, folder_of

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class FileAddress:
    """Where a file can be opened, and its identity: the inode on its device under this boot of the kernel.

    The data begins at byte `start`.
    """

    path: str
    boot: str
    device: int
    inode: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class LocalObject:
    """An object in a file, from byte `start` on."""

    path: Path
    start: int = 0


def reserve(size_bytes: int) -> tuple[torch.Tensor, BinaryIO] | None:
    """Return untouched memory (uint8) that other processes can map, and its file; None if that is not possible.

    Close the file once the others have mapped it.
    """
    if size_bytes == 0 or not hasattr(os, "memfd_create"):
        return None
    try:
        file = os.fdopen(os.memfd_create("elasticctl-restore"), "r+b", buffering=0)
    except OSError:
        return None
    try:
        os.truncate(file.fileno(), size_bytes)
        return torch.frombuffer(mmap.mmap(file.fileno(), size_bytes), dtype=torch.uint8), file
    except OSError:
        file.close()
        return None


def map_file(file: BinaryIO) -> torch.Tensor:
    """Return the contents of a file (uint8), which must not be written to. Raises OSError; ValueError if it is
    empty."""
    memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch requires writable memory
    return torch.frombuffer(memory, dtype=torch.uint8)


def address_of(file: BinaryIO, start: int = 0) -> FileAddress | None:
    """Return where other processes find an open file, from `start` on, while it is open; None if they cannot."""
    with suppress(OSError):
        found = os.fstat(file.fileno())
        return FileAddress(
            f"/proc/{os.getpid()}/fd/{file.fileno()}", BOOT_ID_FILE.read_text(), found.st_dev, found.st_ino, start
        )
    return None


def map_address(spot: FileAddress) -> torch.Tensor | None:
    """Return the contents of another process's file (uint8), which must not be written to; None if it is not visible
    here."""
    with suppress(OSError, ValueError):
        if BOOT_ID_FILE.read_text() != spot.boot:
            return None
        found = os.stat(spot.path)  # before open, which could block on another kind of file
        if (found.st_dev, found.st_ino) == (spot.device, spot.inode):
            with open(spot.path, "rb") as file:
                return map_file(file)[spot.start :]
    return None


log = logging.getLogger("elasticctl_train")

MARGIN_BYTES = 64 << 20
"""How much of the shared memory is left to others, such as NCCL and DataLoader workers."""


class Tier:
    """One rank's view of the tier for one storage URL."""

    def __init__(self, folder: Path, rank: int, generation: int) -> None:
        self._folder, self._rank, self._generation = folder, rank, generation

    @classmethod
    def open(cls, url: str, rank: int, generation: int, environ: Mapping[str, str] = os.environ) -> Tier | None:
        """Return the tier of this node; None if there is none, or if other users could write to it."""
        base = environ.get(variables.LOCAL_TIER)
        if not base:
            return None
        try:
            found = os.stat(base)
            if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
                log.warning("$%s=%s is not private to this user (mode 0700): not used", variables.LOCAL_TIER, base)
                return None
            folder = Path(base, hashlib.sha256(url.encode()).hexdigest()[:16])
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as e:
            log.warning("$%s=%s cannot be used: %s", variables.LOCAL_TIER, base, e.strerror)
            return None
        return cls(folder, rank, generation)

    def offers(self) -> dict[ObjectRef, LocalObject]:
        """Return the objects whose bytes are here, by their description; the bytes have not been read yet."""
        found = {}
        for label in sorted(self._folder.glob("*.json")):
            data = label.with_suffix(".data")
            with suppress(OSError, ValueError, TypeError, KeyError):
                for said in json.loads(label.read_bytes()):
                    ref, start = ObjectRef(**said["object"]), said["start"]
                    if data.stat().st_size >= start + ref.size_bytes:
                        found[ref] = LocalObject(data, start)
        return found

    def clear(self, but_for: str = "") -> bool:
        """Delete what older generations left, except objects in the save folder `but_for`; return whether anything was
        kept."""
        kept = {offer.path.stem for ref, offer in self.offers().items() if but_for and folder_of(ref.key) == but_for}
        kept_any = False
        for path in self._folder.glob("g*-*"):
            if path.name[: len("g000000")] >= f"g{self._generation:06d}":
                continue
            if path.stem in kept:
                kept_any = True
            else:
                with suppress(OSError):
                    path.unlink()
        return kept_any

    def create(self, index: int, size_bytes: int) -> mmap.mmap | None:
        """Create this rank's buffer number `index` with all its memory reserved; return None if it does not fit."""
        path = self._path(index)
        try:
            path.unlink(missing_ok=True)
            room = os.statvfs(self._folder)
            if room.f_bavail * room.f_frsize < size_bytes + MARGIN_BYTES:
                raise OSError(errno.ENOSPC, "too small")
            with _create_file(path) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes)
                return mmap.mmap(file.fileno(), size_bytes)
        except OSError as e:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            log.info("no local tier on this node: %s MB in %s: %s", size_bytes >> 20, self._folder.parent, e.strerror)
            return None

    def label(self, index: int, objects: Mapping[ObjectRef, int]) -> None:
        """Record that buffer `index` holds these objects, which have been stored, and at which byte each starts."""
        label = self._path(index).with_suffix(".json")
        partial = label.with_suffix(".partial")
        with suppress(OSError):  # the tier is only an optimization
            partial.write_text(json.dumps([{"object": asdict(ref), "start": at} for ref, at in objects.items()]))
            partial.replace(label)

    def unlabel(self, index: int) -> None:
        """Record that buffer `index` holds nothing any more, because it is about to be written to."""
        self._path(index).with_suffix(".json").unlink(missing_ok=True)

    def _path(self, index: int) -> Path:
        return self._folder / f"g{self._generation:06d}-r{self._rank:05d}-{index}.data"


def _create_file(path: Path):  # type: ignore[no-untyped-def]
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "r+b", buffering=0)
