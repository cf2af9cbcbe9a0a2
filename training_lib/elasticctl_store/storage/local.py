"""A folder as storage: `file:///path` or a plain path, also on a shared file system that supports hard links.

An object is written under a `.partial` name, synced to disk and then renamed. To be created only if absent, it is hard
linked instead: that is the one call that is atomic and refuses an existing name. Listings show the partial files of
killed writers like any object, so sweeps of unreferenced objects delete them too (`retention`).

A folder directly below `root` may be a symbolic link, to a larger disk, say. It is followed like a folder if its owner
could delete the target's content anyway: this user, root, or the owner of the target. Nothing is deleted through any
other link, which could have been created to get another user's files deleted.

A file server that is unavailable for a while is waited for, like any storage (see `outages`).
"""

from __future__ import annotations

import errno
import heapq
import io
import itertools
import logging
import os
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from elasticctl_store.errors import DamagedError, ExistsError, FullError, MissingError, StorageError
from elasticctl_store.storage.base import PAGE_KEYS, is_key, most_bytes
from elasticctl_store.storage.outages import Patience, Waiter, Waits

log = logging.getLogger("elasticctl_train")
T = TypeVar("T")

_AWAY = {
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.EAGAIN,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ENOTCONN,
}
"""The errors of a file system whose server, or user-space process, is unreachable."""

_UNREADABLE = {
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENXIO,
    errno.ENODEV,
    errno.EINVAL,
    errno.EOVERFLOW,
}
"""The errors that concern one object, while others may be readable."""

_FILES = (".json", ".safetensors")
"""A name with such a suffix belongs to a file: a folder of that name is listed, as an object that cannot be read, as
well as what is in it, so that both can be deleted."""

_FIXES = {
    errno.ENOSPC: "the disk is full: free some space or choose another storage URL",
    errno.EDQUOT: "the disk quota is used up: free some space or choose another storage URL",
    errno.EFBIG: "the file would be larger than this process or filesystem allows (ulimit -f)",
    errno.EACCES: "no permission: check the folder's owner and mode",
    errno.EPERM: "not permitted: check the folder's owner, and that its filesystem supports hard links",
    errno.ENOTSUP: "not supported: the filesystem must support hard links",
    errno.EROFS: "the filesystem is read-only: choose another storage URL",
}


