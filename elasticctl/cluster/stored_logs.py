"""The output of workers that are gone, from their job's storage.

When the storage cannot be read, one line says so, and only what the cluster itself still has is shown.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticctl.api.errors import JobStorageError
from elasticctl.api.podtemplate import hardware
from elasticctl.api.spec import ElasticJob, worker_name
from elasticctl.cluster.base import LogLine, LogQuery

if TYPE_CHECKING:
    from elasticctl_store.storage import Storage
    from elasticctl_store.stored_logs import StoredLog


REMEMBERED = 64
"""How many of the lines that have been read are remembered."""
KEY_CHARS = 1024
"""How much of a line is compared: a longer one may have been broken up on its way."""
LAG_S = 0.5
"""The times of a line and its copy differ by at most this; otherwise its position is not certain."""
OVERLAP_S = 30.0
_ROUNDING_S = 2e-6
_FEWER = (REMEMBERED, 16, 4, 1)


@dataclass(frozen=True, slots=True)
class NumberedLine:
    """A line of the stored copy; `number` counts from 1, `at` is in seconds since the epoch."""

    number: int
    at: float
    text: str


class ReadLines:
    """The lines that have been read of one log, to continue in its stored copy; `whole`: from the first line on."""

    def __init__(self, *, whole: bool) -> None:
        self._whole, self._count = whole, 0
        self._last: deque[tuple[float, str]] = deque(maxlen=REMEMBERED)

    @property
    def begun(self) -> bool:
        """Whether anything has been read."""
        return bool(self._last)

    @property
    def needs_since(self) -> float | None:
        """The time from which the copy is needed; None: all of it."""
        return self._last[-1][0] - OVERLAP_S if self._last else None

    def note_line(self, at: float, text: str) -> None:
        """Note that a line has been read; call this for every line, in order."""
        self._count += 1
        self._last.append((at, text[:KEY_CHARS]))

    def note_gap(self) -> None:
        """Note that lines are missing before the next one: from here on, line numbers cannot be compared."""
        self._whole = False

    def rest(self, copy: Sequence[NumberedLine]) -> Sequence[NumberedLine]:
        """Return the lines of the copy that have not been read. `copy` begins at `needs_since` or earlier."""
        if not self._last or not copy:
            return copy
        if self._whole and self._agrees(copy):
            return [line for line in copy if line.number > self._count]
        keys = [line.text[:KEY_CHARS] for line in copy]
        for fewer in _FEWER:
            place = self._place(copy, keys, fewer)
            if place is not None:
                return copy[place + 1 :]
        return [line for line in copy if line.at > self._last[-1][0]]

    def _agrees(self, copy: Sequence[NumberedLine]) -> bool:
        """Whether the lines have the same numbers in the copy, where both are known."""
        first = self._count - len(self._last) + 1
        return all(
            line.text[:KEY_CHARS] == self._last[line.number - first][1]
            for line in copy
            if first <= line.number <= self._count
        )

    def _place(self, copy: Sequence[NumberedLine], keys: Sequence[str], fewer: int) -> int | None:
        """Return the index in the copy of the last line that was read: after the lines that were read before it."""
        wanted = [key for _, key in self._last][-fewer:]
        newest = self._last[-1][0]
        for place in range(len(copy) - 1, len(wanted) - 2, -1):
            lag_s = newest - copy[place].at
            if lag_s > LAG_S:
                return None
            if lag_s >= -_ROUNDING_S and keys[place - len(wanted) + 1 : place + 1] == wanted:
                return place
        return None


@dataclass(frozen=True, slots=True)
class StoredIncarnation:
    """An incarnation of a worker whose log is in the storage; `started_at` is in seconds since the epoch."""

    worker: str
    started_at: float
    uid: str


class StoredLogs:
    """The stored logs of one job; thread-safe.

    The storage is opened on first use. If it cannot be read, `say` reports that once; only `delete` raises an error.
    """

    def __init__(self, job: ElasticJob, say: Callable[[str], None], former: str = "") -> None:
        """`former` is a storage that the job had before it moved; by default its own is meant."""
        found = hardware(job)
        self._job_uid, self._say = job.uid, say
        self._url = (former or found.storage) if found.launched else ""
        self._lock = threading.Lock()
        self._storage: Storage | None = None
        self._reported = False

    @property
    def kept(self) -> bool:
        """Whether there may be any; False for a job without a storage or without our launcher."""
        return bool(self._url and self._job_uid)

    def past(self, live: Mapping[str, str], query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines of the incarnations that a query asks for and the cluster no longer has, merged by time.

        `live`: worker -> uid of the incarnations that the cluster has.
        """
        logs = {}
        for log in self._find():
            found = log.incarnation
            logs[StoredIncarnation(found.worker, found.started_at, found.uid)] = log
        wanted = [logs[past] for past in chosen(logs, live, query)]
        self._prime(wanted, query)
        return heapq.merge(*(self._lines(log, query) for log in wanted), key=lambda line: line.at)

    def of(self, worker: str, uid: str, query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines of one incarnation that a query asks for."""
        for log in self._find(worker):
            if log.incarnation.uid == uid:
                yield from self._lines(log, query)

    def rest(self, worker: str, uid: str, read: ReadLines, query: LogQuery) -> Iterator[LogLine]:
        """Yield the lines of one incarnation that have not been read from its live log."""
        if not read.begun:
            yield from self.of(worker, uid, query)
            return
        copy: list[NumberedLine] = []
        for log in self._find(worker):
            if log.incarnation.uid == uid:
                with self._report_errors():
                    lines = log.lines(since=read.needs_since)
                    copy += [NumberedLine(line.number, line.at, line.text) for line in lines]
        for line in read.rest(copy):
            if query.since is None or line.at >= query.since:
                yield LogLine(worker, line.at, line.text)

    def failing_if_none(self, lines: Iterable[LogLine]) -> Iterator[LogLine]:
        """Yield the lines of a query; JobStorageError where there are none, and the storage could not be read."""
        found = False
        for line in lines:
            found = True
            yield line
        if self._reported and not found:
            raise JobStorageError("no output of the job could be read. FIX: give this machine access to its storage")

    def delete(self) -> int:
        """Delete all of them and return the number of deleted objects. Raises JobStorageError."""
        if not self.kept:
            return 0
        from elasticctl_store import stored_logs
        from elasticctl_store.errors import MissingError, TrainError

        try:
            return stored_logs.delete(self._open_storage(), self._job_uid)
        except MissingError:
            return 0
        except TrainError as e:
            raise JobStorageError(str(e)) from e

    def _find(self, worker: str = "") -> list[StoredLog]:
        found: list[StoredLog] = []
        if self.kept:
            from elasticctl_store import stored_logs

            with self._report_errors():
                found = stored_logs.find(self._open_storage(), self._job_uid, worker)
        return found

    def _prime(self, logs: list[StoredLog], query: LogQuery) -> None:
        if logs:
            from elasticctl_store import stored_logs

            with self._report_errors():
                stored_logs.prime(logs, since=query.since, tail=query.tail)

    def _lines(self, log: StoredLog, query: LogQuery) -> Iterator[LogLine]:
        with self._report_errors():
            for line in log.lines(since=query.since, tail=query.tail):
                yield LogLine(log.incarnation.worker, line.at, line.text)

    @contextmanager
    def _report_errors(self) -> Iterator[None]:
        """End the block at the first error of the storage, and report the first of all errors."""
        from elasticctl_store.errors import TrainError

        try:
            yield
        except TrainError as e:
            with self._lock:
                first, self._reported = not self._reported, True
            if first:
                self._say(f"cannot read the stored output of workers that are gone: {e}")

    def _open_storage(self) -> Storage:
        from elasticctl.cluster.job_storages import open_storage_here

        with self._lock:
            if self._storage is None:
                self._storage = open_storage_here(self._url)
            return self._storage


def chosen(found: Iterable[StoredIncarnation], live: Mapping[str, str], query: LogQuery) -> list[StoredIncarnation]:
    """Return the incarnations that a query asks for and that only the storage has.

    Of each worker that is the newest one, unless the cluster has a newer one; with `previous` the earlier ones, with
    `everything` all of them.
    """
    wanted = []
    ordered = sorted(found, key=lambda past: (past.worker, past.started_at, past.uid))
    for worker, group in itertools.groupby(ordered, key=lambda past: past.worker):
        if query.workers and worker not in query.workers:
            continue
        gone = [past for past in group if past.uid != live.get(worker)]
        if query.everything:
            wanted += gone
        elif query.previous:
            wanted += gone if worker in live else gone[:-1]
        elif worker not in live:
            wanted += gone[-1:]
    return wanted


def someone_is_gone(job: ElasticJob, live: Collection[str], query: LogQuery) -> bool:
    """Whether a worker that the query asks for may have printed something and be gone: only then is the storage read.

    No worker of a job that has only just started is gone, though some may not exist yet.
    """
    status = job.status
    names = {worker.name for worker in status.workers if worker.started_at is not None}
    if status.phase.terminal or status.restarts or status.scalings:
        sizes = [size for scaling in status.scalings for size in (scaling.from_workers, scaling.to_workers)]
        names |= {worker_name(job.name, index) for index in range(max([job.desired, *sizes]))}
    return any(name not in live and (not query.workers or name in query.workers) for name in names)
