"""What all object stores have in common: `Storage` on top of the few requests of a `Service`.

Objects are read in ranges, several in parallel and directly into the caller's memory. Reading back is also how a lost
response is resolved: if a repeated create is refused because the key exists, it succeeded if the object has the bytes
that were to be written.
"""

from __future__ import annotations

import enum
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from elasticctl_store.errors import DamagedError, ExistsError, MissingError, StorageError
from elasticctl_store.parallel import each
from elasticctl_store.storage.base import is_key, most_bytes
from elasticctl_store.storage.http import Doubt, HttpResponse

RANGE_BYTES = 16 << 20
"""The size of the ranges in which an object is read: S3 recommends 8 to 16 MiB."""
THREADS = 8
"""Requests in parallel: one connection to S3 transfers some 90 MB/s, a fraction of what a machine can receive."""
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


@dataclass(slots=True)
class Body:
    """An object's bytes, in the caller's memory. `crc` is their CRC-32, once it is known."""

    views: tuple[memoryview, ...]
    size_bytes: int
    crc: int | None = None

    @classmethod
    def of(cls, parts: Sequence[bytes | memoryview]) -> Body:
        """Return the parts as views of bytes."""
        views = tuple(memoryview(part).cast("B") for part in parts if len(part))
        return cls(views, sum(len(view) for view in views))

    def crc32(self) -> int:
        """Return the CRC-32, computed once: it costs half as much processor time as sending."""
        if self.crc is None:
            self.crc = 0
            for view in self.views:
                self.crc = zlib.crc32(view, self.crc)
        return self.crc

    def cut(self, start: int, stop: int) -> Body:
        """Return the bytes from `start` to `stop`, or to the end."""
        taken, offset = [], 0
        for view in self.views:
            piece = view[max(0, start - offset) : max(0, stop - offset)]
            if len(piece):
                taken.append(piece)
            offset += len(view)
        return Body(tuple(taken), sum(len(view) for view in taken))


@dataclass(frozen=True, slots=True)
class Action:
    """What is being done, in words, and the permission that it needs."""

    verb: str
    preposition: str
    permission: str


class UploadOutcome(enum.Enum):
    """The result of a create. UNSURE: the key exists, and an earlier try of our own may have created it."""

    STORED = enum.auto()
    TAKEN = enum.auto()
    UNSURE = enum.auto()


class Service(Protocol):
    """The requests that differ between object stores. Every method may raise StorageError with an explanation."""

    @property
    def url(self) -> str:
        """See Storage.url."""

    def put(self, key: str, body: Body, *, if_absent: bool) -> UploadOutcome:
        """Write an object; without `if_absent` the result is always STORED."""

    def get(self, key: str) -> bytes:
        """Read a whole object. Raises MissingError."""

    def read(self, key: str, start: int, into: memoryview) -> int:
        """Read a range and return the size of the whole object. Raises MissingError. Beyond its end, `into` is left
        unchanged."""

    def page(self, prefix: str, after: str) -> tuple[list[str], bool]:
        """Return a page of keys in order, from `after` on (it may be included), and whether it is the last page."""

    def copy(self, origin: Service, key: str, size_bytes: int) -> str | None:
        """See CloudStorage.copy_from."""

    def remove(self, key: str) -> None:
        """Delete an object, if it exists."""

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """See Storage.discard_unfinished."""


