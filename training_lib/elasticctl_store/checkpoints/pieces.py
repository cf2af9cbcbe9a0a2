"""What share documents say of tensor files: pieces, and patches of base files. `reader` describes the format."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticctl_store.checkpoints import bitmaps, entries, state_trees, tensor_files
from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.checkpoints.tensor_boxes import Box, whole
from elasticctl_store.checkpoints.tensor_files import DTYPES, TensorType
from elasticctl_store.errors import DamagedError

OWN = "$rank"
"""The first part of the names of a rank's own tensors. No part of the state can have this name."""

_MIN_FILE_BYTES = tensor_files.PREFIX_BYTES + len("{}")
_BASE_FIELDS = ({"file", "pieces"}, {"file", "pieces", "patches", "checksum"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the tensor `name`, and the byte of the tensor file at which it starts, in row-major order."""

    name: str
    dtype: str
    box: Box
    start: int

    @property
    def item_bytes(self) -> int:
        """The size of one element in bytes."""
        return DTYPES[self.dtype].item_bytes

    @property
    def size_bytes(self) -> int:
        """The size of the piece in bytes."""
        return self.box.elements * DTYPES[self.dtype].item_bytes

    @property
    def row_bytes(self) -> int:
        """The size in bytes of one row, which is what the last dimension spans."""
        return self.item_bytes * (self.box.shape[-1] if self.box.shape else 1)

    @property
    def rows(self) -> int:
        """The number of rows; 0 if it has no elements or no dimensions."""
        return self.size_bytes // self.row_bytes if self.size_bytes and self.box.shape else 0

    @property
    def is_own(self) -> bool:
        """Whether its tensor is the rank's own."""
        return self.name.startswith(f"{OWN}/")


@dataclass(frozen=True, slots=True)
class ShareContents:
    """A tensor file, the pieces in it in the order of their positions, and the own state of its rank as JSON.

    `content` is what the file is once all patches are applied, in order: `file` itself if there are none.
    """

    file: ObjectRef
    pieces: tuple[Piece, ...]
    local: Any
    content: ObjectRef
    patches: tuple[Patch, ...] = ()

    @property
    def header_bytes(self) -> int:
        """The size of the file's header in bytes: its first tensor starts there."""
        return self.pieces[0].start if self.pieces else self.file.size_bytes


@dataclass(frozen=True, slots=True)
class PatchedRows:
    """Rows of `piece`, which is in a base file. A patch holds them, in order, from `start` on.

    `text` is their bitmap as it is in the document, checked: it can be a thousand times as large.
    """

    piece: Piece
    text: str
    start: int

    @property
    def bitmap(self) -> bytes:
        """The bitmap of the rows, decoded again."""
        return bitmaps.from_text(self.text, self.piece.rows)


@dataclass(frozen=True, slots=True)
class Patch:
    """The tensor file of a patch, and the rows in it."""

    share: ShareContents
    rows: tuple[PatchedRows, ...]


def parse_file(key: str, fields: Any) -> ObjectRef:
    """Return the reference to the tensor file that belongs to a share document."""
    wanted = entries.tensors_key(key)
    return _parse_file(
        key, fields, lambda found: found == wanted, "it does not name the tensor file that belongs to it"
    )


def _parse_file(key: str, fields: Any, is_wanted: Callable[[str], bool], otherwise: str) -> ObjectRef:
    """Return a reference to a tensor file. Raises DamagedError with the words `otherwise` unless the key is wanted."""
    file = entries.parse_ref(fields)
    if file is None or not is_wanted(file.key) or file.size_bytes < _MIN_FILE_BYTES:
        raise DamagedError(f"{key}: {otherwise}")
    return file


def parse_bases(key: str, found: Any, tensors: Mapping[str, TensorType]) -> Iterator[ShareContents]:
    """Yield the base files that a share document refers to."""
    if not isinstance(found, list) or any(not isinstance(one, dict) or one.keys() not in _BASE_FIELDS for one in found):
        raise DamagedError(f"{key}: its list of base files is invalid")
    bits = 0
    for one in found:
        file = _parse_file(key, one["file"], entries.is_base_file, "it refers to a base file that is not one")
        pieces = parse_pieces(file, one["pieces"], tensors)
        if "patches" not in one:
            yield ShareContents(file, pieces, {}, file)
            continue
        content = entries.parse_ref({**one["file"], "checksum": one["checksum"]})
        if content is None or not isinstance(one["patches"], list) or not one["patches"]:
            raise DamagedError(f"{key}: its list of patches is invalid")
        patches = []
        for said in one["patches"]:
            patch_file, rows = _parse_patch(key, said, pieces)
            bits += sum(piece.rows for piece, _, _ in rows)
            if bits > bitmaps.MOST_BITS:
                raise DamagedError(f"{key}: its bitmaps have more bits than those of any run")
            patches.append(_check_patch(patch_file, rows))
        yield ShareContents(file, pieces, {}, content, tuple(patches))


def _parse_patch(key: str, said: Any, pieces: Sequence[Piece]) -> tuple[ObjectRef, list[tuple[Piece, str, int]]]:
    """Return the file of a patch and, for each piece that it patches, the bitmap as text and where its rows start."""
    if not isinstance(said, dict) or said.keys() != {"file", "rows"} or not isinstance(said["rows"], list):
        raise DamagedError(f"{key}: its list of patches is invalid")
    file = _parse_file(key, said["file"], entries.is_patch, "it refers to a patch that is not one")
    found = []
    for row in said["rows"]:
        if type(row) is not list or [type(item) for item in row] != [int, str, int] or not 0 <= row[0] < len(pieces):
            raise DamagedError(f"{file.key}: its list of rows is invalid")
        number, bitmap, start = row
        found.append((pieces[number], bitmap, start))
    if len({piece for piece, _, _ in found}) != len(found):
        raise DamagedError(f"{file.key}: it patches a piece twice")
    if not all(piece.rows for piece, _, _ in found):
        raise DamagedError(f"{file.key}: it patches a piece that has no rows")
    return file, found


def _check_patch(file: ObjectRef, found: Sequence[tuple[Piece, str, int]]) -> Patch:
    rows, stored = [], []
    for piece, text, start in found:
        try:
            count = bitmaps.count_in_text(text, piece.rows)
        except ValueError as e:
            raise DamagedError(f"{file.key}: its list of rows is invalid: {e}") from e
        rows.append(PatchedRows(piece, text, start))
        box = whole((count, piece.box.shape[-1]))
        stored.append(Piece(piece.name, piece.dtype, box, start))
    return Patch(ShareContents(file, _in_order(file, stored), {}, file), tuple(rows))


def parse_pieces(file: ObjectRef, rows: Any, tensors: Mapping[str, TensorType]) -> tuple[Piece, ...]:
    """Return the pieces that a share document lists of a tensor file."""
    if not isinstance(rows, list):
        raise DamagedError(f"{file.key}: its pieces are not listed")
    return _in_order(file, [_parse_piece(file, row, tensors) for row in rows])


def _in_order(file: ObjectRef, pieces: list[Piece]) -> tuple[Piece, ...]:
    """Return the pieces of a tensor file in the order of their positions. Raises DamagedError unless they fill the
    file."""
    for piece in pieces:
        start = piece.start
        if start < _MIN_FILE_BYTES or start % piece.item_bytes or start + piece.size_bytes > file.size_bytes:
            raise DamagedError(f"{file.key}: a piece is outside its file, or not aligned to its elements")
    pieces.sort(key=lambda piece: (piece.start, piece.size_bytes, piece.name))
    end = pieces[0].start if pieces else file.size_bytes
    for piece in pieces:
        if piece.start != end:
            raise DamagedError(f"{file.key}: its pieces overlap, or leave gaps")
        end += piece.size_bytes
    if end != file.size_bytes:
        raise DamagedError(f"{file.key}: its pieces end at byte {end}, the file at {file.size_bytes}")
    return tuple(pieces)


def _parse_piece(file: ObjectRef, row: Any, tensors: Mapping[str, TensorType]) -> Piece:
    if type(row) is not list or len(row) != 5 or type(row[0]) is not str or type(row[4]) is not int:
        raise DamagedError(f"{file.key}: its list of pieces is invalid")
    name, dtype, offset, shape, start = row
    tensor = tensors.get(name)
    if tensor is None or dtype != tensor.dtype:
        raise DamagedError(f"tensor {name!r:.100}: a piece of it has another type")
    box = Box(state_trees.parse_lengths(name, offset), state_trees.parse_lengths(name, shape))
    if len(box.offset) != len(tensor.shape) or len(box.shape) != len(tensor.shape):
        raise DamagedError(f"tensor {name!r:.100}: a piece of it has another type")
    if any(at + n > whole for at, n, whole in zip(box.offset, box.shape, tensor.shape, strict=True)):
        raise DamagedError(f"tensor {name!r:.100}: a piece is outside of it")
    piece = Piece(name, tensor.dtype, box, start)
    if piece.is_own and box.shape != tensor.shape:
        raise DamagedError(f"tensor {name!r:.100}: it is a rank's own, but stored in several pieces")
    return piece
