"""`logs`: what a job's workers print, each line under its worker's name."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import typer

from elasticctl.cli import options, output
from elasticctl.cli.command import new_app, verb
from elasticctl.cli.options import Where
from elasticctl.cli.target import full_worker_name, reach
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.codec import to_rfc3339

# Readable on dark and light grounds alike: no white, black or plain blue.
_COLOURS = (36, 33, 32, 35, 96, 92, 95, 94)


app = new_app()


@dataclass(frozen=True, slots=True)
class Lines:
    """Which lines are wanted; `since` is in seconds."""

    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on until the job has ended; new workers are followed too.")
    ] = False
    worker: Annotated[
        tuple[str, ...], typer.Option("--worker", metavar="NAME", help="Only this worker: its name or number.")
    ] = ()
    tail: Annotated[int | None, options.count("Only the last N lines of each worker.", low=0)] = None
    since: Annotated[int | None, options.time("Only lines younger than 90s, 10m, 2h.")] = None
    previous: Annotated[bool, typer.Option("--previous", help="What the workers' last incarnations printed.")] = False

    def query(self, job: str, now: float) -> LogQuery:
        """What to ask the cluster; UsageError for a worker that no job of this name could have."""
        return LogQuery(
            workers=tuple(full_worker_name(job, worker) for worker in self.worker),
            follow=self.follow,
            tail=self.tail,
            since=None if self.since is None else now - self.since,
            previous=self.previous,
        )


@verb(app, "logs")
def logs(
    *,
    job: options.Job,
    lines: Lines,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Put the time, in UTC, before each line.")] = False,
    where: Where,
) -> None:
    """Print what a job's workers print."""
    target = reach(where)
    name = target.find(job)["metadata"]["name"]
    found = target.cluster.logs(target.namespace, name, lines.query(name, time.time()))
    print_lines(found, name, timestamps=timestamps)


def print_lines(lines: Iterable[LogLine], job: str, *, timestamps: bool = False) -> None:
    """Print log lines as they come, each under its worker's short name; colours on a terminal."""
    coloured = output.colour()
    prefixes: dict[str, str] = {}
    for line in lines:
        prefix = prefixes.get(line.worker)
        if prefix is None:
            prefix = prefixes[line.worker] = _prefix(line.worker, job, len(prefixes) if coloured else None)
        time_text = f"{to_rfc3339(line.at)} " if timestamps else ""
        output.emit(f"{prefix}{time_text}{line.text}")
        sys.stdout.flush()


def _prefix(worker: str, job: str, number: int | None) -> str:
    short = worker.removeprefix(f"{job}-")
    return f"{short} | " if number is None else f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{short} |\x1b[0m "
