"""Workspaces in storage: send what does not exist yet, and fetch one.

    listings/<digest>    one workspace: its listing, and where its contents are
    packs/<sha256>       contents, many per object
    heads/<origin>       the digest of the newest workspace of one folder: what the next one is compared with

A workspace that exists is not sent again; of another one, only the contents that the newest workspace of the same
folder lacks. Objects never change, so a job finds what it was submitted with. Concurrent senders do no harm.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticctl_store.errors import DamagedError, ExistsError, MissingError, StorageError
from elasticctl_store.parallel import each
from elasticctl_store.storage import Storage, all_keys
from elasticctl_store.workspace.packing import (
    File,
    Folder,
    Listing,
    Pack,
    PackedLink,
    Packer,
    PackRange,
    Part,
    Places,
    decompress_piece,
    is_digest,
    pack_ranges,
    parse,
    parse_places,
    places_to_json,
)

LISTINGS, PACKS, HEADS = "listings", "packs", "heads"

Read = Callable[[File], Iterator[bytes]]
"""Yields a file's content in pieces of `packing.PIECE_BYTES`, the last one shorter. Raises if the file has changed."""

log = logging.getLogger("elasticctl_train")


@dataclass(frozen=True, slots=True)
class Kept:
    """A workspace in storage."""

    listing: Listing
    places: Places


@dataclass(frozen=True, slots=True)
class Sent:
    """What had to be sent: the number of files with new contents, and their size in bytes before compression."""

    files: int = 0
    size_bytes: int = 0


def find(storage: Storage, digest: str) -> Kept:
    """Return the workspace of this digest. Raises MissingError, DamagedError, StorageError."""
    data = _json(storage.get(f"{LISTINGS}/{digest}"), f"{LISTINGS}/{digest}")
    listing = parse(data.get("listing") if isinstance(data, dict) else None)
    if listing.digest != digest:
        raise DamagedError(f"{storage.url}: the workspace {digest[:12]} does not match its name")
    return Kept(listing, parse_places(data.get("places"), listing))


def missing(storage: Storage, listing: Listing, origin: str) -> tuple[list[File], dict[str, Any]]:
    """Return the files whose content has to be sent, one per content, and where the other contents are.

    `origin` names the folder that it comes from, on its machine. Raises StorageError.
    """
    packs = set(names(storage, PACKS))
    known: dict[str, Any] = {}
    for digest in dict.fromkeys((newest(storage, origin), listing.digest)):
        for content, pieces in _places(storage, digest).items():
            if all(piece.pack in packs for piece in pieces):
                known[content] = pieces
    wanted = {file.sha256: file for file in reversed(listing.files)}
    new = [file for file in wanted.values() if file.sha256 not in known]
    places = {content: known[content] for content in wanted if content in known}
    return sorted(new, key=lambda file: file.path), places


def send(storage: Storage, listing: Listing, origin: str, read: Read, on_bytes: Callable[[int], None]) -> Sent:
    """Store the workspace; `on_bytes` is called with the size of each piece that is packed.

    Raises StorageError, and what `read` raises; then no incomplete workspace can be found.
    """
    new, places = missing(storage, listing, origin)
    packer = Packer()
    for pack in _packs(packer, new, read, on_bytes):
        with suppress(ExistsError):
            storage.put(f"{PACKS}/{pack.digest}", pack.parts, if_absent=True)
    where = places | packer.places
    for file in listing.files:
        where.setdefault(file.sha256, ())  # an empty one has no pieces
    if new or not _is_there(storage, listing.digest):
        storage.put(f"{LISTINGS}/{listing.digest}", [_document(listing, where)])
    storage.put(f"{HEADS}/{origin}", [listing.digest.encode()])
    return Sent(len(new), sum(file.size_bytes for file in new))


def copy_workspace(source: Storage, target: Storage, digest: str) -> None:
    """Copy the workspace of this digest to another storage. Raises MissingError, DamagedError, StorageError."""
    kept = find(source, digest)
    there = set(names(target, PACKS))
    for pack in sorted({piece.pack for pieces in kept.places.values() for piece in pieces}):
        if pack in there:
            continue
        data = source.get(f"{PACKS}/{pack}")
        if hashlib.sha256(data).hexdigest() != pack:
            raise DamagedError(f"{source.url}: the pack {pack[:12]} is damaged")
        target.put(f"{PACKS}/{pack}", [data])
    target.put(f"{LISTINGS}/{digest}", [_document(kept.listing, kept.places)])


def names(storage: Storage, kind: str) -> Iterator[str]:
    """Yield the names of all listings, packs or heads."""
    return (key.rpartition("/")[2] for key in all_keys(storage, f"{kind}/"))


def newest(storage: Storage, origin: str) -> str:
    """Return the digest of the newest workspace of a folder; "" if there is none."""
    try:
        found = storage.get(f"{HEADS}/{origin}").decode("ascii", "replace")
    except MissingError:
        return ""
    return found if is_digest(found) else ""


