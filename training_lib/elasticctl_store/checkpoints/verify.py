"""Checkpoints from the outside, for whoever has no torch: are they whole, what is in them, their tensors as one file.

A share document says which pieces of which tensors lie where in its tensor file (see `shares`). Everything is read from
end to end and checked against its checksum before it is believed.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from elasticctl_store.checkpoints import commits as journal
from elasticctl_store.checkpoints import documents
from elasticctl_store.checkpoints import entries as commits
from elasticctl_store.checkpoints.boxes import Box
from elasticctl_store.checkpoints.entries import Commit, ObjectRef
from elasticctl_store.errors import DamagedError, MissingError, TrainError
from elasticctl_store.storage import Storage

DTYPES: Mapping[str, tuple[str, int]] = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "complex128": ("F64", 16),
    "complex64": ("F32", 8),
}
"""A dtype's name -> what safetensors files call it, and the bytes of an element; complex numbers are pairs."""

_CHUNK_BYTES = 32 << 20
_AT_ONCE = 4
_GLANCES_AT_ONCE = 16
_HEADER_ALIGNMENT = 64

OnBytes = Callable[[int], None]
"""Is told how many bytes more have been read; called from several threads."""


@dataclass(frozen=True, slots=True)
class CheckedCommit:
    """An entry of the journal that is, or should be, a commit. `damage` says what is wrong with it; empty: nothing."""

    position: int
    commit: Commit | None
    damage: str = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a state: its name in the pieces, dtype and whole shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the tensor called `name`, and the first byte in the tensor file at which it lies, row by row."""

    name: str
    dtype: str
    box: Box
    start: int

    @property
    def size_bytes(self) -> int:
        """How many bytes it has."""
        return self.box.elements * DTYPES[self.dtype][1]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint consists of: the state tree as JSON, and of each share the tensor file and its pieces."""

    state: Any
    shares: tuple[tuple[ObjectRef, tuple[Piece, ...]], ...]


def findings(storage: Storage) -> Iterator[CheckedCommit]:
    """The commits, newest first, each after a glance: its documents are read and checked, its files looked for.

    Many are looked at ahead of the one that is yielded, because each takes some round trips. Raises StorageError.
    """
    pool = ThreadPoolExecutor(_GLANCES_AT_ONCE)
    try:
        for finding in pool.map(lambda position: _glance(storage, position), journal.positions(storage)):
            if finding is not None:
                yield finding
    finally:
        pool.shutdown(cancel_futures=True)


def verify(storage: Storage, commit: Commit, on_bytes: OnBytes) -> None:
    """Read every byte of a checkpoint. Raises DamagedError or MissingError unless all is there as it was written."""
    contents = read(storage, commit)
    _read_all(storage, contents, lambda piece, at, data: None, on_bytes)


def read(storage: Storage, commit: Commit) -> Contents:
    """Read and check a checkpoint's share documents. Raises DamagedError or MissingError."""
    found = documents.fetch(storage, commit)
    try:
        shares = tuple((ObjectRef(**doc["tensors"]), tuple(_piece(*row) for row in doc["pieces"])) for doc in found)
        contents = Contents(found[0]["state"], shares)
        _check_complete(contents)
    except (KeyError, TypeError, ValueError) as e:
        raise DamagedError(f"{commit.folder}: not share documents of this version: {e!r:.80}") from e
    return contents


def pull(storage: Storage, commit: Commit, part: str, target: Path, on_bytes: OnBytes) -> int:
    """Write the tensors of one part of the state to a safetensors file, bit by bit; returns how many.

    The file is there when it is whole; another one of that name is replaced. Raises TrainError for a part that is not
    there, DamagedError, MissingError and OSError.
    """
    contents = read(storage, commit)
    if not isinstance(contents.state, dict) or part not in contents.state:
        known = ", ".join(sorted(contents.state))
        raise TrainError(f"the checkpoint of step {commit.step} has no part {part!r}, only {known}")
    wanted = dict(tensors_of(contents.state[part]))
    header, places = _laid_out(wanted)
    by_name: dict[str, list[int]] = {}
    for key, tensor in wanted.items():
        by_name.setdefault(tensor.name, []).append(places[key])
    shapes = {tensor.name: tensor.shape for tensor in wanted.values()}
    partial = target.with_name(f"{target.name}.partial")
    try:
        with partial.open("wb", buffering=0) as file:
            os.pwrite(file.fileno(), header, 0)
            os.truncate(file.fileno(), len(header) + sum(tensor.size_bytes for tensor in wanted.values()))

            def put(piece: Piece, at: int, data: memoryview) -> None:
                for place in by_name.get(piece.name, ()):
                    for start, run in _runs(piece, shapes[piece.name], at, data):
                        _write(file.fileno(), run, len(header) + place + start)

            _read_all(storage, contents, put, on_bytes)
            os.fsync(file.fileno())
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return len(wanted)


