"""Tables of which few rows change from save to save, such as embeddings: written once, then only the rows that changed.

Tables are detected: two commits in a row are compared by a sample of rows of each large tensor. Those of which few rows
have changed are laid out in a base file of their own. From then on, a save computes a digest of every row (see `rows`)
and writes those that have changed since the last commit as a patch. The patch also takes the place of the patches
before it that are not much larger. So there are few patches, each row is written a few times at most until the patches
exceed half of the file, and then the file is written in full.

A save refers only to what the last commit refers to. If it is not known that the last save was committed, the tables
are written in full, and so they are at the first save that has a file for them. After a restart, that is the first one:
digests of the stored rows would delay the restart, or take as long as to write the tables.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from elasticctl_store.checkpoints import bitmaps, entries, tensor_files
from elasticctl_store.checkpoints.entries import ObjectRef
from elasticctl_store.checkpoints.pieces import Piece
from elasticctl_store.checkpoints.tensor_boxes import Box
from elasticctl_store.checkpoints.tensor_files import TensorType
from elasticctl_store.storage import Storage
from elasticctl_train.checkpoint.incremental import rows
from elasticctl_train.checkpoint.plans import FilledPlan, Name, PlannedFile

SAMPLE_ROWS = 64
MOST_CHANGED = 1 / 8
"""A tensor is a table if at most this fraction of the sample has changed."""
LEAST_ROW_BYTES = 64
"""A row that is not much larger than its digest and its share of a bitmap is not worth them."""
MOST_WORDS = 1 << 16
"""A row of more words would need too many keys."""
DENSE = 1 / 4
"""A table of which more than this fraction has changed, at two commits in a row, is not one any more."""
MERGED = 1.5
"""A patch takes the place of those before it that are up to this many times as large."""
LEAST_PATCH, MOST_PATCHED = 1 / 128, 1 / 2
"""Fractions of the file: patches count as at least this large when they are merged, so that there are ten at most; and
once they would exceed this, the file is written in full."""


@dataclass(frozen=True, slots=True)
class StoredBase:
    """A base file, what it is once its patches are applied, and the fields of a share document about these patches."""

    file: ObjectRef
    content: ObjectRef
    patches: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Patch:
    """The masks of the rows in it (bool), by the number of their piece, and the list of rows in a share document."""

    file: ObjectRef
    masks: Mapping[int, torch.Tensor]
    said: Sequence[Sequence[Any]]


@dataclass(frozen=True, slots=True)
class _StoredTables:
    """A base file with these pieces, its patches, and what it is with them; `digests` are those of its rows.

    Of the pieces in `dense`, too many rows had changed.
    """

    file: ObjectRef
    pieces: Sequence[Piece]
    patches: Sequence[_Patch]
    content: ObjectRef
    digests: Sequence[torch.Tensor]
    dense: frozenset[Name] = frozenset()

    def as_base(self) -> StoredBase:
        said = [{"file": asdict(patch.file), "rows": patch.said} for patch in self.patches]
        fields = {"patches": said, "checksum": self.content.checksum} if said else {}
        return StoredBase(self.file, self.content, fields)


class Tables:
    """What one rank knows about the tables in its own shares. Used by one thread at a time.

    `pieces` are those that belong in the file of tables from now on.
    """

    def __init__(self) -> None:
        self.pieces: frozenset[Name] = frozenset()
        self._committed: _StoredTables | None = None
        self._pending: _StoredTables | None = None
        self._last_key = ""
        self._keys = rows.draw_keys(1)
        self._samples: dict[Name, torch.Tensor] = {}

    @property
    def is_stored(self) -> bool:
        """Whether the next save need not write them in full, as far as is known."""
        return self._committed is not None

    def recall(self, listed: Iterable[Sequence[Any]]) -> None:
        """Start with the tables among these pieces, as the document of an earlier commit lists them. Raises ValueError,
        TypeError or KeyError for other data."""
        pieces = [
            Piece(str(name), dtype, Box(tuple(at), tuple(shape)), start) for name, dtype, at, shape, start in listed
        ]
        self.pieces |= {(piece.name, piece.box) for piece in pieces if _may_be_table(piece)}

    def forget_stored(self) -> None:
        """Have the next save refer to nothing that is stored."""
        self._committed = self._pending = None

    def committed(self) -> None:
        """Record that what was stored last is part of a commit."""
        if self._pending is not None:
            if self._committed is not None:
                self.pieces -= self._committed.dense & self._pending.dense
            self._committed, self._pending = self._pending, None

    def store(self, share: FilledPlan, planned: PlannedFile, storage: Storage, key: str) -> StoredBase:
        """Return the base file with the tables of a share whose document has this key, writing what is necessary.

        Called again, with the same key, if there was no room for all of the share. Raises StorageError.
        """
        if self._pending is not None and key != self._last_key:
            self._committed = None
        before, self._pending, self._last_key = self._committed, None, key
        data = share.buffer.data[planned.start : planned.start + planned.size_bytes]
        views = [rows.view(data, piece) for piece in planned.pieces]
        digests = [self._digest(view) for view in views]
        if before is None or before.pieces != planned.pieces:
            stored = _write_whole(share, planned, storage, key, digests)
        else:
            masks = [(new != old).any(1) for new, old in zip(digests, before.digests, strict=True)]
            patches = _patch(before, storage, key, views, masks)
            content = replace(before.file, checksum=entries.as_checksum(zlib.crc32(share.bytes_of(planned))))
            if patches is None or (patches is before.patches and content != before.content):
                stored = _write_whole(share, planned, storage, key, digests)
            else:
                stored = _StoredTables(before.file, planned.pieces, patches, content, digests)
            stored = replace(stored, dense=_dense(planned.pieces, masks))
        self._pending = stored
        return stored.as_base()

    def sample(self, share: FilledPlan) -> None:
        """Record some rows of all pieces that may be tables, for `find`."""
        self._samples = self._sampled(share)

    def find(self, share: FilledPlan, but_for: Collection[Name]) -> frozenset[Name]:
        """Return the pieces, other than these and those known, of which few rows have changed since `sample`."""
        before, self._samples = self._samples, {}
        return frozenset(
            name
            for name, digests in self._sampled(share).items()
            if name in before
            and name not in but_for
            and int((digests != before[name]).any(1).sum()) <= MOST_CHANGED * len(digests)
        )

    def _sampled(self, share: FilledPlan) -> dict[Name, torch.Tensor]:
        found = {}
        for piece, start in share.plan.placed:
            name = (piece.name, piece.box)
            if name in self.pieces or piece.is_own or not _may_be_table(piece):
                continue
            view = rows.view(share.buffer.data, replace(piece, start=start))
            if view.shape[1] <= MOST_WORDS:
                chosen = torch.randint(len(view), (SAMPLE_ROWS,), generator=torch.Generator().manual_seed(0))
                found[name] = self._digest(view[chosen])
        return found

    def _digest(self, view: torch.Tensor) -> torch.Tensor:
        lacking = view.shape[1] - len(self._keys)
        if lacking > 0:
            self._keys = torch.cat([self._keys, rows.draw_keys(lacking)])
        return rows.digest(view, self._keys)


def _may_be_table(piece: Piece) -> bool:
    return (
        len(piece.box.shape) > 1
        and piece.row_bytes >= LEAST_ROW_BYTES
        and SAMPLE_ROWS <= piece.rows <= bitmaps.MOST_BITS
    )


def _dense(pieces: Sequence[Piece], masks: Sequence[torch.Tensor]) -> frozenset[Name]:
    """Return the pieces of which too many rows have changed."""
    return frozenset(
        (piece.name, piece.box)
        for piece, mask in zip(pieces, masks, strict=True)
        if int(mask.sum()) > DENSE * len(mask)
    )


def _write_whole(
    share: FilledPlan, planned: PlannedFile, storage: Storage, key: str, digests: Sequence[torch.Tensor]
) -> _StoredTables:
    """Write the tables in full. Raises StorageError."""
    data, table = share.bytes_of(planned), entries.table_key(key)
    file = ObjectRef(table, len(data), entries.as_checksum(storage.put(table, [data])))
    return _StoredTables(file, planned.pieces, (), file, digests)


def _patch(
    before: _StoredTables, storage: Storage, key: str, views: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]
) -> Sequence[_Patch] | None:
    """Return the patches that lead to these tables, writing one if rows have changed; None if they are not worth it.

    Raises StorageError.
    """
    changed = {number: mask for number, mask in enumerate(masks) if mask.any()}
    if not changed:
        return before.patches
    pieces, kept = before.pieces, list(before.patches)
    least_bytes = max(_size_bytes(pieces, changed), LEAST_PATCH * before.file.size_bytes)
    while kept and _size_bytes(pieces, kept[-1].masks) <= MERGED * least_bytes:
        for number, mask in kept.pop().masks.items():
            changed[number] = changed[number] | mask if number in changed else mask
        least_bytes = max(_size_bytes(pieces, changed), least_bytes)
    all_masks = [changed, *(patch.masks for patch in kept)]
    patched_bytes = sum(_size_bytes(pieces, patched) for patched in all_masks)
    bits = sum(len(mask) for patched in all_masks for mask in patched.values())
    if patched_bytes > MOST_PATCHED * before.file.size_bytes or bits > bitmaps.MOST_BITS:
        return None
    return [*kept, _write_patch(storage, entries.patch_key(key), pieces, views, changed)]


def _size_bytes(pieces: Sequence[Piece], masks: Mapping[int, torch.Tensor]) -> int:
    """Return the size of rows in bytes."""
    return sum(int(mask.sum()) * pieces[number].row_bytes for number, mask in masks.items())


def _write_patch(
    storage: Storage,
    key: str,
    pieces: Sequence[Piece],
    views: Sequence[torch.Tensor],
    masks: Mapping[int, torch.Tensor],
) -> _Patch:
    """Write rows to a patch. Raises StorageError."""
    names = {f"{number}:{pieces[number].name}": number for number in masks}
    kinds = {
        name: TensorType(pieces[number].dtype, (int(masks[number].sum()), pieces[number].box.shape[-1]))
        for name, number in names.items()
    }
    layout = tensor_files.lay_out(kinds)
    parts: list[bytes | memoryview] = [layout.header]
    for name in layout.starts:
        changed = views[names[name]][masks[names[name]]]
        parts.append(changed.view(torch.uint8).view(-1).numpy().data)
    crc = storage.put(key, parts)
    said = [
        [names[name], bitmaps.to_text(rows.to_bitmap(masks[names[name]])), start]
        for name, start in layout.starts.items()
    ]
    return _Patch(ObjectRef(key, layout.size_bytes, entries.as_checksum(crc)), masks, said)
