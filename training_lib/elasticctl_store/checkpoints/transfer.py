"""Copy a checkpoint from one storage to another, so that its job can continue there.

The data is copied first, and the commit last, under its own position, so every commit listed at the target is complete.
Each object is checked against the checksum that was committed: in transit and, if an earlier try has copied it, at the
target. An interrupted copy therefore continues where it stopped. Memory is bounded: a large object is buffered in an
unnamed temporary file.

The target is held while the job's own storage is open, and released once that is closed. A hold is an entry of the
target's journal which says that the job continues at the *source*, so no run can take over the target. Its position is
that of the move in the source's journal, where no commit can be; the copied commit has a lower position. The release is
an entry after it.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from elasticctl_store.checkpoints import commits, entries, repair, run_records, verify
from elasticctl_store.checkpoints.entries import Commit, Generation, Moved, ObjectRef
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
    back = run_records.pending_rollback(source)
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
    check_target(source, target)
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


_TRIAL = "trial-of-a-move"


def check_target(source: Storage, target: Storage) -> None:
    """Raise StorageError if a run has used the target, or if another job is being moved to it."""
    for _, entry in commits.read_entries(target):
        if isinstance(entry, Generation):
            raise StorageError(f"{target.url}: a job has been running there. FIX: choose an empty target")
        if isinstance(entry, Moved) and entry.to != source.url:
            raise StorageError(
                f"{target.url}: the job of {entry.to} has moved there, or is about to. FIX: choose an empty target"
            )


def check_writable(target: Storage) -> None:
    """Raise StorageError if this process may not write to the target."""
    target.put(_TRIAL, [b"to see whether a job can be moved here"])
    with suppress(StorageError):  # a move does not need the right to delete
        target.delete([_TRIAL])


def hold_target(source: Storage, target: Storage, position: int) -> None:
    """Keep every run from taking over the target until `release_target`.

    `position` is that of the move's own entry in the source's journal. Raises StorageError as `check_target` does.
    """
    check_target(source, target)
    key = entries.key_of(position)
    mine = Moved(position, 0, source.url, time.time())
    with suppress(ExistsError):  # another job's, which `check_target` finds below
        target.put(key, [entries.encode(mine)], if_absent=True)
    try:
        check_target(source, target)  # if two jobs are moved there at the same time, each sees the other
    except StorageError:
        if commits.read_entry(target, position) == mine:
            target.delete([key])
        raise


def release_target(source: Storage, target: Storage) -> None:
    """Let the job continue at the target. May be repeated. Raises StorageError if the source is not closed."""
    moved = commits.moved_to(source)
    if moved is None or moved.to != target.url:
        raise StorageError(f"{source.url}: it has not been moved to {target.url}")
    for position, entry in commits.read_entries(target):
        if isinstance(entry, Moved) and entry.to == source.url:
            start = Generation(position + 1, moved.generation, secrets.token_hex(4), socket.gethostname(), time.time())
            with suppress(ExistsError):  # an earlier try of the same move
                target.put(entries.key_of(start.position), [entries.encode(start)], if_absent=True)
        return


def discard_copies(source: Storage, target: Storage) -> None:
    """Delete what was copied to a target that is still held for this source, because the job continues elsewhere.

    Does nothing if the target's journal contains anything else. Raises StorageError.
    """
    found = dict(commits.read_entries(target))
    holds = {position for position, entry in found.items() if isinstance(entry, Moved) and entry.to == source.url}
    copies = [entry for entry in found.values() if isinstance(entry, Commit)]
    if not holds or max(holds) != max(found) or len(holds) + len(copies) != len(found):
        return
    for copy in copies:
        commits.delete_commit(target, copy)
    target.delete(list(repair.save_keys(target)))
    run_records.delete_records(target)
    target.delete([entries.key_of(position) for position in sorted(holds)])
