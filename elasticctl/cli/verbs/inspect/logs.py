"""`logs`: the output of the workers of a job, each line after the name of its worker."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from elasticctl.api.errors import JobStorageError, UsageError
from elasticctl.api.text import quote
from elasticctl.cli.framework import options, output
from elasticctl.cli.framework.command import new_app, verb
from elasticctl.cli.framework.options import Where
from elasticctl.cli.framework.output import print_log_lines
from elasticctl.cli.framework.target import full_worker_name, reach, worker_of_rank
from elasticctl.cluster.base import LogLine, LogQuery

if TYPE_CHECKING:
    from elasticctl.api.spec import ElasticJob

app = new_app()


def parse_pattern(text: str) -> re.Pattern[str]:
    """A regular expression; typer.BadParameter for what is none."""
    try:
        return re.compile(text)
    except re.error as e:
        raise typer.BadParameter(f"{quote(text)} is not a regular expression: {e}.") from e


@dataclass(frozen=True, slots=True)
class LogFlags:
    """Which lines are wanted; `since` is in seconds."""

    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Follow until the job ends; new workers are followed too.")
    ] = False
    worker: Annotated[
        tuple[str, ...], typer.Option("--worker", metavar="NAME", help="Only this worker: its name or number.")
    ] = ()
    rank: Annotated[int | None, options.count("Only what rank N prints, on the worker that runs it.", low=0)] = None
    tail: Annotated[int | None, options.count("Only the last N lines of each worker.", low=0)] = None
    since: Annotated[int | None, options.time("Only lines of the last 90s, 10m, 2h.")] = None
    grep: Annotated[
        re.Pattern[str] | None,
        typer.Option(
            "--grep", parser=parse_pattern, metavar="REGEX", help="Only lines that match this regular expression."
        ),
    ] = None
    previous: Annotated[bool, typer.Option("--previous", help="What earlier incarnations printed.")] = False
    everything: Annotated[bool, typer.Option("--all", help="What all incarnations printed, from the first on.")] = False

    def query(self, job: ElasticJob, now: float) -> LogQuery:
        """What to ask the cluster.

        Raises UsageError for what contradicts itself and for a worker that no job of this name could have,
        NotFoundError for a rank that this one does not have.
        """
        if self.worker and self.rank is not None:
            raise UsageError("--worker and --rank contradict each other. FIX: give one of them")
        if self.previous and (self.everything or self.follow):
            raise UsageError(f"--previous does not go with {'--all' if self.everything else '--follow'}")
        named = tuple(full_worker_name(job.name, worker) for worker in self.worker)
        return LogQuery(
            workers=named if self.rank is None else (worker_of_rank(job, self.rank),),
            follow=self.follow,
            tail=self.tail,
            since=None if self.since is None else now - self.since,
            previous=self.previous,
            everything=self.everything,
        )

    def of(self, lines: Iterable[LogLine], ranks_per_worker: int) -> Iterable[LogLine]:
        """The lines that are wanted of those that the cluster has given."""
        if self.rank is not None and ranks_per_worker > 1:
            prefix = f"[rank{self.rank}] "
            lines = (line for line in lines if line.text.startswith(prefix))
        grep = self.grep
        return lines if grep is None else (line for line in lines if grep.search(line.text))


@verb(app, "logs")
def logs(
    *,
    job: options.Job,
    lines: LogFlags,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Put the time, in UTC, before each line.")] = False,
    where: Where,
) -> int:
    """Print the output of a job's workers, also of those that are gone.

    With -f the exit code is 1 when the job fails.

    \b
      elasticctl logs -f train
      elasticctl logs train --since 10m --grep 'loss|nan'
      elasticctl logs train --all --rank 0
    """
    from elasticctl.api.podtemplate import hardware
    from elasticctl.api.spec import ElasticJob

    target = reach(where)
    manifest = target.find(job)
    found = ElasticJob.from_manifest(manifest)
    said = target.cluster.logs(target.namespace, found.name, lines.query(found, time.time()))
    print_log_lines(lines.of(said, hardware(found).ranks_per_worker), found.name, timestamps=timestamps)
    if not lines.follow:
        return 0
    from elasticctl.cli.submit.follow import code_of_followed

    return code_of_followed(target, manifest)


def delete_stored_logs(job: ElasticJob) -> None:
    """Delete what a job that has been deleted kept of its logs in its storage; says so where that cannot be done."""
    from elasticctl.cluster.stored_logs import StoredLogs

    try:
        StoredLogs(job, output.say).delete()
    except JobStorageError as e:
        output.say(f"{job.name}: the logs in its storage stay: {e}")
