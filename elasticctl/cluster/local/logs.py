"""Reads the workers' log files: merged by time, or as they grow.

Each line of a file is `<RFC 3339 time> <text>`. A worker may have had several incarnations, each with its own file. If
a file is gone, the job's storage may have a copy.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from elasticctl.api.codec import from_rfc3339
from elasticctl.api.errors import NotFoundError
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.cluster.stored_logs import ReadLines

if TYPE_CHECKING:
    from elasticctl.cluster.stored_logs import StoredLogs

POLL_S = 0.1
LIST_EVERY_S = 0.4
BLOCK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class LogFile:
    """One incarnation of a worker; `ended`: nothing will be added to its file."""

    worker: str
    uid: str
    ended: bool


@dataclass(frozen=True, slots=True)
class LogFiles:
    """All incarnations of a job's workers, oldest first; `finished`: the job has ended and there will be no more."""

    finished: bool
    files: tuple[LogFile, ...]

    @classmethod
    def from_json(cls, answer: Mapping[str, Any]) -> LogFiles:
        """Parse the supervisor's answer."""
        return cls(bool(answer["finished"]), tuple(LogFile(f["worker"], f["uid"], f["ended"]) for f in answer["files"]))

    def wanted(self, query: LogQuery) -> tuple[LogFile, ...]:
        """Return the files that a query asks for: the newest of each worker, the earlier ones (`previous`), or all."""
        newest = {file.worker: file.uid for file in self.files}
        return tuple(
            f for f in self._of(query) if query.everything or (newest[f.worker] == f.uid) is not query.previous
        )

    def added(self, since: LogFiles, query: LogQuery) -> tuple[LogFile, ...]:
        """Return the files that an earlier list did not have, not only the newest: some workers end within moments."""
        known = {file.uid for file in since.files}
        return () if query.previous else tuple(f for f in self._of(query) if f.uid not in known)

    def _of(self, query: LogQuery) -> Iterator[LogFile]:
        return (file for file in self.files if not query.workers or file.worker in query.workers)


def read_logs(
    first: LogFiles,
    list_files: Callable[[], LogFiles],
    path_of: Callable[[str], Path],
    query: LogQuery,
    stored: StoredLogs | None = None,
) -> Iterator[LogLine]:
    """Yield the lines that `query` asks for, from the files in `first`; with `follow`, also from later ones."""

    def tail_of(file: LogFile) -> Tail:
        return Tail(file, path_of(file.uid), query, stored)

    if query.follow:
        return _follow_logs(first, list_files, tail_of, query)
    return heapq.merge(*(tail_of(file).read() for file in first.wanted(query)), key=lambda line: line.at)


def _follow_logs(
    first: LogFiles, list_files: Callable[[], LogFiles], tail_of: Callable[[LogFile], Tail], query: LogQuery
) -> Iterator[LogLine]:
    tails = {file.uid: tail_of(file) for file in first.wanted(query)}
    known, found, next_list_at = set(tails), first, 0.0
    while True:
        has_ended = False
        if time.monotonic() >= next_list_at:
            try:
                found = list_files()
            except NotFoundError:  # the job has been deleted, and its logs with it
                return
            next_list_at = time.monotonic() + LIST_EVERY_S
            has_ended = found.finished and all(file.ended for file in found.files)
            for file in found.added(first, query):
                if file.uid not in known:
                    known.add(file.uid)
                    tails[file.uid] = tail_of(file)
            for file in found.files:
                if file.ended and file.uid in tails:
                    tails[file.uid].ended = True
        # Listed before read: a file that was complete when it was listed is read to its end here.
        yield from heapq.merge(*(tail.read() for tail in tails.values()), key=lambda line: line.at)
        if has_ended:
            return
        tails = {uid: tail for uid, tail in tails.items() if not tail.ended}
        time.sleep(POLL_S)


class Tail:
    """A position in one worker's file; `read` yields what has been added. `ended`: nothing more will be."""

    def __init__(self, file: LogFile, path: Path, query: LogQuery, stored: StoredLogs | None) -> None:
        self._file, self._path, self._query, self._stored = file, path, query, stored
        self._read = ReadLines(whole=query.tail is None and query.since is None)
        self._offset: int | None = None
        self._torn = b""
        self.ended = file.ended

    def read(self) -> Iterator[LogLine]:
        """Yield the complete lines that have been added.

        The file is open only while a block is read: a job may have had more workers than a process may open files. A
        missing file does not exist yet or, once its worker has ended, does not exist any more: then its lines are read
        from the storage, once.
        """
        try:
            while block := self._next_block():
                *lines, self._torn = (self._torn + block).split(b"\n")
                yield from self._parse(lines)
        except FileNotFoundError:
            if self.ended and self._stored is not None:
                stored, self._stored = self._stored, None
                yield from stored.rest(self._file.worker, self._file.uid, self._read, self._query)

    def _next_block(self) -> bytes:
        with self._path.open("rb") as file:
            if self._offset is None:
                self._offset = self._start_offset(file)
            file.seek(self._offset)
            block = file.read(BLOCK_BYTES)
        self._offset += len(block)
        return block

    def _start_offset(self, file: BinaryIO) -> int:
        by_tail = 0 if self._query.tail is None else tail_offset(file, self._query.tail)
        by_time = 0 if self._query.since is None else time_offset(file, self._query.since)
        return max(by_tail, by_time)

    def _parse(self, lines: list[bytes]) -> Iterator[LogLine]:
        since = self._query.since
        for line in lines:
            stamp, _, text = line.decode("utf-8", "replace").partition(" ")
            at = from_rfc3339(stamp)
            if at is None:
                continue
            self._read.note(at, text)
            if since is None or at >= since:
                yield LogLine(self._file.worker, at, text)


def tail_offset(file: BinaryIO, lines: int) -> int:
    """Return the offset of the last `lines` lines of a file, which is read from its end."""
    size = file.seek(0, 2)
    if lines == 0:
        return size
    wanted, end = lines + 1, size  # the file ends with a newline of its own
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start)
        count = block.count(b"\n")
        if count >= wanted:
            position = len(block)
            for _ in range(wanted):
                position = block.rfind(b"\n", 0, position)
            return start + position + 1
        wanted, end = wanted - count, start
    return 0


def time_offset(file: BinaryIO, since: float) -> int:
    """Return the offset of a line that is older than `since`, by less than a block or by one line, or 0."""
    low, high = 0, file.seek(0, 2)
    while high - low > BLOCK_BYTES:
        middle = (low + high) // 2
        file.seek(middle)
        file.readline()  # the rest of a line
        start, stamp = file.tell(), file.readline().partition(b" ")[0]
        at = from_rfc3339(stamp.decode("ascii", "replace"))
        if at is None or at >= since or start >= high:
            high = middle
        else:
            low = start
    return low
