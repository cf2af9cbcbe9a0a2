"""Reads the workers' logs: merged by time, or as they grow.

Each line of a file is `<RFC 3339 time> <text>`. A worker may have had several incarnations, each with its own log. If
a log is gone, the job's storage may have a copy.
"""

from __future__ import annotations

import heapq
import os
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
GAP = (
    "elasticctl: lines are missing here: of a worker's log on the local cluster, the first 10 MiB and the last 30 to 40"
    " MiB are kept"
)


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
    """A position in one worker's log; `read` yields what has been added. `ended`: nothing more will be."""

    def __init__(self, file: LogFile, path: Path, query: LogQuery, stored: StoredLogs | None) -> None:
        self._file, self._log, self._query, self._stored = file, path, query, stored
        self._read = ReadLines(whole=query.tail is None and query.since is None)
        self._place: Place | None = None
        self._torn = b""
        self.ended = file.ended

    def read(self) -> Iterator[LogLine]:
        """Yield the complete lines that have been added.

        A file is open only while a block is read: a job may have had more workers than a process may open files. A log
        without files does not exist yet or, once its worker has ended, does not exist any more: then its lines are read
        from the storage, once.
        """
        try:
            if self._place is None:
                self._place = start_of(self._log, self._query.tail, self._query.since)
            while True:
                # Listed before read: a file that has a later one is complete.
                later = next((number for number in numbers_of(self._log) if number > self._place[0]), None)
                block = self._next_block(*self._place, is_needed=later is None)
                if block:
                    *lines, self._torn = (self._torn + block).split(b"\n")
                    yield from self._parse(lines)
                elif later is None:
                    return
                else:
                    yield from self._continue_in(later, is_whole=block is not None and later == self._place[0] + 1)
        except FileNotFoundError:
            if self.ended and self._stored is not None:
                stored, self._stored = self._stored, None
                yield from stored.rest(self._file.worker, self._file.uid, self._read, self._query)

    def _next_block(self, number: int, offset: int, *, is_needed: bool) -> bytes | None:
        """Read on in a file; None if it is gone, unless it `is_needed`, which raises FileNotFoundError then."""
        try:
            with file_of(self._log, number).open("rb") as file:
                file.seek(offset)
                block = file.read(BLOCK_BYTES)
        except FileNotFoundError:
            if is_needed:
                raise
            return None
        self._place = number, offset + len(block)
        return block

    def _continue_in(self, later: int, *, is_whole: bool) -> Iterator[LogLine]:
        """Continue in a later file; `is_whole`: no lines between here and there have been deleted."""
        torn, self._torn, self._place = self._torn, b"", (later, 0)
        yield from self._parse([torn])
        if not is_whole:
            self._read.note_gap()
            at, since = first_time(self._log, later) or time.time(), self._query.since
            if since is None or at >= since:
                yield LogLine(self._file.worker, at, GAP)

    def _parse(self, lines: list[bytes]) -> Iterator[LogLine]:
        since = self._query.since
        for line in lines:
            stamp, _, text = line.decode("utf-8", "replace").partition(" ")
            at = from_rfc3339(stamp)
            if at is None:
                continue
            self._read.note_line(at, text)
            if since is None or at >= since:
                yield LogLine(self._file.worker, at, text)


BLOCK_BYTES = 1 << 16

Place = tuple[int, int]
"""The number of a file, and an offset in it."""


def file_of(log: Path, number: int) -> Path:
    """Return the path of a file of the log whose first file is `log`."""
    return log.with_name(f"{log.name}.{number}") if number else log


def numbers_of(log: Path) -> list[int]:
    """Return the numbers of the files that are there, in order. Raises FileNotFoundError if their folder is not."""
    found = [name.removeprefix(log.name) for name in os.listdir(log.parent) if name.startswith(log.name)]
    return sorted(int(rest[1:] or 0) for rest in found if rest == "" or (rest[0] == "." and rest[1:].isdecimal()))


def start_of(log: Path, tail: int | None, since: float | None) -> Place:
    """Return where the last `tail` lines begin, and those of the time `since`. Raises FileNotFoundError for no log."""
    numbers = numbers_of(log)
    if not numbers:
        raise FileNotFoundError(log)
    by_tail = (numbers[0], 0) if tail is None else _tail_place(log, numbers, tail)
    return by_tail if since is None else max(by_tail, _time_place(log, numbers, since))


def first_time(log: Path, number: int) -> float | None:
    """Return the time of the first line of a file; None if there is none."""
    with file_of(log, number).open("rb") as file:
        return from_rfc3339(file.readline().partition(b" ")[0].decode("ascii", "replace"))


def _tail_place(log: Path, numbers: list[int], lines: int) -> Place:
    for number in reversed(numbers):
        with file_of(log, number).open("rb") as file:
            offset = tail_offset(file, lines)
            if offset or not lines:
                return number, offset
            file.seek(0)
            lines -= sum(1 for _ in file)
        if not lines:
            return number, 0
    return numbers[0], 0


def _time_place(log: Path, numbers: list[int], since: float) -> Place:
    older = [number for number in numbers if (first_time(log, number) or since) < since]
    number = older[-1] if older else numbers[0]
    with file_of(log, number).open("rb") as file:
        return number, time_offset(file, since)


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