def tensors_of(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a state tree (as JSON) by path, joined by dots: in a model, the names of its `state_dict()`."""
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from tensors_of(item, f"{path}.{index}" if path else str(index))
    elif not isinstance(tree, dict):
        return
    elif "$tensor" in tree:
        yield path, Tensor(tree["$tensor"], tree["dtype"], tuple(tree["shape"]))
    elif "$tuple" in tree:
        yield from tensors_of(tree["$tuple"], path)
    else:
        for key, item in tree.get("$map", tree.items()):
            yield from tensors_of(item, f"{path}.{key}" if path else str(key))


def _glance(storage: Storage, position: int) -> CheckedCommit | None:
    """What is wrong with a commit as far as a glance tells; None for an entry that is none."""
    try:
        entry = journal.read_entry(storage, position)
    except DamagedError as e:
        return CheckedCommit(position, None, str(e))
    except MissingError:
        return None  # deleted since it was listed
    if not isinstance(entry, Commit):
        return None
    try:
        last_byte = memoryview(bytearray(1))
        for file, _ in read(storage, entry).shares:
            storage.read_into(file.key, file.size_bytes - 1, last_byte)
    except (DamagedError, MissingError) as e:
        return CheckedCommit(position, entry, str(e))
    return CheckedCommit(position, entry)


def _piece(name: str, dtype: str, offset: list[int], shape: list[int], start: int) -> Piece:
    if dtype not in DTYPES:
        raise DamagedError(f"tensor {name!r}: {dtype!r} is no dtype that a checkpoint can hold")
    return Piece(name, dtype, Box(tuple(offset), tuple(shape)), start)


def _check_complete(contents: Contents) -> None:
    """Raise DamagedError unless the pieces have all elements of the state's tensors, and lie within their files."""
    stored: dict[str, int] = {}
    for file, pieces in contents.shares:
        for piece in pieces:
            if not 0 <= piece.start <= file.size_bytes - piece.size_bytes:
                raise DamagedError(f"{file.key}: a piece lies outside its file")
            stored[piece.name] = stored.get(piece.name, 0) + piece.box.elements
    for _, tensor in tensors_of(contents.state):
        if stored.get(tensor.name, 0) != prod(tensor.shape):
            raise DamagedError(f"tensor {tensor.name!r}: {stored.get(tensor.name, 0)} of its elements are stored")


def _read_all(
    storage: Storage, contents: Contents, sink: Callable[[Piece, int, memoryview], None], on_bytes: OnBytes
) -> None:
    """Read all tensor files from end to end; `sink` gets each piece's bytes as they come, and where in it they are."""

    def read_file(share: tuple[ObjectRef, tuple[Piece, ...]]) -> None:
        documents.twice(lambda: _read_file(storage, share, sink, on_bytes))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(read_file, contents.shares):
            pass


def _read_file(
    storage: Storage,
    share: tuple[ObjectRef, tuple[Piece, ...]],
    sink: Callable[[Piece, int, memoryview], None],
    on_bytes: OnBytes,
) -> None:
    file, pieces = share
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, file.size_bytes)))

    def chunks() -> Iterator[memoryview]:
        for start in range(0, file.size_bytes, _CHUNK_BYTES):
            chunk = buffer[: min(_CHUNK_BYTES, file.size_bytes - start)]
            storage.read_into(file.key, start, chunk)
            for piece in pieces:
                first, end = max(piece.start, start), min(piece.start + piece.size_bytes, start + len(chunk))
                if first < end:
                    sink(piece, first - piece.start, chunk[first - start : end - start])
            on_bytes(len(chunk))
            yield chunk

    if commits.checksum(chunks()) != file.checksum:
        raise DamagedError(f"{file.key}: its checksum does not match")


def _laid_out(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file of these tensors, and where each begins behind it."""
    entries: dict[str, Any] = {}
    places: dict[str, int] = {}
    end = 0
    for key in sorted(tensors, key=lambda key: (-DTYPES[tensors[key].dtype][1], key)):
        tensor = tensors[key]
        pairs = [2] if tensor.dtype.startswith("complex") else []
        places[key] = end
        end += tensor.size_bytes
        dtype = DTYPES[tensor.dtype][0]
        entries[key] = {"dtype": dtype, "shape": [*tensor.shape, *pairs], "data_offsets": [places[key], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _HEADER_ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, places


def _runs(piece: Piece, shape: tuple[int, ...], at: int, data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Where bytes of a piece, from its byte `at` on, lie in the whole tensor, as (first byte, bytes) in one piece each.

    A run goes through all dimensions that the box spans, and through the one before them.
    """
    box, item_bytes = piece.box, DTYPES[piece.dtype][1]
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


def _write(descriptor: int, data: memoryview, start: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, start)
        data, start = data[written:], start + written
