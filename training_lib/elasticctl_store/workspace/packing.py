"""How contents are stored: cut into pieces, compressed, many small ones in one object. Pure.

A pack is pieces one after the other. Where a content's pieces lie is written down beside the listing (`Places`), so a
later workspace can point into packs that are there already.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticctl_store.errors import DamagedError
from elasticctl_store.workspace.listing import Listing, is_digest

PIECE_BYTES = 4 << 20
"""Of a content, before it is compressed: bounds what a sender and an unpacker hold in memory."""
PACK_BYTES = 16 << 20
"""A pack is closed when it has as many."""
RUN_BYTES = 8 << 20
"""Neighbouring pieces are read together up to here."""
_LEVEL = 6


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """`stored_bytes` from byte `start` of a pack are `size_bytes` of a content; fewer: compressed with zlib."""

    pack: str
    start: int
    stored_bytes: int
    size_bytes: int


Places = Mapping[str, tuple[PackedPiece, ...]]
"""A content's sha256 -> its pieces, in order."""


@dataclass(frozen=True, slots=True)
class Pack:
    """An object to be stored under the digest of its bytes."""

    digest: str
    parts: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return sum(map(len, self.parts))


@dataclass(frozen=True, slots=True)
class Part:
    """A piece that is wanted: `offset` is where in its content it belongs."""

    content: str
    offset: int
    piece: PackedPiece


@dataclass(frozen=True, slots=True)
class PackRange:
    """Neighbouring pieces of one pack, to be read in one go."""

    pack: str
    parts: tuple[Part, ...]

    @property
    def start(self) -> int:
        """The first byte."""
        return self.parts[0].piece.start

    @property
    def stored_bytes(self) -> int:
        """How many bytes to read."""
        last = self.parts[-1].piece
        return last.start + last.stored_bytes - self.start


class Packer:
    """Makes packs of contents that come one after the other; deterministic in their order."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[PackedPiece, ...]] = {}
        self._parts: list[bytes] = []
        self._open: list[tuple[str, int, int, int]] = []  # content, start, stored bytes, size
        self._end = 0

    def add(self, content: str, data: bytes) -> Iterator[Pack]:
        """Take the next piece of a content (at most `PIECE_BYTES`); yields the pack that it makes full."""
        small = zlib.compress(data, _LEVEL)
        stored = small if len(small) < len(data) else data
        self._open.append((content, self._end, len(stored), len(data)))
        self._parts.append(stored)
        self._end += len(stored)
        if self._end >= PACK_BYTES:
            yield from self.close()

    def close(self) -> Iterator[Pack]:
        """Yield what is left."""
        if not self._open:
            return
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(part)
        pack = Pack(digest.hexdigest(), tuple(self._parts))
        for content, start, stored_bytes, size_bytes in self._open:
            piece = PackedPiece(pack.digest, start, stored_bytes, size_bytes)
            self.places[content] = (*self.places.get(content, ()), piece)
        self._parts, self._open, self._end = [], [], 0
        yield pack


def decompress_piece(piece: PackedPiece, stored: memoryview) -> bytes:
    """The bytes of a content. Raises DamagedError unless they are as many as they should be; never makes more."""
    if piece.stored_bytes == piece.size_bytes:
        return bytes(stored)
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(stored, piece.size_bytes + 1)
    except zlib.error as e:
        raise DamagedError(f"pack {piece.pack[:12]} is damaged at byte {piece.start}: {e}") from e
    if len(data) != piece.size_bytes or not unpacker.eof or unpacker.unused_data:
        raise DamagedError(f"pack {piece.pack[:12]} is damaged at byte {piece.start}")
    return data


def pack_ranges(places: Places, contents: Iterable[str]) -> list[PackRange]:
    """What to read to get these contents, in as few goes as their neighbourhood allows."""
    by_pack: dict[str, list[Part]] = {}
    for content in contents:
        offset = 0
        for piece in places[content]:
            by_pack.setdefault(piece.pack, []).append(Part(content, offset, piece))
            offset += piece.size_bytes
    found = []
    for pack, parts in sorted(by_pack.items()):
        run: list[Part] = []
        for part in sorted(parts, key=lambda part: part.piece.start):
            end = run[-1].piece.start + run[-1].piece.stored_bytes if run else 0
            if run and (part.piece.start != end or end - run[0].piece.start >= RUN_BYTES):
                found.append(PackRange(pack, tuple(run)))
                run = []
            run.append(part)
        found.append(PackRange(pack, tuple(run)))
    return found


def places_to_json(places: Places) -> dict[str, Any]:
    """As JSON data."""
    return {
        content: [[piece.pack, piece.start, piece.stored_bytes, piece.size_bytes] for piece in pieces]
        for content, pieces in sorted(places.items())
    }


def parse_places(data: Any, listing: Listing) -> dict[str, tuple[PackedPiece, ...]]:
    """Where the contents of a listing lie. Raises DamagedError unless it is said of each, and adds up to its size."""
    if not isinstance(data, Mapping):
        raise DamagedError("a workspace does not say where its contents are")
    places: dict[str, tuple[PackedPiece, ...]] = {}
    for file in listing.files:
        rows = data.get(file.sha256)
        if not isinstance(rows, Sequence):
            raise DamagedError(f"a workspace does not say where the content of {file.path!r:.80} is")
        pieces = tuple(_of_row(row) for row in rows)
        if sum(piece.size_bytes for piece in pieces) != file.size_bytes:
            raise DamagedError(f"the pieces of {file.path!r:.80} in a workspace are not as long as the file")
        places[file.sha256] = pieces
    return places


def _of_row(row: Any) -> PackedPiece:
    match row:
        case [str(pack), int(start), int(stored), int(size)] if is_digest(pack):
            if start >= 0 and 0 < stored <= size <= PIECE_BYTES:
                return PackedPiece(pack, start, stored, size)
    raise DamagedError(f"{row!r:.100} is no piece of a workspace")