class CloudStorage:
    """A `Storage` on a bucket."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def url(self) -> str:
        return self._service.url

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        self._check(key)
        body = Body.of(parts)
        outcome = self._service.put(key, body, if_absent=if_absent)
        if outcome is UploadOutcome.STORED or (outcome is UploadOutcome.UNSURE and self._holds(key, body)):
            return body.crc32()
        raise ExistsError(f"{self.url}: {key} is already there")

    def get(self, key: str) -> bytes:
        self._check(key)
        return self._service.get(key)

    def read_into(self, key: str, start: int, into: memoryview) -> None:
        self._check(key)

        def read(offset: int) -> None:
            piece = into[offset : offset + RANGE_BYTES]
            size_bytes = self._service.read(key, start + offset, piece)
            if size_bytes < start + offset + len(piece):
                expected = start + len(into)
                raise DamagedError(f"{self.url}: {key} ends at byte {size_bytes}, {expected} were expected")

        each(read, range(0, len(into), RANGE_BYTES), THREADS)

    def copy_from(self, origin: CloudStorage, key: str, size_bytes: int) -> str | None:
        """Have the service copy an object of another storage to the same key, without transferring its bytes through
        this host.

        Returns its CRC-32 in hexadecimal if the service reports one, "" if it does not. Returns None if the service
        cannot or will not copy; the object may or may not exist then.
        """
        self._check(key)
        return self._service.copy(origin._service, key, size_bytes)

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        while True:
            keys, last = self._service.page(prefix, after)
            # Names that are not keys, such as those that a console creates for folders, are not ours.
            found = [key for key in keys if key > after and is_key(key)]
            if found or last or not keys:
                return found
            after = keys[-1]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._check(key)
        for key in keys[:1]:
            self._service.remove(key)
        each(self._service.remove, keys[1:], THREADS)

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        self._service.discard_unfinished(is_ours)

    def _check(self, key: str) -> None:
        if not is_key(key):
            raise StorageError(f"{key!r} is not a key: it must be names separated by single slashes")

    def _holds(self, key: str, body: Body) -> bool:
        """Return whether the object exists with exactly these bytes."""
        buffer = memoryview(bytearray(min(RANGE_BYTES, max(1, body.size_bytes))))
        try:
            for start in range(0, max(1, body.size_bytes), RANGE_BYTES):
                wanted = body.cut(start, start + RANGE_BYTES)
                into = buffer[: max(1, wanted.size_bytes)]
                if self._service.read(key, start, into) != body.size_bytes:
                    return False
                position = 0
                for view in wanted.views:
                    if into[position : position + len(view)] != view:
                        return False
                    position += len(view)
        except MissingError:
            return False
        return True


def doubt_range(answer: HttpResponse, start: int, into: memoryview) -> str:
    """Return what is implausible about the response to a request for a range; "" if nothing is."""
    try:
        total_bytes(answer, start, into)
    except StorageError as e:
        return str(e)
    return ""


def refuse_too_large(answer: HttpResponse, url: str, key: str) -> None:
    """Raise DamagedError for an object that is too large to be read in one request."""
    if answer.is_too_large:
        raise DamagedError(f"{url}: {key} has more than {most_bytes(key)} bytes: more than is read in one request")


def doubt_listing(parsed: Callable[[HttpResponse], Sequence[str]], prefix: str) -> Doubt:
    """Return a check of whether a response is a page of a listing below `prefix`.

    `parsed` returns the names in a response, or raises StorageError.
    """

    def doubt(answer: HttpResponse) -> str:
        try:
            strange = next((name for name in parsed(answer) if not name.startswith(prefix)), None)
        except StorageError as e:
            return str(e)
        return "" if strange is None else f"it lists {strange!r:.100}, which is not below {prefix!r}"

    return doubt


def total_bytes(answer: HttpResponse, start: int, into: memoryview) -> int:
    """Return the size of the object that a range was requested of, after checking that the response is that range.

    Raises StorageError if it is another range, or none.
    """
    found = _RANGE.fullmatch(answer.headers.get("content-range", ""))
    total = int(found[2]) if found else 0
    if answer.status == 416:
        return total  # 0 if the response does not say how short the object is
    wanted_bytes = max(0, min(len(into), total - start))
    if found is None or answer.filled_bytes != wanted_bytes or (wanted_bytes and int(found[1] or -1) != start):
        raise StorageError("the service does not answer range requests as HTTP requires: check the endpoint")
    return total
