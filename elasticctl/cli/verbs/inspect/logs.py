"""`logs`: the output of the workers of a job, each line after the name of its worker."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import JobStorageError, NotFoundError, UsageError
from elasticctl.api.observed.ranks import rank_prefix, worker_of_rank
from elasticctl.api.observed.workers import known_workers
from elasticctl.api.text import join_and, quote
from elasticctl.cli.framework import options, output
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.log_lines import print_log_lines
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.selection import Labels, chosen_names
from elasticctl.cli.framework.target import Target, full_worker_name, reach
from elasticctl.cluster.base import LogLine, LogQuery, Manifest

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob

app = new_app()


def parse_pattern(text: str) -> re.Pattern[str]:
    """Parse a regular expression. Raises typer.BadParameter for an invalid one."""
    try:
        return re.compile(text)
    except re.error as e:
        raise typer.BadParameter(f"{quote(text)} is not a regular expression: {e}.") from e


@dataclass(frozen=True, slots=True)
class LogFlags:
    """The selected lines; `since` is in seconds."""

    follow: Annotated[
        bool,
        typer.Option("-f", "--follow", help="Follow the output until the job ends, including that of new workers."),
    ] = False
    worker: Annotated[tuple[str, ...], options.worker("Only this worker: its name or number.")] = ()
    rank: Annotated[int | None, options.count("Only the output of rank N, on the worker that runs it.", low=0)] = None
    tail: Annotated[int | None, options.count("Only the last N lines of each worker.", low=0)] = None
    since: Annotated[int | None, options.time("Only lines that are at most this old: 90s, 10m, 2h.")] = None
    grep: Annotated[
        re.Pattern[str] | None,
        typer.Option(
            "--grep", parser=parse_pattern, metavar="REGEX", help="Only lines that match this regular expression."
        ),
    ] = None
    previous: Annotated[bool, typer.Option("--previous", help="The output of workers that have been replaced.")] = False
    everything: Annotated[bool, typer.Option("--all", help="The output of all workers, replaced ones included.")] = (
        False
    )

    def query(self, job: ElasticJob, now: float) -> LogQuery:
        """The query for the cluster.

        Raises UsageError for contradicting options and for a worker that no job of this name could have, NotFoundError
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


@verb(app, "logs")
def logs(
    *,
    jobs: options.Jobs = (),
    label: Labels = (),
    lines: LogFlags,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Put the time, in UTC, before each line.")] = False,
    where: Where,
) -> int:
    """Print the output of a job's workers, including those that are gone.

    With -f, the exit code is 1 if the job fails. With several jobs, each line also begins with its job's name.

    \b
      elasticctl logs -f train
      elasticctl logs train --since 10m --grep 'loss|nan'
      elasticctl logs train --all --rank 0
      elasticctl logs -f --label sweep=lr
    """
    target = reach(where)
    found = [target.find(name) for name in chosen_names(target, jobs, label)]
    if len(found) == 1:
        (manifest,) = found
        print_log_lines(_lines_of(target, manifest, lines), manifest["metadata"]["name"], timestamps=timestamps)
    else:
        sources = [partial(_lines_of, reach(where), manifest, lines) for manifest in found]
        print_log_lines(merged(sources) if lines.follow else in_turn(sources), "", timestamps=timestamps)
    if not lines.follow:
        return 0
    from elasticctl.cli.submit.follow import code_of_followed

    return max(code_of_followed(target, manifest) for manifest in found)


def _lines_of(target: Target, manifest: Manifest, lines: LogFlags) -> Iterator[LogLine]:
    """The selected lines of a job. Raises NotFoundError at their end for a worker that the job never had."""
    from elasticctl.api.spec import ElasticJob

    found = ElasticJob.from_manifest(manifest)
    query = lines.query(found, time.time())
    unknown = [name for name in query.workers if name not in known_workers(found)]
    if unknown and lines.follow:
        output.say(f"waiting for {join_and(unknown)}: {workers_line(found)}")
    said = target.cluster.logs(target.namespace, found.name, query)
    heard: set[str] = set()
    yield from lines.of(_noting(said, heard), found)
    never = [name for name in unknown if name not in heard]
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
        except Exception as e:  # noqa: BLE001 - it is raised again where somebody hears it
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


def _noting(lines: Iterable[LogLine], heard: set[str]) -> Iterator[LogLine]:
    """Yield the lines, and add the names of the workers that printed them to `heard`."""
    for line in lines:
        heard.add(line.worker)
        yield line


def delete_stored_logs(job: ElasticJob) -> None:
    """Delete the stored logs of a deleted job, and report a failure."""
    from elasticctl.cluster.stored_logs import StoredLogs

    for former in ("", *job.former_storages):
        try:
            StoredLogs(job, output.say, former).delete()
        except JobStorageError as e:
            output.say(f"{job.name}: the logs in {former or 'its storage'} stay: {e}")
