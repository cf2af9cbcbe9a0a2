"""The objects of the S3 server, in memory that is touched beforehand, so that storing costs one copy."""

from __future__ import annotations

import bisect
import mmap
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

CHUNK_BYTES = 1 << 20
SMALL_BYTES = 64 << 10
"""Objects up to this size get memory of their own: 10,000 of them would fill the pool with nearly empty chunks."""


class PoolFullError(Exception):
    """The pool has no chunk left."""


class Pool:
    """A fixed amount of memory in chunks, mapped and touched at the start."""

    def __init__(self, size_bytes: int) -> None:
        count = max(1, -(-size_bytes // CHUNK_BYTES))
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        self._memory = memoryview(mmap.mmap(-1, count * CHUNK_BYTES, flags=flags))
        self._free = list(range(count))
        self._lock = threading.Lock()

    def allocate(self, size_bytes: int) -> Blob:
        """Allocate memory for that many bytes. Raises PoolFullError, and allocates nothing then."""
        if size_bytes <= SMALL_BYTES:
            return Blob((memoryview(bytearray(size_bytes)),), size_bytes)
        count = -(-size_bytes // CHUNK_BYTES)
        with self._lock:
            if count > len(self._free):
                raise PoolFullError(f"{size_bytes} bytes do not fit into the server")
            numbers = [self._free.pop() for _ in range(count)]
        views = [self._memory[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES] for number in numbers]
        views[-1] = views[-1][: size_bytes - (count - 1) * CHUNK_BYTES]
        return Blob(tuple(views), size_bytes, tuple(numbers))

    def release(self, blob: Blob) -> None:
        """Free what was allocated; once for each blob."""
        with self._lock:
            self._free.extend(blob.numbers)


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes in pieces; `numbers` are the pool's chunks among them."""

    views: tuple[memoryview, ...]
    size_bytes: int
    numbers: tuple[int, ...] = ()

    @classmethod
    def joined(cls, blobs: Sequence[Blob]) -> Blob:
        """Return the concatenation of blobs, without a copy; it replaces them."""
        views = tuple(view for blob in blobs for view in blob.views)
        numbers = tuple(number for blob in blobs for number in blob.numbers)
        return cls(views, sum(blob.size_bytes for blob in blobs), numbers)

    def pieces(self, start: int, stop: int) -> Iterator[memoryview]:
        """Yield the bytes from `start` to `stop`."""
        offset = 0
        for view in self.views:
            piece = view[max(0, start - offset) : max(0, stop - offset)]
            if len(piece):
                yield piece
            offset += len(view)
            if offset >= stop:
                return


@dataclass(slots=True)
class Objects:
    """All buckets together: a name is `bucket/key`. Every bucket exists."""

    pool: Pool
    _blobs: dict[str, Blob] = field(default_factory=dict)
    _names: list[str] = field(default_factory=list)
    _uploads: dict[str, tuple[str, dict[int, Blob]]] = field(default_factory=dict)
    _count: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def put(self, name: str, blob: Blob, *, if_absent: bool) -> bool:
        """Store an object; return False, and free the memory, if `if_absent` and the name exists."""
        with self._lock:
            if if_absent and name in self._blobs:
                self.pool.release(blob)
                return False
            self._drop(name)
            bisect.insort(self._names, name)
            self._blobs[name] = blob
            return True

    def get(self, name: str) -> Blob | None:
        with self._lock:
            return self._blobs.get(name)

    def delete(self, name: str) -> None:
        with self._lock:
            self._drop(name)

    def drop_prefix(self, prefix: str) -> None:
        """Delete all objects whose names start with `prefix`, and all uploads of such."""
        with self._lock:
            for name in list(self.names(prefix, "")):
                self._drop(name)
            for upload, (name, _) in list(self._uploads.items()):
                if name.startswith(prefix):
                    self.abort(upload)

    def names(self, prefix: str, after: str) -> Iterator[str]:
        """Return the names that start with `prefix` and sort after `after`, in order."""
        at = max(bisect.bisect_left(self._names, prefix), bisect.bisect_right(self._names, after))
        while at < len(self._names) and self._names[at].startswith(prefix):
            yield self._names[at]
            at += 1

    def page(self, prefix: str, after: str, most: int) -> tuple[list[tuple[str, int]], bool]:
        """Return up to `most` names with sizes in bytes, and whether there are more."""
        with self._lock:
            found: list[tuple[str, int]] = []
            for name in self.names(prefix, after):
                if len(found) == most:
                    return found, True
                found.append((name, self._blobs[name].size_bytes))
            return found, False

    def begin_upload(self, name: str) -> str:
        """Start a multipart upload; return its id."""
        with self._lock:
            self._count += 1
            self._uploads[str(self._count)] = (name, {})
            return str(self._count)

    def add_part(self, upload: str, number: int, blob: Blob) -> bool:
        """Store one part; return False, and free the memory, if there is no such upload."""
        with self._lock:
            if upload not in self._uploads:
                self.pool.release(blob)
                return False
            parts = self._uploads[upload][1]
            self._release([parts[number]] if number in parts else [])
            parts[number] = blob
            return True

    def complete(self, upload: str, *, if_absent: bool) -> bool | None:
        """Make the parts one object, in order; return False if `if_absent` and it exists, None if there is no such
        upload."""
        with self._lock:
            if upload not in self._uploads:
                return None
            name, parts = self._uploads.pop(upload)
            return self.put(name, Blob.joined([parts[number] for number in sorted(parts)]), if_absent=if_absent)

    def abort(self, upload: str) -> None:
        with self._lock:
            _, parts = self._uploads.pop(upload, ("", {}))
            self._release(parts.values())

    def _drop(self, name: str) -> None:
        blob = self._blobs.pop(name, None)
        if blob is not None:
            del self._names[bisect.bisect_left(self._names, name)]
            self._release([blob])

    def _release(self, blobs: Iterable[Blob]) -> None:
        for blob in blobs:
            self.pool.release(blob)
