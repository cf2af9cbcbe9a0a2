"""The output of workers as objects in their job's storage: keys and format. Without torch.

    logs/<job uid>/<worker>/<start>-<pod uid>/000000000001.gz     the lines from number 1 on of one incarnation

An object is text, one line each: `<number> <time> <rank> <text>`; the rank is `-` for output of the launcher. Numbers
count all lines of an incarnation, so a missing line is noticed. The text is compressed as a series of gzip members, one
for each time that lines were appended: `zcat` reads it, and existing bytes never change.
"""

from __future__ import annotations

import bisect
import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

from elasticctl_store.errors import DamagedError, MissingError
from elasticctl_store.parallel import each
from elasticctl_store.storage import Storage, all_keys

FOLDER = "logs/"
SEGMENT_BYTES = 1 << 19
"""The size of the text in one object; it may be one line more."""
MAX_SEGMENT_BYTES = 16 * SEGMENT_BYTES
"""An object with more text than this was not written by this library."""
_START = "%Y%m%dT%H%M%S"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}"
_KEY = re.compile(rf"{FOLDER}({_NAME})/({_NAME})/(\d{{8}}T\d{{6}})\.(\d{{3}})Z-({_NAME})/(\d{{12}})\.gz", re.ASCII)


@dataclass(frozen=True, slots=True)
class StoredLine:
    """One line, without its newline. `number` counts from 1; `at` is in seconds since the epoch; `rank` None: the
    launcher."""

    number: int
    at: float
    rank: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Incarnation:
    """One life of a worker; `started_at` is in seconds since the epoch, in milliseconds as in its folder's name."""

    job_uid: str
    worker: str
    started_at: float
    uid: str

    @property
    def folder(self) -> str:
        """The prefix of its objects. In order of names, a worker's incarnations are in order of time."""
        micros = round(self.started_at * 1e6)
        start = f"{datetime.fromtimestamp(micros // 1_000_000, UTC):{_START}}.{micros % 1_000_000 // 1000:03d}Z"
        return f"{job_folder(self.job_uid)}{self.worker}/{start}-{self.uid}/"

    def key(self, first: int) -> str:
        """Return the key of the object whose first line has the number `first`."""
        return f"{self.folder}{first:012d}.gz"


def job_folder(job_uid: str) -> str:
    """Return the prefix of the output of all workers of a job."""
    return f"{FOLDER}{job_uid}/"


def is_name(text: str) -> bool:
    """Return whether `text` can be the name of a worker, or a uid, in a key."""
    return re.fullmatch(_NAME, text, re.ASCII) is not None


def parse_key(key: str) -> tuple[Incarnation, int] | None:
    """Return the incarnation and the first line's number of an object; None for another key, such as a partial
    file's."""
    found = _KEY.fullmatch(key)
    if found is None:
        return None
    job_uid, worker, start, millis, uid, first = found.groups()
    try:
        started = datetime.strptime(start, _START).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
    return Incarnation(job_uid, worker, started + int(millis) / 1000, uid), int(first)


def encode(lines: Iterable[StoredLine]) -> bytes:
    """Return lines as text. Each stays one line, even if it contains newlines."""
    return "".join(
        f"{line.number} {_stamp(line.at)} {'-' if line.rank is None else line.rank} {line.text.replace(chr(10), ' ')}\n"
        for line in lines
    ).encode("utf-8", "replace")


def compress(text: bytes) -> bytes:
    """Return the text as one gzip member."""
    return gzip.compress(text, compresslevel=3, mtime=0)


def decode(data: bytes) -> list[StoredLine]:
    """Return the lines of an object, in order. Raises DamagedError if it is not in this format."""
    lines = []
    for raw in decompress(data).split(b"\n")[:-1]:
        number, _, rest = raw.decode("utf-8", "replace").partition(" ")
        stamp, _, rest = rest.partition(" ")
        rank, _, text = rest.partition(" ")
        try:
            at = datetime.fromisoformat(stamp).timestamp()
            lines.append(StoredLine(int(number), at, None if rank == "-" else int(rank), text))
        except ValueError as e:
            raise DamagedError(f"not a log of this version: {raw[:60]!r}") from e
    return lines


def decompress(data: bytes) -> bytes:
    """Return the text of a series of gzip members. Raises DamagedError."""
    found = bytearray()
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            found += member.decompress(data, MAX_SEGMENT_BYTES - len(found) + 1)
        except zlib.error as e:
            raise DamagedError(f"not a compressed log: {e}") from e
        if not member.eof or len(found) > MAX_SEGMENT_BYTES:
            raise DamagedError("the log is truncated, or larger than any that was written")
        data = member.unused_data
    return bytes(found)


