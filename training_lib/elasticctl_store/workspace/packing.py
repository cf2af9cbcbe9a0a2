"""The format of a workspace: its listing, the digest that names it, and how its contents are packed. Pure.

The digest covers paths, contents, the executable bit and the targets of links, but not times, owners or where the bytes
are stored. So the same folder has the same name on every machine, and it can be verified when it is unpacked.

Contents are cut into pieces, compressed, and stored in packs: objects that hold pieces one after the other. The pieces
of each content are recorded next to the listing (`Places`), so a later workspace can refer to existing packs.
"""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from elasticctl_store.errors import DamagedError

FORMAT = "elasticctl-workspace/1"
PIECE_BYTES = 4 << 20
"""The size of a piece before compression: it bounds the memory that a sender and a receiver need."""
PACK_BYTES = 16 << 20
"""A pack is closed once it has this size."""
RUN_BYTES = 8 << 20
"""Neighbouring pieces are read together, up to this size."""
_LEVEL = 6
MAX_ITEMS = 100_000
MAX_PATH_BYTES, MAX_NAME_BYTES = 1024, 255
"""The limits of macOS for a path, and of both macOS and Linux for one name."""
_MAX_HOPS = 100
"""More links than any kernel follows (Linux: 40): a chain that is longer is a loop, and leads nowhere."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class File:
    """A file by its path; `sha256` is the digest of its content in hexadecimal."""

    path: str
    size_bytes: int
    sha256: str
    executable: bool = False


@dataclass(frozen=True, slots=True)
class PackedLink:
    """A symbolic link; `target` is as `readlink` returns it, and does not lead out of the workspace."""

    path: str
    target: str


@dataclass(frozen=True, slots=True)
class Folder:
    """An empty folder; other folders are implied by their contents."""

    path: str


Item = File | PackedLink | Folder


@dataclass(frozen=True, slots=True)
class Listing:
    """The items in order of their paths. Create it with `of` or `parse`, which check that it can be unpacked safely."""

    items: tuple[Item, ...]

    @classmethod
    def of(cls, items: Iterable[Item]) -> Listing:
        """Return a listing of these items, in any order. Raises DamagedError if one cannot be unpacked safely."""
        listing = cls(tuple(sorted(items, key=lambda item: item.path)))
        _check(listing.items)
        return listing

    @property
    def files(self) -> tuple[File, ...]:
        """The files only."""
        return tuple(item for item in self.items if isinstance(item, File))

    @property
    def size_bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size_bytes for file in self.files)

    @property
    def loops(self) -> tuple[PackedLink, ...]:
        """The links that lead nowhere. Earlier versions have uploaded such ones; they are not unpacked."""
        links = {item.path: item.target for item in self.items if isinstance(item, PackedLink)}
        return tuple(PackedLink(path, links[path]) for path in links if lead_of(path, links) is Lead.LOOP)

    @property
    def digest(self) -> str:
        """The name of this workspace: 64 hexadecimal digits."""
        text = json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the listing as JSON data; equal listings give equal data."""
        return {"format": FORMAT, "items": [_to_row(item) for item in self.items]}


def parse(data: Any) -> Listing:
    """Return the listing that `to_json` returned. Raises DamagedError for anything else, and for unsafe items."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise DamagedError(f"not a workspace of this version ({FORMAT}): {found!r:.60}")
    rows = data.get("items")
    if not isinstance(rows, Sequence) or len(rows) > MAX_ITEMS:
        raise DamagedError(f"a workspace's items are missing, or more than {MAX_ITEMS:,}")
    return Listing.of(_of_row(row) for row in rows)


def is_digest(text: object) -> bool:
    """Return whether `text` is 64 hexadecimal digits, as in a SHA-256."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def unfit(path: str) -> str:
    """Return what is wrong with a path in a workspace, as words that complete "its path …"; "" if nothing is."""
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "is not UTF-8"
    parts = path.split("/")
    if "\0" in path or not all(parts) or "." in parts or ".." in parts:
        return "is not names separated by single slashes"
    if len(encoded) > MAX_PATH_BYTES or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return "is too long"
    return ""


class Lead(Enum):
    """Where a link leads: into the workspace, whether or not anything is there; out of it; or, as part of a loop of
    links or a way into one, nowhere. No program can open the last ones, and some take their target for another path."""

    WITHIN = auto()
    OUT = auto()
    LOOP = auto()


def lead_of(path: str, links: Mapping[str, str]) -> Lead:
    """Return where the link at `path` leads. `links`: path -> target of every link in the workspace.

    Links are followed as the kernel does, name by name: if `x` is a link, `x/..` is not the folder that contains it.
    """
    at, hops = path.split("/")[:-1], 0
    todo = links[path].split("/")[::-1]
    if links[path].startswith("/"):
        return Lead.OUT
    while todo:
        name = todo.pop()
        if name in ("", "."):
            continue
        if name == "..":
            if not at:
                return Lead.OUT
            at.pop()
            continue
        at.append(name)
        target = links.get("/".join(at))
        if target is None:
            continue
        hops += 1
        if target.startswith("/"):
            return Lead.OUT
        if hops > _MAX_HOPS:
            return Lead.LOOP
        at.pop()
        todo.extend(target.split("/")[::-1])
    return Lead.WITHIN


