"""What workers that are gone have printed, from their job's storage; the only importer of `elasticctl_train.logs` here.

Who may not or cannot read the storage is told so in one line, and sees what the cluster itself still has.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.cluster.handover import Handover, Numbered
from elasticctl.errors import StorageError
from elasticctl.podtemplate import hardware
from elasticctl.spec import ElasticJob, worker_name

if TYPE_CHECKING:
    from elasticctl_train.logs.archive import StoredLog
    from elasticctl_train.storage import Storage


@dataclass(frozen=True, slots=True)
class Past:
    """One life of a worker that the storage tells of; `started_at` in seconds since the epoch."""

    worker: str
    started_at: float
    uid: str


class StoredLogs:
    """The stored logs of one job; opens its storage when it is first needed, and `say`s once why it cannot.

    Its methods raise nothing for a storage that cannot be read, but for `delete`. Thread-safe.
    """

    def __init__(self, job: ElasticJob, say: Callable[[str], None]) -> None:
        found = hardware(job)
        self._job_uid, self._say = job.uid, say
        self._url = found.storage if found.launched else ""
        self._lock = threading.Lock()
        self._storage: Storage | None = None
        self._told = False

    @property
    def kept(self) -> bool:
        """May there be any? False for a job without a storage, or without our launcher."""
        return bool(self._url and self._job_uid)

    def past(self, live: Mapping[str, str], query: LogQuery) -> Iterator[LogLine]:
        """The lines of the incarnations that a query is about and the cluster no longer has, merged by time.

        `live`: worker -> uid of those that the cluster has.
        """
        logs = {Past(i.worker, i.started_at, i.uid): log for log in self._find() for i in [log.incarnation]}
        wanted = [logs[past] for past in chosen(logs, live, query)]
        self._prime(wanted, query)
        return heapq.merge(*(self._lines(log, query) for log in wanted), key=lambda line: line.at)

    def of(self, worker: str, uid: str, query: LogQuery) -> Iterator[LogLine]:
        """The lines of one incarnation that a query is about."""
        for log in self._find(worker):
            if log.incarnation.uid == uid:
                yield from self._lines(log, query)

    def rest(self, worker: str, uid: str, read: Handover, query: LogQuery) -> Iterator[LogLine]:
        """The lines of one incarnation that come after what has been read of its live log."""
        if not read.begun:
            yield from self.of(worker, uid, query)
            return
        copy: list[Numbered] = []
        for log in self._find(worker):
            if log.incarnation.uid == uid:
                with self._saying_why_not():
                    copy += [Numbered(line.number, line.at, line.text) for line in log.lines(since=read.needs_since)]
        for line in read.rest(copy):
            if query.since is None or line.at >= query.since:
                yield LogLine(worker, line.at, line.text)

    def delete(self) -> int:
        """Delete all of them; returns how many objects that were. Raises StorageError."""
        if not self.kept:
            return 0
        from elasticctl_train.errors import MissingError, TrainError
        from elasticctl_train.logs import archive

        try:
            return archive.delete(self._opened(), self._job_uid)
        except MissingError:
            return 0
        except TrainError as e:
            raise StorageError(str(e)) from e

    def _find(self, worker: str = "") -> list[StoredLog]:
        found: list[StoredLog] = []
        if self.kept:
            from elasticctl_train.logs import archive

            with self._saying_why_not():
                found = archive.find(self._opened(), self._job_uid, worker)
        return found

    def _prime(self, logs: list[StoredLog], query: LogQuery) -> None:
        if logs:
            from elasticctl_train.logs import archive

            with self._saying_why_not():
                archive.prime(logs, since=query.since, tail=query.tail)

    def _lines(self, log: StoredLog, query: LogQuery) -> Iterator[LogLine]:
        with self._saying_why_not():
            for line in log.lines(since=query.since, tail=query.tail):
                yield LogLine(log.incarnation.worker, line.at, line.text)

    @contextmanager
    def _saying_why_not(self) -> Iterator[None]:
        """Ends what is done in it at the first error of the storage, and says that once."""
        from elasticctl_train.errors import TrainError

        try:
            yield
        except TrainError as e:
            with self._lock:
                first, self._told = not self._told, True
            if first:
                self._say(f"what workers that are gone have printed cannot be read, only what is still there: {e}")

    def _opened(self) -> Storage:
        from elasticctl_train import storage
        from elasticctl_train.errors import MissingError

        with self._lock:
            if self._storage is None:
                # A folder of the workers' machines is not there on this one, and would look as if it were empty.
                if self._url.startswith("file://") and not Path(unquote(self._url[7:])).is_dir():
                    raise MissingError(f"{self._url} is no folder of this machine")
                self._storage = storage.open(
                    self._url, storage.Patience(tries=3, total_s=10.0, connect_s=5.0, silence_s=15.0)
                )
            return self._storage


def chosen(found: Iterable[Past], live: Mapping[str, str], query: LogQuery) -> list[Past]:
    """The incarnations that a query is about and that only the storage has; pure.

    Of each worker's name that is the newest, unless another lives; with `previous` the earlier ones, with `everything`
    all of them.
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
    """May a worker that the query is about have printed something and be gone? Only then the storage is asked; pure.

    Of a job that has only begun nobody is gone, though some of its workers may not be there yet.
    """
    status = job.status
    names = {worker.name for worker in status.workers if worker.started_at is not None}
    if status.phase.terminal or status.restarts or status.scalings:
        sizes = [size for scaling in status.scalings for size in (scaling.from_workers, scaling.to_workers)]
        names |= {worker_name(job.name, index) for index in range(max([job.desired, *sizes]))}
    return any(name not in live and (not query.workers or name in query.workers) for name in names)
