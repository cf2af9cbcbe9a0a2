"""`logs`: what a job's workers print, each line under its worker's name."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

import click

from elasticctl.cli import options, output
from elasticctl.cli.target import Where, full_worker_name, reach
from elasticctl.cluster.base import LogLine, LogQuery
from elasticctl.codec import to_rfc3339

# Readable on dark and light grounds alike: no white, black or plain blue.
_COLOURS = (36, 33, 32, 35, 96, 92, 95, 94)


@click.command()
@options.JOB
@click.option("-f", "--follow", is_flag=True, help="Go on until the job has ended; new workers are followed too.")
@click.option("--worker", "workers", multiple=True, metavar="NAME", help="Only this worker: its name or number.")
@click.option("--tail", type=options.Whole(0), metavar="N", help="Only the last N lines of each worker.")
@click.option("--since", type=options.Duration(), metavar="TIME", help="Only lines younger than 90s, 10m, 2h.")
@click.option("--previous", is_flag=True, help="What the workers' last incarnations printed.")
@click.option("--timestamps", is_flag=True, help="Put the time, in UTC, before each line.")
@options.target
def logs(
    where: Where, job: str, workers: tuple[str, ...], since: int | None, timestamps: bool, **query: object
) -> None:
    """Print what a job's workers print."""
    target = reach(where)
    name = target.find(job)["metadata"]["name"]
    wanted = LogQuery(
        workers=tuple(full_worker_name(name, worker) for worker in workers),
        since=None if since is None else time.time() - since,
        **query,  # type: ignore[arg-type]  # the flags' own names and types
    )
    print_lines(target.cluster.logs(target.namespace, name, wanted), name, timestamps=timestamps)


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
