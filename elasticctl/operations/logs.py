"""The output of a job's workers: the lines of one job or of several, selected and in order."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from elasticctl.api.errors import JobStorageError, NotFoundError, UsageError
from elasticctl.api.observed.workers import known_workers, rank_prefix, worker_of_rank
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import join_and, quote
from elasticctl.cluster.base import LogLine, LogQuery, Manifest
from elasticctl.operations.observer import Observer
from elasticctl.operations.option_values import duration, whole
from elasticctl.operations.target import Target, full_worker_name


def parse_pattern(text: str) -> re.Pattern[str]:
    """Parse a regular expression. Raises ValueError for an invalid one."""
    try:
        return re.compile(text)
    except re.error as e:
        raise ValueError(f"{quote(text)} is not a regular expression: {e}.") from e


@dataclass(frozen=True, slots=True)
class LogFilter:
    """The selected lines; `since` is in seconds."""

    follow: bool = False
    worker: tuple[str, ...] = ()
    rank: Annotated[int | None, whole(0)] = None
    tail: Annotated[int | None, whole(0)] = None
    since: Annotated[int | None, duration] = None
    grep: Annotated[re.Pattern[str] | None, parse_pattern] = None
    previous: bool = False
    everything: bool = False

    def query(self, job: ElasticJob, now: float) -> LogQuery:
        """The query for the cluster.

        Raises UsageError for contradictions and for a worker that no job of this name could have, NotFoundError
        for a rank that this one does not have.
        """
        if self.worker and self.rank is not None:
            raise UsageError("--worker and --rank cannot be used together. FIX: give one of them")
        if self.previous and (self.everything or self.follow):
            raise UsageError(f"--previous cannot be used with {'--all' if self.everything else '--follow'}")
        named = tuple(full_worker_name(job.name, worker) for worker in self.worker)
        return LogQuery(
            workers=named if self.rank is None else (worker_of_rank(job, self.rank),),
            follow=self.follow,
            tail=self.tail,
            since=None if self.since is None else now - self.since,
            previous=self.previous,
            everything=self.everything,
        )

    def of(self, lines: Iterable[LogLine], job: ElasticJob) -> Iterable[LogLine]:
        """The selected lines of those that the cluster returned."""
        if self.rank is not None:
            prefix = rank_prefix(job, self.rank)
            lines = (line for line in lines if line.text.startswith(prefix))
        grep = self.grep
        return lines if grep is None else (line for line in lines if grep.search(line.text.rstrip("\r")))


def read_logs(target: Target, manifest: Manifest, lines: LogFilter) -> Iterator[LogLine]:
    """The selected lines of a job. Raises NotFoundError at their end for a worker that the job never had."""
    found = ElasticJob.from_manifest(manifest)
    query = lines.query(found, time.time())
    unknown = [name for name in query.workers if name not in known_workers(found)]
    if unknown and lines.follow:
        target.observer.report(f"waiting for {join_and(unknown)}: {workers_line(found)}")
    printed = target.cluster.logs(target.namespace, found.name, query)
    seen: set[str] = set()
    yield from lines.of(_recording_workers(printed, seen), found)
    never = [name for name in unknown if name not in seen]
    if never:
        raise NotFoundError(f"{found.name} has no worker {join_and(never)}: {workers_line(found)}")


def in_turn(sources: Sequence[Callable[[], Iterator[LogLine]]]) -> Iterator[LogLine]:
    """The lines of one job after the other."""
    for source in sources:
        yield from source()


def merged(sources: Sequence[Callable[[], Iterator[LogLine]]]) -> Iterator[LogLine]:
    """The lines of all jobs as they come, each read in its own thread; raises what any of them raises."""
    import queue
    import threading

    waiting: queue.Queue[LogLine | Exception | None] = queue.Queue(maxsize=1000)

    def read(source: Callable[[], Iterator[LogLine]]) -> None:
        try:
            for line in source():
                waiting.put(line)
            waiting.put(None)
        except Exception as e:  # noqa: BLE001 - it is raised again in the thread that reads the lines
            waiting.put(e)

    for source in sources:
        threading.Thread(target=read, args=(source,), name="logs", daemon=True).start()
    reading = len(sources)
    while reading:
        line = waiting.get()
        if isinstance(line, Exception):
            raise line
        if line is None:
            reading -= 1
        else:
            yield line


def workers_line(job: ElasticJob) -> str:
    """The workers of the job, as the end of a sentence."""
    known = known_workers(job)
    return f"it has {join_and(known) if len(known) <= 3 else f'{known[0]} to {known[-1]}'}"


def _recording_workers(lines: Iterable[LogLine], seen: set[str]) -> Iterator[LogLine]:
    """Yield the lines, and add the names of the workers that printed them to `seen`."""
    for line in lines:
        seen.add(line.worker)
        yield line


def delete_stored_logs(job: ElasticJob, observer: Observer) -> None:
    """Delete the stored logs of a deleted job, and report a failure."""
    from elasticctl.cluster.stored_logs import StoredLogs

    for former in ("", *job.former_storages):
        try:
            StoredLogs(job, observer.report, former).delete()
        except JobStorageError as e:
            observer.report(f"{job.name}: the logs in {former or 'its storage'} stay: {e}")
