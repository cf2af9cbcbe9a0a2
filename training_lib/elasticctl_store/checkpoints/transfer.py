"""Copy a checkpoint from one storage to another, so that its job can continue there. Without torch.

The data is copied first, and the commit last, under its own position, so every commit listed at the target is complete.
Each object is checked against the checksum that was committed: in transit and, if an earlier try has copied it, at the
target. An interrupted copy therefore continues where it stopped. Memory is bounded: a large object is buffered in an
unnamed temporary file.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elasticctl_store.checkpoints import entries, move_target, rollbacks, verify
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.checkpoints.reader import read_contents, retry_damaged
from elasticctl_store.checkpoints.verify import CheckedCommit, OnBytes
from elasticctl_store.errors import DamagedError, ExistsError, MissingError, StorageError
from elasticctl_store.parallel import each
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.storage.cloud import CloudStorage

AT_ONCE = 4
"""Objects in flight at a time; object stores also transfer the parts of each in parallel."""
SMALL_BYTES = 16 << 20
"""Objects up to this size are copied in memory, larger ones in pieces of this size."""


@dataclass(frozen=True, slots=True)
class CheckpointObjects:
    """An intact checkpoint and all objects that belong to it."""

    commit: Commit
    objects: tuple[ObjectRef, ...]

    @property
    def size_bytes(self) -> int:
        """The size of all objects in bytes."""
        return sum(ref.size_bytes for ref in self.objects)


@dataclass(frozen=True, slots=True)
class CopyResult:
    """How many objects were sent, and how many were already intact at the target."""

    sent: int
    found: int


def newest_first(
    source: Storage, on_damage: Callable[[CheckedCommit], None] = lambda finding: None
) -> Iterator[CheckpointObjects]:
    """Yield the checkpoints that look intact, newest first; `on_damage` is called with each one that is skipped.

    If the run has gone back and committed nothing since, only those from which it may continue are yielded.
    """
    back = rollbacks.pending(source)
    for finding in verify.findings(source):
        if finding.commit is None or finding.damage:
            on_damage(finding)
            continue
        if back is not None and not back.allows(finding.commit):
            continue
        files = read_contents(source, finding.commit).files
        yield CheckpointObjects(finding.commit, (*finding.commit.shares, *files))


def find_newest(source: Storage) -> CheckpointObjects | None:
    """Return the newest checkpoint that looks intact, from which a job would resume; None if there is none."""
    return next(newest_first(source), None)


def copy_checkpoint(
    source: Storage, target: Storage, checkpoint: CheckpointObjects, on_bytes: OnBytes = lambda count: None
) -> CopyResult:
    """Copy a checkpoint's objects to the target and commit it there; `on_bytes` is called with the size of each copied
    object.

    Raises StorageError; DamagedError or MissingError if the checkpoint is not what was committed.
    """
    move_target.check(source, target)
    folders = (checkpoint.commit.folder, *checkpoint.commit.bases)
    there = {key for folder in folders for key in all_keys(target, folder)}
    lock, sent = threading.Lock(), 0

    def copy(ref: ObjectRef) -> None:
        nonlocal sent
        new = not (ref.key in there and _is_whole(target, ref))
        if new:
            retry_damaged(lambda: _send(source, target, ref), until_same=True)
        with lock:
            sent += new
        on_bytes(ref.size_bytes)

    # The largest objects first, so that none is left alone at the end.
    each(copy, sorted(checkpoint.objects, key=lambda ref: -ref.size_bytes), AT_ONCE)
    _commit(target, checkpoint.commit)
    return CopyResult(sent, len(checkpoint.objects) - sent)


def _send(source: Storage, target: Storage, ref: ObjectRef) -> None:
    if _copy_within_service(source, target, ref):
        return
    data = _fetch(source, ref)
    crc = target.put(ref.key, [data])
    found = entries.as_checksum(crc)
    if found != ref.checksum:
        raise DamagedError(f"{ref.key}: it was damaged in transit to {target.url}", found=found)


def _copy_within_service(source: Storage, target: Storage, ref: ObjectRef) -> bool:
    """Have the service copy the object itself, if both ends are on one service. Return False if it did not, or not
    intact."""
    if not (isinstance(source, CloudStorage) and isinstance(target, CloudStorage)):
        return False
    crc = target.copy_from(source, ref.key, ref.size_bytes)
    if crc is None:
        return False
    return f"crc32:{crc}" == ref.checksum or (not crc and _is_whole(target, ref))


def _fetch(source: Storage, ref: ObjectRef) -> memoryview:
    """Read an object into memory, or into a mapped unnamed file. Raises StorageError, also if the disk is full."""
    if ref.size_bytes <= SMALL_BYTES:
        data = memoryview(bytearray(ref.size_bytes))
        if ref.size_bytes:
            source.read_into(ref.key, 0, data)
        _check(ref, zlib.crc32(data))
        return data
    try:
        with tempfile.TemporaryFile() as file:
            _check(ref, _download(source, ref, file.fileno()))
            return memoryview(mmap.mmap(file.fileno(), ref.size_bytes, access=mmap.ACCESS_READ))
    except OSError as e:
        where = tempfile.gettempdir()
        fix = "free some space there, or set TMPDIR"
        raise StorageError(f"cannot buffer {ref.key} in {where}: {e.strerror}. FIX: {fix}") from e


def _download(source: Storage, ref: ObjectRef, descriptor: int) -> int:
    """Write an object to a file, one piece at a time; return its CRC-32."""
    buffer, crc = memoryview(bytearray(SMALL_BYTES)), 0
    for start in range(0, ref.size_bytes, SMALL_BYTES):
        piece = buffer[: min(SMALL_BYTES, ref.size_bytes - start)]
        source.read_into(ref.key, start, piece)
        crc = zlib.crc32(piece, crc)
        written = 0
        while written < len(piece):
            written += os.pwrite(descriptor, piece[written:], start + written)
    return crc


def _is_whole(target: Storage, ref: ObjectRef) -> bool:
    """Return whether the object at the target is exactly what was committed."""
    buffer, crc = memoryview(bytearray(min(SMALL_BYTES, ref.size_bytes + 1))), 0
    try:
        for start in range(0, ref.size_bytes, SMALL_BYTES):
            piece = buffer[: min(SMALL_BYTES, ref.size_bytes - start)]
            target.read_into(ref.key, start, piece)
            crc = zlib.crc32(piece, crc)
        return entries.as_checksum(crc) == ref.checksum and _ends_there(target, ref)
    except (MissingError, DamagedError):
        return False


def _ends_there(target: Storage, ref: ObjectRef) -> bool:
    """Return whether the object at the target has no more bytes than it should."""
    try:
        target.read_into(ref.key, ref.size_bytes, memoryview(bytearray(1)))
    except DamagedError:
        return True
    return False


def _check(ref: ObjectRef, crc: int) -> None:
    found = entries.as_checksum(crc)
    if found != ref.checksum:
        raise DamagedError(f"{ref.key}: its checksum does not match", found=found)


def _commit(target: Storage, commit: Commit) -> None:
    """Make the checkpoint visible; an earlier try may have done so."""
    data = entries.encode(commit)
    key = entries.key_of(commit.position)
    try:
        target.put(key, [data], if_absent=True)
    except ExistsError as e:
        if target.get(key) != data:
            raise StorageError(f"{target.url}: there is another checkpoint already. FIX: choose an empty target") from e
