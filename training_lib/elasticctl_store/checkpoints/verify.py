"""Verify checkpoints, and extract their tensors into one file, without torch: for `elasticctl checkpoints`.

`findings` checks every checkpoint quickly, `verify` reads every byte of one. Both accept exactly what a restore
accepts, because both use `reader`.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

from elasticctl_store.checkpoints import bitmaps, commits, entries, state_trees, tensor_files
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.checkpoints.pieces import PatchedRows, Piece, ShareContents
from elasticctl_store.checkpoints.reader import Contents, check_header, read_contents, retry_damaged
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.errors import DamagedError, MissingError, TrainError
from elasticctl_store.storage import Storage

CHUNK_BYTES = 32 << 20
_AT_ONCE = 4
_GLANCES_AT_ONCE = 16

OnBytes = Callable[[int], None]
"""Called with the number of bytes that have just been read; from several threads."""

OnPiece = Callable[[Piece, int, memoryview], None]
"""Called with some bytes of a piece and their offset in the piece; from several threads."""


@dataclass(frozen=True, slots=True)
class CheckedCommit:
    """An entry of the journal that is, or should be, a commit. `damage` describes what is wrong with it; empty:
    nothing."""

    position: int
    commit: Commit | None
    damage: str = ""


def findings(storage: Storage) -> Iterator[CheckedCommit]:
    """Yield the commits, newest first, each after a quick check: its documents are verified, its files must exist.

    Several are checked ahead of the one that is yielded, because each takes some round trips. Raises StorageError.
    """
    pool = ThreadPoolExecutor(_GLANCES_AT_ONCE)
    try:
        for finding in pool.map(lambda position: _look_at(storage, position), commits.positions(storage)):
            if finding is not None:
                yield finding
    finally:
        pool.shutdown(cancel_futures=True)


def verify(storage: Storage, commit: Commit, on_bytes: OnBytes, proven: Counter[ObjectRef] | None = None) -> None:
    """Read every byte of a checkpoint. Raises DamagedError or MissingError unless everything exists as it was written.

    `proven` counts how often in a row base files and patches were found intact: those in it must only exist. A base
    file with patches is read again each time that its count has doubled, to see what they yield together.
    """
    contents = read_contents(storage, commit)
    times = proven if proven is not None else Counter[ObjectRef]()
    unread = list[ShareContents]()
    for share in contents.shares:
        count = times[share.file]
        if not count or (share.patches and count.bit_count() == 1):
            unread.append(share)
        else:
            _look_for(storage, share.file)
            for patch in share.patches:
                if times[patch.share.file]:
                    _look_for(storage, patch.share.file)
                else:
                    unread.append(patch.share)
    _read_all(storage, dataclasses.replace(contents, shares=tuple(unread)), _drop, on_bytes)
    if proven is not None:
        counts = {file: times[file] + 1 for file in contents.base_files}
        proven.clear()
        proven.update(counts)


def check(storage: Storage, finding: CheckedCommit, on_bytes: OnBytes) -> CheckedCommit | None:
    """Return the finding after every byte has been read; None if its job has deleted it meanwhile. Raises
    StorageError."""
    if finding.commit is None or finding.damage:
        return finding
    try:
        verify(storage, finding.commit, on_bytes)
    except (DamagedError, MissingError) as e:
        return dataclasses.replace(finding, damage=str(e)) if is_listed(storage, finding.position) else None
    return finding


def pull(storage: Storage, commit: Commit, part: str, target: Path, on_bytes: OnBytes) -> int:
    """Write the tensors of one part of the state to a safetensors file, bit for bit; return how many there are.

    The file appears once it is complete, and replaces an existing one. Raises TrainError for a part that the checkpoint
    does not have, DamagedError, MissingError and OSError.
    """
    contents = read_contents(storage, commit)
    if part not in contents.state:
        known = ", ".join(sorted(contents.state))
        raise TrainError(f"the checkpoint of step {commit.step} has no part {part!r}, only {known}")
    found: dict[str, tuple[str, TensorType]] = {}
    for path, name, tensor in state_trees.tensors_by_path(contents.state[part]):
        while path in found or path == tensor_files.RESERVED_NAME:  # keys may contain dots, and 1 is not "1"
            path += "~"
        found[path] = name, tensor
    layout = tensor_files.lay_out({path: tensor for path, (_, tensor) in found.items()})
    starts: dict[str, list[int]] = {}
    for path, (name, _) in found.items():
        starts.setdefault(name, []).append(layout.starts[path])
    unfinished = target.with_name(f"{target.name}.partial")
    try:
        with unfinished.open("wb", buffering=0) as file:
            os.truncate(file.fileno(), layout.size_bytes)
            _write_at(file.fileno(), memoryview(layout.header), 0)

            def write(piece: Piece, at: int, data: memoryview) -> None:
                for start in starts.get(piece.name, ()):
                    for offset, run in runs(piece, contents.tensors[piece.name].shape, at, data):
                        _write_at(file.fileno(), run, start + offset)

            _read_all(storage, contents, write, on_bytes)
            os.fsync(file.fileno())
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(layout.starts)


def is_listed(storage: Storage, position: int) -> bool:
    """Return whether the entry still exists. If not, its data may have been deleted with it. Raises StorageError."""
    try:
        commits.read_entry(storage, position)
    except MissingError:
        return False
    except DamagedError:
        return True
    return True


def glance(storage: Storage, commit: Commit) -> None:
    """Verify a checkpoint's documents, and that its files exist. Raises DamagedError or MissingError."""
    for file in read_contents(storage, commit).files:
        _look_for(storage, file)