def with_gaps(lines: Iterable[StoredLine], expected: int | None) -> Iterator[StoredLine]:
    """Yield the lines, and in place of missing lines one that says so.

    `expected` is the number that the first line should have; None: any.
    """
    for line in lines:
        if expected is not None and line.number > expected:
            missing = line.number - expected
            words = "1 line is missing" if missing == 1 else f"{missing} lines are missing"
            yield StoredLine(
                line.number - 1, line.at, None, f"[elasticctl] {words} here: the storage did not take them"
            )
        yield line
        expected = line.number + 1


def _stamp(at: float) -> str:
    seconds, micros = divmod(round(at * 1e6), 1_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{micros:06d}Z"


_KEPT_SEGMENTS = 3
_AT_ONCE = 8
_DELETED_AT_ONCE = 1000


class StoredLog:
    """The lines of one incarnation; `firsts` are the numbers of its objects' first lines, in order.

    Every method may raise StorageError. Not thread-safe.
    """

    def __init__(self, storage: Storage, incarnation: Incarnation, firsts: tuple[int, ...]) -> None:
        self.incarnation, self.firsts = incarnation, firsts
        self._storage = storage
        self._segment = lru_cache(_KEPT_SEGMENTS)(self._read)

    def lines(self, *, since: float | None = None, tail: int | None = None) -> Iterator[StoredLine]:
        """Yield all lines in order; with `since` (seconds since the epoch) those from then on, with `tail` the last
        ones.

        Missing lines are replaced by one that says so.
        """
        start, first = self._start(since, tail)
        wanted = (line for line in self._from(start) if line.number >= first)
        young = (line for line in wanted if since is None or line.at >= since)
        return with_gaps(young, 1 if since is None and tail is None else None)

    def prime(self, *, since: float | None = None, tail: int | None = None) -> None:
        """Read what `lines` will need first, so that many logs can be opened in parallel."""
        self._segment(self._start(since, tail)[0])

    def _start(self, since: float | None, tail: int | None) -> tuple[int, int]:
        """Return the index of the object to begin with, and the number of the first line that is wanted."""
        start, first = 0, 0
        if tail is not None:
            first = self._last_number() - tail + 1
            start = max(0, bisect.bisect_right(self.firsts, first) - 1)
        if since is not None:
            start = max(start, bisect.bisect_right(range(len(self.firsts)), since, key=self._begins_at) - 1)
        return start, first

    def _from(self, start: int) -> Iterator[StoredLine]:
        for index in range(start, len(self.firsts)):
            yield from self._segment(index)

    def _begins_at(self, index: int) -> float:
        lines = self._segment(index)
        return lines[0].at if lines else 0.0

    def _last_number(self) -> int:
        lines = self._segment(len(self.firsts) - 1)
        return lines[-1].number if lines else self.firsts[-1]

    def _read(self, index: int) -> tuple[StoredLine, ...]:
        """Return the lines of an object; none if it has been deleted since it was listed."""
        key = self.incarnation.key(self.firsts[index])
        try:
            return tuple(decode(self._storage.get(key)))
        except MissingError:
            return ()
        except DamagedError as e:
            raise DamagedError(f"{key}: {e}") from e


def find(storage: Storage, job_uid: str, worker: str = "") -> list[StoredLog]:
    """Return the logs of a job's workers, or of one worker, in order of worker and time. Raises StorageError."""
    firsts: dict[Incarnation, list[int]] = {}
    for key in all_keys(storage, job_folder(job_uid) + (f"{worker}/" if worker else "")):
        found = parse_key(key)
        if found is not None:
            firsts.setdefault(found[0], []).append(found[1])
    return [StoredLog(storage, incarnation, tuple(numbers)) for incarnation, numbers in firsts.items()]


def prime(logs: list[StoredLog], *, since: float | None = None, tail: int | None = None) -> None:
    """Open several logs in parallel. Raises StorageError."""
    each(lambda log: log.prime(since=since, tail=tail), logs, threads=_AT_ONCE)


def delete(storage: Storage, job_uid: str) -> int:
    """Delete the output of all workers of a job; return the number of deleted objects. Raises StorageError."""
    keys = list(all_keys(storage, job_folder(job_uid)))
    for start in range(0, len(keys), _DELETED_AT_ONCE):
        storage.delete(keys[start : start + _DELETED_AT_ONCE])
    return len(keys)