def _packs(packer: Packer, files: Iterable[File], read: Read, on_bytes: Callable[[int], None]) -> Iterator[Pack]:
    for file in files:
        for data in read(file):
            yield from packer.add(file.sha256, data)
            on_bytes(len(data))
    yield from packer.close()


def _places(storage: Storage, digest: str) -> Places:
    """Return where the contents of a workspace are; nothing if it does not exist or is damaged."""
    if not digest:
        return {}
    try:
        return find(storage, digest).places
    except MissingError:
        return {}
    except DamagedError as e:
        log.warning("%s; uploading it again", e)
        return {}


def _document(listing: Listing, places: Places) -> bytes:
    return json.dumps({"listing": listing.to_json(), "places": places_to_json(places)}).encode()


def _is_there(storage: Storage, digest: str) -> bool:
    try:
        find(storage, digest)
    except (MissingError, DamagedError):
        return False
    return True


def _json(data: bytes, key: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as e:
        raise DamagedError(f"{key} is not JSON") from e


def describe_failure(error: StorageError, url: str, digest: str) -> str:
    """Return why a workspace could not be fetched, and how to fix that, in one line."""
    name = f"the workspace {digest[:12]} at {url}"
    if isinstance(error, MissingError):
        return f"{name} no longer exists. FIX: submit the job again from its folder"
    if isinstance(error, DamagedError):
        return f"{name} is damaged ({error}). FIX: submit the job again from its folder"
    return f"cannot get {name}: {error}"


THREADS = 4
_READ_BYTES = 1 << 20


def unpack(
    storage: Storage, digest: str, folder: Path, on_found: Callable[[Listing], None] = lambda listing: None
) -> Listing:
    """Write the workspace of this digest into `folder`, which must be empty; `on_found` gets its listing first.

    The listing's `loops` are left out.

    Raises MissingError, DamagedError, StorageError, and OSError if it cannot be written to the folder's disk.
    """
    kept = find(storage, digest)
    on_found(kept.listing)
    _make_folders(folder, kept.listing)
    files: dict[str, list[File]] = {}
    for file in kept.listing.files:
        files.setdefault(file.sha256, []).append(file)
        _create(folder / file.path, file)
    each(lambda run: _fill(storage, run, folder, files), pack_ranges(kept.places, files), THREADS)
    each(lambda file: _verify(folder / file.path, file), kept.listing.files, THREADS)
    loops = {link.path for link in kept.listing.loops}
    for item in kept.listing.items:
        if isinstance(item, PackedLink) and item.path not in loops:
            (folder / item.path).symlink_to(item.target)
    return kept.listing


def read_files(storage: Storage, kept: Kept, files: Iterable[File]) -> dict[str, bytes]:
    """Return the contents of some of its files, by SHA-256. Raises MissingError, DamagedError, StorageError."""
    contents = {file.sha256: bytearray(file.size_bytes) for file in files}
    for run in pack_ranges(kept.places, contents):
        for part, data in _pieces(storage, run):
            contents[part.content][part.offset : part.offset + len(data)] = data
    for sha256, content in contents.items():
        if digest_of([bytes(content)]) != sha256:
            raise DamagedError(f"{storage.url}: a file of the workspace is damaged")
    return {sha256: bytes(content) for sha256, content in contents.items()}


def _make_folders(folder: Path, listing: Listing) -> None:
    for item in listing.items:
        path = folder / item.path
        (path if isinstance(item, Folder) else path.parent).mkdir(parents=True, exist_ok=True)


def _create(path: Path, file: File) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(path, flags, 0o755 if file.executable else 0o644))


def _pieces(storage: Storage, run: PackRange) -> Iterator[tuple[Part, bytes]]:
    """Read neighbouring pieces in one request."""
    stored = memoryview(bytearray(run.stored_bytes))
    storage.read_into(f"{PACKS}/{run.pack}", run.start, stored)
    for part in run.parts:
        start = part.piece.start - run.start
        yield part, decompress_piece(part.piece, stored[start : start + part.piece.stored_bytes])


def _fill(storage: Storage, run: PackRange, folder: Path, files: dict[str, list[File]]) -> None:
    """Read neighbouring pieces and write them to every file that has their content."""
    for part, data in _pieces(storage, run):
        for file in files[part.content]:
            _write(folder / file.path, part.offset, data)


def _write(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b", buffering=0) as target:
        target.seek(offset)
        view = memoryview(data)
        while view:
            view = view[target.write(view) :]


def _verify(path: Path, file: File) -> None:
    with path.open("rb", buffering=0) as written:
        if digest_of(iter(lambda: written.read(_READ_BYTES), b"")) != file.sha256:
            raise DamagedError(f"the content of {file.path!r:.80} is not what was sent")


def digest_of(chunks: Iterable[bytes]) -> str:
    """Return the SHA-256 of the concatenated chunks."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
