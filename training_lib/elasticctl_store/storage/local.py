"""A folder as storage: `file:///path` or a plain path; also any shared filesystem that knows hard links.

An object is written under a `.partial` name, synced to disk and then renamed (or, to be created only if absent, hard
linked: the one call that is atomic and refuses an existing name). Partial files left by a killed writer show up in
listings like any object, so whoever sweeps unreferenced objects sweeps them too (`journal`: data and entries).
"""

from __future__ import annotations

import errno
import heapq
import os
import secrets
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from elasticctl_store.errors import DamagedError, ExistsError, MissingError, StorageError
from elasticctl_store.storage.base import PAGE_KEYS, is_key

_FIXES = {
    errno.ENOSPC: "the disk is full: free some space or choose another storage URL",
    errno.EDQUOT: "the disk quota is used up: free some space or choose another storage URL",
    errno.EFBIG: "the file would be larger than this process or filesystem allows (ulimit -f)",
    errno.EACCES: "no permission: check the folder's owner and mode",
    errno.EPERM: "not permitted: check the folder's owner, and that its filesystem knows hard links",
    errno.ENOTSUP: "not supported: the filesystem must know hard links",
    errno.EROFS: "the filesystem is read-only: choose another storage URL",
}


class LocalStorage:
    """Objects as files below `root`, which is made on the first write."""

    def __init__(self, root: Path) -> None:
        self._root = Path(os.path.abspath(root))

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        try:
            _make_folder(path.parent)
            try:
                crc = _write_and_sync(partial, parts)
                if if_absent:
                    _link(partial, path)
                else:
                    os.replace(partial, path)
                _sync_folder(path.parent)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as e:
            raise _as_error("write", path, e) from e
        return crc

    def get(self, key: str) -> bytes:
        path = self._path(key)
        try:
            return path.read_bytes()
        except FileNotFoundError as e:
            raise MissingError(f"{path} is not there") from e
        except OSError as e:
            raise _as_error("read", path, e) from e

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        path = self._path(key)
        done = 0
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(start)
                while done < len(into) and (count := file.readinto(into[done:])):
                    done += count
        except FileNotFoundError as e:
            raise MissingError(f"{path} is not there") from e
        except OSError as e:
            raise _as_error("read", path, e) from e
        if done < len(into):
            raise DamagedError(f"{path} ends at byte {start + done}, {start + len(into)} were expected")

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        folder = prefix.rpartition("/")[0]
        try:
            keys = self._keys(self._root / folder if folder else self._root, f"{folder}/" if folder else "")
            return heapq.nsmallest(PAGE_KEYS, (key for key in keys if key.startswith(prefix) and key > after))
        except OSError as e:
            raise _as_error("list", self._root / folder, e) from e

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                raise _as_error("delete", path, e) from e
            if path.parent != self._root:
                with suppress(OSError):  # not empty yet, or somebody else was faster
                    path.parent.rmdir()

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Partial files show up in listings."""

    def _path(self, key: str) -> Path:
        """The file of a key; refuses a key (from a forged manifest) that would lead out of the folder."""
        if not is_key(key):
            raise StorageError(f"{key!r} is not a key: it must be names separated by single slashes")
        return self._root.joinpath(*key.split("/"))

    def _keys(self, folder: Path, prefix: str) -> Iterator[str]:
        try:
            entries = os.scandir(folder)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    yield from self._keys(Path(entry.path), f"{prefix}{entry.name}/")
                else:
                    yield prefix + entry.name


def _write_and_sync(path: Path, parts: Sequence[bytes | memoryview]) -> int:
    """Returns the CRC-32 of all."""
    crc = 0
    with path.open("xb", buffering=0) as file:
        for part in parts:
            crc = zlib.crc32(part, crc)
            view = memoryview(part).cast("B") if len(part) else b""  # a view without elements cannot be cast
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return crc


def _link(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path)
    except FileExistsError as e:
        raise ExistsError(f"{path} is already there") from e


def _make_folder(folder: Path) -> None:
    """Make a folder so that its own name survives a power cut too."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _as_error(verb: str, path: Path, error: OSError) -> StorageError:
    fix = _FIXES.get(error.errno or 0, "check the path and the filesystem")
    return StorageError(f"cannot {verb} {path}: {error.strerror}. FIX: {fix}")