class LocalStorage:
    """Objects as files below `root`, which is created on the first write."""

    def __init__(self, root: Path, patience: Patience = Patience(), waits: Waits | None = None) -> None:  # noqa: B008
        self._root = Path(os.path.abspath(root))
        self._waiter = Waiter(self.url, patience, waits or Waits())
        self._has_written = False

    @property
    def url(self) -> str:
        return self._root.as_uri()

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        path = self._path(key)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.partial")
        tries = itertools.count()

        def write() -> int:
            unsure = next(tries) > 0  # an earlier try may have succeeded although it failed
            _make_folder(path.parent)
            try:
                crc = _write_and_sync(partial, parts)
                if not if_absent:
                    os.replace(partial, path)
                elif not (unsure and _holds(path, partial)):
                    _link(partial, path)
                _sync_folder(path.parent)
            finally:
                with suppress(OSError):  # a later run sweeps it
                    partial.unlink(missing_ok=True)
            return crc

        crc = self._patiently("write", path, write)
        self._has_written = True
        return crc

    def get(self, key: str) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            with _open(path) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                if size_bytes > most_bytes(key):
                    raise DamagedError(f"{path} has {size_bytes} bytes: more than any object that is read as a whole")
                return file.read(size_bytes)

        return self._patiently("read", path, read)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        path = self._path(key)

        def read() -> tuple[int, int]:
            """Return how many bytes were read, and the size of the file."""
            done = 0
            with _open(path) as file:
                file.seek(start)
                while done < len(into) and (count := file.readinto(into[done:])):
                    done += count
                return done, file.seek(0, os.SEEK_END)

        done, size_bytes = self._patiently("read", path, read)
        if done < len(into):
            raise DamagedError(f"{path} ends at byte {size_bytes}, {start + len(into)} were expected")

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        folder = prefix.rpartition("/")[0]

        def find() -> list[str]:
            keys = self._keys(self._root / folder if folder else self._root, f"{folder}/" if folder else "")
            return heapq.nsmallest(PAGE_KEYS, (key for key in keys if key.startswith(prefix) and key > after))

        return self._patiently("list", self._root / folder, find)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            path = self._path(key)
            below = itertools.takewhile(lambda folder: folder != self._root, path.parents)
            link = next((folder for folder in below if folder.is_symlink() and not self._is_followed(folder)), None)
            if link is not None and link.parent == self._root:
                raise StorageError(
                    f"cannot delete {path}: {link} is a symbolic link to a folder of another owner. FIX: replace it"
                    " by a link of your own, or mount the folder there"
                )
            if link is not None:
                log.warning("not deleting %s: %s is a symbolic link", path, link)
                continue
            self._patiently("delete", path, lambda path=path: _remove(path))  # type: ignore[misc]
            self._remove_empty(path.parent)

    def _remove_empty(self, folder: Path) -> None:
        """Delete a folder if it is empty. If that was in the place of a file, do the same with the one above."""
        goes_on = True
        while goes_on and folder != self._root:
            try:
                folder.rmdir()
            except OSError:  # not empty yet, or another process was faster
                return
            goes_on = any(name.endswith(_FILES) for name in folder.relative_to(self._root).parts)
            folder = folder.parent

    def free_bytes(self, below: str) -> int | None:
        """Return the free space for this user, in bytes, of the disk of the objects `below` such a prefix (`data/`).

        None if unknown; a quota may leave less.
        """
        folder = self._root / below
        while not folder.exists():
            folder = folder.parent
        try:
            disk = os.statvfs(folder)
        except OSError:
            return None
        return disk.f_bavail * disk.f_frsize

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """Delete empty folders, which listings do not show. Partial files appear in listings."""
        for above in ("data", "base"):
            place = self._root / above
            if place.is_symlink() and not self._is_followed(place):
                continue
            with suppress(OSError), os.scandir(place) as found:
                for folder in found:
                    if folder.is_dir(follow_symlinks=False) and is_ours(f"{above}/{folder.name}/"):
                        with suppress(OSError):  # not empty
                            os.rmdir(folder)

    def _path(self, key: str) -> Path:
        """Return the file of a key. Raises StorageError for a key (of a forged manifest) that leads out of the
        folder."""
        if not is_key(key):
            raise StorageError(f"{key!r} is not a key: it must be names separated by single slashes")
        return self._root.joinpath(*key.split("/"))

    def _patiently(self, verb: str, path: Path, work: Callable[[], T]) -> T:
        """Return what `work` returns; retry while the file system is unreachable. Raises StorageError, for a read
        MissingError."""
        with self._waiter.request(f"{verb} {path}") as tries:
            while True:
                try:
                    return work()
                except OSError as e:
                    if verb == "read" and e.errno == errno.ENOENT:
                        raise MissingError(f"{path} is not there") from e
                    # A kernel remounts a file system read-only after disk errors: one that was writable may be again.
                    if e.errno not in _AWAY and not (e.errno == errno.EROFS and self._has_written):
                        raise _as_error(verb, path, e) from e
                    tries.failed((e.strerror or "it does not answer").lower())

    def _is_followed(self, link: Path) -> bool:
        """Return whether this is a symbolic link that counts as the folder that it leads to."""
        if link.parent != self._root or not link.is_symlink():
            return False
        try:
            end = link.stat()
            return stat.S_ISDIR(end.st_mode) and link.lstat().st_uid in (0, os.geteuid(), end.st_uid)
        except OSError:
            return False

    def _keys(self, folder: Path, prefix: str) -> Iterator[str]:
        try:
            entries = os.scandir(folder)
        except FileNotFoundError:
            return
        with entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False) or (not prefix and self._is_followed(Path(entry.path)))
                is_listed = not is_folder or entry.name.endswith(_FILES)
                if is_listed:
                    yield prefix + entry.name
                if is_folder:
                    try:
                        yield from self._keys(Path(entry.path), f"{prefix}{entry.name}/")
                    except OSError as e:
                        if e.errno not in _UNREADABLE:
                            raise
                        if not is_listed:  # its contents are not gone: list it as an object that cannot be read
                            yield prefix + entry.name


def _open(path: Path) -> io.FileIO:
    """Open a file for reading. Raises DamagedError for a pipe or a device, which might block or never end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise DamagedError(f"{path} is not a file")
    return io.FileIO(descriptor)


def _remove(path: Path) -> None:
    """Delete a file, or an empty folder in its place."""
    if path.is_dir() and not path.is_symlink():
        with suppress(OSError):  # not empty, so not ours
            path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _write_and_sync(path: Path, parts: Sequence[bytes | memoryview]) -> int:
    """Write the parts to a file and sync it to disk; return their CRC-32."""
    crc = 0
    with path.open("wb", buffering=0) as file:
        for part in parts:
            crc = zlib.crc32(part, crc)
            view = memoryview(part).cast("B") if len(part) else b""  # a view without elements cannot be cast
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return crc


def _holds(path: Path, partial: Path) -> bool:
    """Return whether `path` exists with the contents of `partial`. Both are small: large objects are not created if
    absent."""
    try:
        return path.read_bytes() == partial.read_bytes()
    except FileNotFoundError:
        return False


def _link(partial: Path, path: Path) -> None:
    try:
        os.link(partial, path)
    except FileExistsError as e:
        raise ExistsError(f"{path} is already there") from e


def _make_folder(folder: Path) -> None:
    """Create a folder so that its name survives a power failure, too."""
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
    kind: Callable[[str], StorageError] = StorageError
    if error.errno == errno.ENOENT:  # when writing, its folder: it has just been deleted
        kind = MissingError
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        kind = FullError
    elif verb == "read" and error.errno in _UNREADABLE:
        kind = DamagedError
    return kind(f"cannot {verb} {path}: {error.strerror}. FIX: {fix}")