def _check(items: Sequence[Item]) -> None:
    """Raise DamagedError unless unpacking these items can touch nothing outside of the folder, and no item twice."""
    links = {item.path: item.target for item in items if isinstance(item, PackedLink)}
    taken: set[str] = set()
    for item in items:
        wrong = unfit(item.path)
        if wrong:
            raise DamagedError(f"a workspace holds {item.path!r:.80}, and its path {wrong}")
        if item.path in taken:
            raise DamagedError(f"a workspace holds {item.path!r:.80} twice")
        taken.add(item.path)
        if isinstance(item, PackedLink) and (unfit_target(item.target) or lead_of(item.path, links) is Lead.OUT):
            raise DamagedError(f"the link {item.path!r:.80} of a workspace leads out of it")
    for item in items:
        parts = item.path.split("/")
        if any("/".join(parts[:depth]) in taken for depth in range(1, len(parts))):
            raise DamagedError(
                f"{item.path!r:.80} of a workspace is below an item that is not a folder, or an empty one"
            )


def unfit_target(target: str) -> bool:
    """Return whether nothing can be linked to this target."""
    try:
        return not target or "\0" in target or len(target.encode()) > MAX_PATH_BYTES
    except UnicodeEncodeError:
        return True


def _to_row(item: Item) -> list[Any]:
    if isinstance(item, File):
        return ["file", item.path, item.size_bytes, item.sha256, item.executable]
    return ["link", item.path, item.target] if isinstance(item, PackedLink) else ["folder", item.path]


def _of_row(row: Any) -> Item:
    match row:
        case ["file", str(path), int(size_bytes), str(sha256), bool(executable)] if is_digest(sha256):
            if isinstance(size_bytes, bool) or size_bytes < 0:
                raise DamagedError(f"the size of {path!r:.80} in a workspace is {size_bytes!r:.20}")
            return File(path, size_bytes, sha256, executable)
        case ["link", str(path), str(target)]:
            return PackedLink(path, target)
        case ["folder", str(path)]:
            return Folder(path)
    raise DamagedError(f"{row!r:.80} is not an item of a workspace")


@dataclass(frozen=True, slots=True)
class PackedPiece:
    """`stored_bytes` from byte `start` of a pack hold `size_bytes` of a content; if they are fewer, compressed with
    zlib."""

    pack: str
    start: int
    stored_bytes: int
    size_bytes: int


Places = Mapping[str, tuple[PackedPiece, ...]]
"""The SHA-256 of a content -> its pieces, in order."""


@dataclass(frozen=True, slots=True)
class Pack:
    """An object to be stored under the digest of its bytes."""

    digest: str
    parts: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        """The size of the object in bytes."""
        return sum(map(len, self.parts))


@dataclass(frozen=True, slots=True)
class Part:
    """A piece that is to be read; `offset` is its position in its content."""

    content: str
    offset: int
    piece: PackedPiece


@dataclass(frozen=True, slots=True)
class PackRange:
    """Neighbouring pieces of one pack, to be read in one request."""

    pack: str
    parts: tuple[Part, ...]

    @property
    def start(self) -> int:
        """The first byte to read."""
        return self.parts[0].piece.start

    @property
    def stored_bytes(self) -> int:
        """The number of bytes to read."""
        last = self.parts[-1].piece
        return last.start + last.stored_bytes - self.start


class Packer:
    """Packs contents that are added one after the other; deterministic for a given order."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[PackedPiece, ...]] = {}
        self._parts: list[bytes] = []
        self._open: list[tuple[str, int, int, int]] = []  # content, start, stored bytes, size
        self._end = 0

    def add(self, content: str, data: bytes) -> Iterator[Pack]:
        """Add the next piece of a content (at most `PIECE_BYTES`); yield the pack that it completes."""
        small = zlib.compress(data, _LEVEL)
        stored = small if len(small) < len(data) else data
        self._open.append((content, self._end, len(stored), len(data)))
        self._parts.append(stored)
        self._end += len(stored)
        if self._end >= PACK_BYTES:
            yield from self.close()

    def close(self) -> Iterator[Pack]:
        """Yield the last pack, if there is one."""
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
    """Return the bytes of a piece. Raises DamagedError unless it has the expected size; never produces more."""
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
    """Return what to read to get these contents, in as few requests as possible."""
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
    """Return the places as JSON data."""
    return {
        content: [[piece.pack, piece.start, piece.stored_bytes, piece.size_bytes] for piece in pieces]
        for content, pieces in sorted(places.items())
    }


def parse_places(data: Any, listing: Listing) -> dict[str, tuple[PackedPiece, ...]]:
    """Return where the contents of a listing are. Raises DamagedError unless each has pieces that add up to its
    size."""
    if not isinstance(data, Mapping):
        raise DamagedError("a workspace does not say where its contents are")
    places: dict[str, tuple[PackedPiece, ...]] = {}
    for file in listing.files:
        rows = data.get(file.sha256)
        if not isinstance(rows, Sequence):
            raise DamagedError(f"a workspace does not say where the content of {file.path!r:.80} is")
        pieces = tuple(_piece_of(row) for row in rows)
        if sum(piece.size_bytes for piece in pieces) != file.size_bytes:
            raise DamagedError(f"the pieces of {file.path!r:.80} in a workspace are not as long as the file")
        places[file.sha256] = pieces
    return places


def _piece_of(row: Any) -> PackedPiece:
    match row:
        case [str(pack), int(start), int(stored), int(size)] if is_digest(pack):
            if start >= 0 and 0 < stored <= size <= PIECE_BYTES:
                return PackedPiece(pack, start, stored, size)
    raise DamagedError(f"{row!r:.100} is not a piece of a workspace")