def _look_for(storage: Storage, file: ObjectRef) -> None:
    storage.read_into(file.key, file.size_bytes - 1, memoryview(bytearray(1)))


def _look_at(storage: Storage, position: int) -> CheckedCommit | None:
    """Return what a quick check finds about a commit; None for an entry that is not one."""
    try:
        entry = commits.read_entry(storage, position)
    except DamagedError as e:
        return CheckedCommit(position, None, str(e))
    except MissingError:
        return None  # deleted after it was listed
    if not isinstance(entry, Commit):
        return None
    try:
        glance(storage, entry)
    except (DamagedError, MissingError) as e:
        return CheckedCommit(position, entry, str(e)) if is_listed(storage, position) else None
    return CheckedCommit(position, entry)


def _read_all(storage: Storage, contents: Contents, on_piece: OnPiece, on_bytes: OnBytes) -> None:
    """Read and verify all tensor files completely. The pieces' bytes are those after all patches."""

    def read(share: ShareContents) -> None:
        for patch in share.patches:
            retry_damaged(partial(_read_file, storage, patch.share, _drop, on_bytes), until_same=True)
        retry_damaged(lambda: _read_file(storage, share, on_piece, on_bytes), until_same=True)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(read, contents.shares):
            pass


def _read_file(storage: Storage, share: ShareContents, on_piece: OnPiece, on_bytes: OnBytes) -> None:
    """Read and verify a tensor file completely, whose patches have been verified."""
    file, header = share.file, bytearray()
    buffer = memoryview(bytearray(min(CHUNK_BYTES, file.size_bytes)))
    stored = content = 0
    patching = [_Patching(patch.share.file.key, rows) for patch in share.patches for rows in patch.rows]
    for start in range(0, file.size_bytes, CHUNK_BYTES):
        chunk = buffer[: min(CHUNK_BYTES, file.size_bytes - start)]
        storage.read_into(file.key, start, chunk)
        stored = zlib.crc32(chunk, stored)
        header.extend(chunk[: max(0, share.header_bytes - start)])
        for rows in patching:
            rows.patch(storage, start, chunk)
        content = zlib.crc32(chunk, content) if share.patches else stored
        for piece in share.pieces:
            first, end = max(piece.start, start), min(piece.start + piece.size_bytes, start + len(chunk))
            if first < end:
                on_piece(piece, first - piece.start, chunk[first - start : end - start])
        on_bytes(len(chunk))
    for crc, expected in ((stored, file), (content, share.content)):
        found = entries.as_checksum(crc)
        if found != expected.checksum:
            raise DamagedError(f"{file.key}: its checksum does not match", found=found)
    check_header(share, bytes(header))


class _Patching:
    """Rows of a patch, while a base file is read from its beginning to its end."""

    def __init__(self, key: str, rows: PatchedRows) -> None:
        self._key, self._rows, self._bitmap = key, rows, rows.bitmap
        self._row = self._index = 0
        """So many rows of the patch are before this row of the piece."""

    def patch(self, storage: Storage, start: int, chunk: memoryview) -> None:
        """Replace rows in a chunk that starts at byte `start` of the base file."""
        piece, row_bytes, end = self._rows.piece, self._rows.piece.row_bytes, start + len(chunk)
        first = max(0, start - piece.start) // row_bytes
        last = -(-min(piece.size_bytes, max(0, end - piece.start)) // row_bytes)
        if first >= last:
            return
        self._index += bitmaps.count(self._bitmap, self._row, first)
        self._row = first
        places = []
        for index, row in enumerate(bitmaps.rows(self._bitmap, first, last), self._index):
            at, source = piece.start + row * row_bytes, self._rows.start + index * row_bytes
            low, high = max(at, start), min(at + row_bytes, end)
            places.append((low - start, high - start, source + low - at))
        if not places:
            return
        origin = places[0][2]
        newer = memoryview(bytearray(places[-1][2] + places[-1][1] - places[-1][0] - origin))
        storage.read_into(self._key, origin, newer)
        for low, high, source in places:
            chunk[low:high] = newer[source - origin : source - origin + high - low]


def _drop(piece: Piece, at: int, data: memoryview) -> None:
    """Do nothing with the bytes of a piece: reading them is all that is wanted."""


def runs(piece: Piece, shape: tuple[int, ...], at: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield where bytes of a piece, from its byte `at` on, belong in the whole tensor, as (first byte, contiguous
    bytes).

    A run spans all dimensions that the box covers entirely, and the one before them.
    """
    box, item_bytes = piece.box, piece.item_bytes
    strides = [prod(shape[d + 1 :]) * item_bytes for d in range(len(shape))]
    last = max((d for d in range(len(shape)) if box.shape[d] != shape[d]), default=0)
    run_bytes = box.shape[last] * strides[last] if shape else item_bytes
    corner = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    while data:
        number, within = divmod(at, run_bytes)
        start = corner + within
        for dim in range(last - 1, -1, -1):
            number, index = divmod(number, box.shape[dim])
            start += index * strides[dim]
        length = min(len(data), run_bytes - within)
        yield start, data[:length]
        at, data = at + length, data[length:]


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written
