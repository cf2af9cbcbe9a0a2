"""`--watch`: a table redrawn in place on a terminal; in a pipe, a line for each change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from elasticctl.cli import views
from elasticctl.cli.output import Table, console, emit, fitted, grid, on_terminal, tabbed
from elasticctl.cli.target import Target
from elasticctl.cluster.base import Manifest
from elasticctl.spec import ElasticJob

if TYPE_CHECKING:
    from rich.live import Live

REDRAW_EVERY_S = 0.5
TableOf = Callable[[list[Manifest], float], Table]


def watch_list(target: Target, namespace: str | None, *, wide: bool) -> None:
    """Show the jobs of a namespace (None: of all) until interrupted."""

    def table(jobs: list[Manifest], now: float) -> Table:
        return views.job_table(jobs, now, wide=wide, namespaces=namespace is None)

    if on_terminal():
        with _live() as live:
            while True:
                _draw(live, table(target.cluster.list_jobs(namespace), time.time()))
                time.sleep(REDRAW_EVERY_S)
    changes = _Changes(table)
    while True:
        changes.show(target.cluster.list_jobs(namespace))
        time.sleep(REDRAW_EVERY_S)


def watch_job(target: Target, name: str) -> None:
    """Show one job until it has ended."""
    if on_terminal():
        with _live() as live:
            while not _redraw(live, target, name):
                time.sleep(REDRAW_EVERY_S)
        return
    changes = _Changes(views.job_table)
    while True:
        job = target.cluster.get_job(target.namespace, name)
        changes.show([job])
        if _ended(job):
            return
        time.sleep(REDRAW_EVERY_S)


def _redraw(live: Live, target: Target, name: str) -> bool:
    """Show the job as it is now; True once it has ended."""
    job = target.cluster.get_job(target.namespace, name)
    pods = target.cluster.list_pods(target.namespace, name)
    _draw(live, views.status_table(job, pods, time.time()))
    return _ended(job)


class _Changes:
    """Remembers what has been printed of each job, so that only news is."""

    def __init__(self, table_of: TableOf) -> None:
        self._table_of = table_of
        self._printed: dict[str, tuple[str, ...]] = {}

    def show(self, jobs: list[Manifest]) -> None:
        """Print a line for each job that has changed, under a header the first time."""
        # Ages at the beginning of time are all zero: a job has not changed by growing older.
        ageless, current = self._table_of(jobs, 0.0), self._table_of(jobs, time.time())
        for job, key, row in zip(jobs, ageless.rows, current.rows, strict=True):
            if self._printed.get(job["metadata"]["uid"]) == key:
                continue
            header, _, line = tabbed(Table(current.header, [row])).partition("\n")
            emit(line if self._printed else f"{header}\n{line}")
            self._printed[job["metadata"]["uid"]] = key
        sys.stdout.flush()


def _live() -> Live:
    from rich.live import Live

    return Live(console=console(), auto_refresh=False, vertical_overflow="crop")


def _draw(live: Live, table: Table) -> None:
    live.update(grid(fitted(table, live.console.width)), refresh=True)


def _ended(job: Manifest) -> bool:
    return ElasticJob.from_manifest(job).status.phase.terminal
