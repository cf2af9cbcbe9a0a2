"""From storage into a folder: nothing outside of it is touched, and every byte is checked against the digest.

The folder has to be new and private. Links are made last, so that nothing is ever written through one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from elasticctl_train.errors import DamagedError
from elasticctl_train.parallel import each
from elasticctl_train.storage import Storage
from elasticctl_train.workspace.listing import File, Folder, Link, Listing
from elasticctl_train.workspace.pieces import Run, opened, runs
from elasticctl_train.workspace.store import PACKS, find

THREADS = 4
_READ_BYTES = 1 << 20


def unpack(
    storage: Storage, digest: str, folder: Path, on_found: Callable[[Listing], None] = lambda listing: None
) -> Listing:
    """Write the workspace of this digest into `folder`, which is there and empty; `on_found` is told first what comes.

    Raises MissingError, DamagedError, StorageError, and OSError where the folder's disk does not take it.
    """
    kept = find(storage, digest)
    on_found(kept.listing)
    _make_folders(folder, kept.listing)
    files: dict[str, list[File]] = {}
    for file in kept.listing.files:
        files.setdefault(file.sha256, []).append(file)
        _create(folder / file.path, file)
    each(lambda run: _fill(storage, run, folder, files), runs(kept.places, files), THREADS)
    each(lambda file: _verify(folder / file.path, file), kept.listing.files, THREADS)
    for item in kept.listing.items:
        if isinstance(item, Link):
            (folder / item.path).symlink_to(item.target)
    return kept.listing


def _make_folders(folder: Path, listing: Listing) -> None:
    for item in listing.items:
        path = folder / item.path
        (path if isinstance(item, Folder) else path.parent).mkdir(parents=True, exist_ok=True)


def _create(path: Path, file: File) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    os.close(os.open(path, flags, 0o755 if file.executable else 0o644))


def _fill(storage: Storage, run: Run, folder: Path, files: dict[str, list[File]]) -> None:
    """Read some pieces and write them to where they belong, to each of the files that have the same content."""
    stored = memoryview(bytearray(run.stored_bytes))
    storage.read_into(f"{PACKS}/{run.pack}", run.start, stored)
    for part in run.parts:
        start = part.piece.start - run.start
        data = opened(part.piece, stored[start : start + part.piece.stored_bytes])
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
    """The sha256 of chunks that come one after the other."""
    digest = hashlib.sha256()
    for chunk in chunks:
        digest.update(chunk)
    return digest.hexdigest()
