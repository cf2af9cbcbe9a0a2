"""What all object stores have in common: `Storage` over the few requests of a `Service`.

Objects are read in ranges, several at a time and straight into the caller's memory. That is also how an answer that got
lost is settled: "already there", said to a repeated create, is success if what is there is what was to be written.
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
"""Size of the ranges an object is read in: S3 advises 8 to 16 MiB."""
THREADS = 8
"""Requests at a time: one connection to S3 moves some 90 MB/s, a fraction of what a machine can take."""
_RANGE = re.compile(r"bytes (?:(\d+)-\d+|\*)/(\d+)")


@dataclass(slots=True)
class Body:
    """An object's bytes, in the caller's memory. `crc`: their CRC-32, once it is known."""

    views: tuple[memoryview, ...]
    size_bytes: int
    crc: int | None = None

    @classmethod
    def of(cls, parts: Sequence[bytes | memoryview]) -> Body:
        """Look at the parts as bytes."""
        views = tuple(memoryview(part).cast("B") for part in parts if len(part))
        return cls(views, sum(len(view) for view in views))

    def crc32(self) -> int:
        """The CRC-32, found once: it costs as much as half of the sending."""
        if self.crc is None:
            self.crc = 0
            for view in self.views:
                self.crc = zlib.crc32(view, self.crc)
        return self.crc

    def cut(self, start: int, stop: int) -> Body:
        """The bytes from `start` up to `stop`, or to the end."""
        taken, offset = [], 0
        for view in self.views:
            piece = view[max(0, start - offset) : max(0, stop - offset)]
            if len(piece):
                taken.append(piece)
            offset += len(view)
        return Body(tuple(taken), sum(len(view) for view in taken))


@dataclass(frozen=True, slots=True)
class Action:
    """What is being done, in words, and the permission that takes."""

    verb: str
    preposition: str
    permission: str


class Outcome(enum.Enum):
    """How a create went. UNSURE: the key is taken, maybe by a try of our own that was never answered."""

    STORED = enum.auto()
    TAKEN = enum.auto()
    UNSURE = enum.auto()


class Service(Protocol):
    """The requests that differ between object stores. Every method may raise StorageError, explained."""

    @property
    def url(self) -> str:
        """See Storage.url."""

    def put(self, key: str, body: Body, *, if_absent: bool) -> Outcome:
        """Write an object; without `if_absent` always STORED."""

    def get(self, key: str) -> bytes:
        """Read a whole object; MissingError."""

    def read(self, key: str, start: int, into: memoryview) -> int:
        """Read a range and return the size of the whole object; MissingError. Past its end `into` stays as it is."""

    def page(self, prefix: str, after: str) -> tuple[list[str], bool]:
        """A page of keys in order, from `after` on or behind it, and whether it is the last one."""

    def copy(self, origin: Service, key: str, size_bytes: int) -> str | None:
        """See CloudStorage.copy_from."""

    def remove(self, key: str) -> None:
        """Delete an object, if it is there."""

    def discard_unfinished(self, is_ours: Callable[[str], bool]) -> None:
        """See Storage.discard_unfinished."""


class CloudStorage:
    """A bucket as storage."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @property
    def url(self) -> str:
        return self._service.url

    def put(self, key: str, parts: Sequence[bytes | memoryview], *, if_absent: bool = False) -> int:
        self._check(key)
        body = Body.of(parts)
        outcome = self._service.put(key, body, if_absent=if_absent)
        if outcome is Outcome.STORED or (outcome is Outcome.UNSURE and self._holds(key, body)):
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
        """Have the service copy an object of another storage, under the same key, without its bytes coming by here.

        Returns its CRC-32 in hexadecimal as the service tells it, "" where it does not, and None where it cannot or
        will not copy: then nothing is said of what is there.
        """
        self._check(key)
        return self._service.copy(origin._service, key, size_bytes)

    def list(self, prefix: str, *, after: str = "") -> list[str]:
        while True:
            keys, last = self._service.page(prefix, after)
            # What a console or a stranger left under other names cannot be ours, and could not be deleted either.
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
        """Is the object, to the byte, this one?"""
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
    """What is wrong with the answer to a request for a range; blank: nothing."""
    try:
        total_bytes(answer, start, into)
    except StorageError as e:
        return str(e)
    return ""


def refuse_too_large(answer: HttpResponse, url: str, key: str) -> None:
    """Raise DamagedError for an object that is larger than what is read in one go."""
    if answer.is_too_large:
        raise DamagedError(f"{url}: {key} has more than {most_bytes(key)} bytes: more than is read in one go")


def doubt_listing(parsed: Callable[[HttpResponse], Sequence[str]], prefix: str) -> Doubt:
    """What says that an answer is no page of a listing below `prefix`; `parsed` gives its names, or StorageError."""

    def doubt(answer: HttpResponse) -> str:
        try:
            strange = next((name for name in parsed(answer) if not name.startswith(prefix)), None)
        except StorageError as e:
            return str(e)
        return "" if strange is None else f"it lists {strange!r:.100}, which is not below {prefix!r}"

    return doubt


def total_bytes(answer: HttpResponse, start: int, into: memoryview) -> int:
    """The size of the object that a range was asked of, once the answer is seen to be that range.

    Raises StorageError when it is another one, or none.
    """
    found = _RANGE.fullmatch(answer.headers.get("content-range", ""))
    total = int(found[2]) if found else 0
    if answer.status == 416:
        return total  # 0 where it is not said how short the object is
    wanted_bytes = max(0, min(len(into), total - start))
    if found is None or answer.filled_bytes != wanted_bytes or (wanted_bytes and int(found[1] or -1) != start):
        raise StorageError("the service does not answer range requests as HTTP requires: check the endpoint")
    return total
