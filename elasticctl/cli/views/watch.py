"""`--watch`: a table that is redrawn in place on a terminal; anywhere else, a line for each change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from elasticctl.api.spec import ElasticJob
from elasticctl.cli.framework.output import Table, console, emit, say, tabbed
from elasticctl.cli.framework.polling import Answers
from elasticctl.cli.framework.target import Target
from elasticctl.cli.views import job as views
from elasticctl.cli.views.job_list import Shape, job_table
from elasticctl.cli.views.next_steps import bar_encoding, next_line, next_of_list, none_line, reasons
from elasticctl.cli.views.screen import ROOM_AROUND, Frame, can_redraw, drawing, most_telling
from elasticctl.cluster.base import Manifest

REDRAW_EVERY_S = 0.5

TableOf = Callable[[list[Manifest], float], Table]


def watch_list(target: Target, namespace: str | None, shape: Shape) -> None:
    """Show the jobs of a namespace (None: of all) until interrupted."""
    if not can_redraw():
        changes = _Changes(lambda jobs, now: job_table(jobs, now, shape))
        for jobs in Answers(lambda: target.cluster.list_jobs(namespace), REDRAW_EVERY_S, say=say).each():
            changes.show(jobs)
        return

    def look() -> tuple[list[Manifest], list[Manifest], dict[str, str]]:
        """All jobs, those that there is room for, and why some of these wait."""
        jobs = target.cluster.list_jobs(namespace)
        shown = most_telling(jobs, console().size.height - ROOM_AROUND)
        return jobs, shown, reasons(target, shown, time.time())

    answers = Answers(look, REDRAW_EVERY_S)
    with drawing() as draw:
        for jobs, shown, why in answers.each():
            if not jobs:
                draw(Frame(None, none_line(target, namespace), answers.trouble))
                continue
            more = f"{len(jobs) - len(shown)} more jobs; " if len(shown) < len(jobs) else ""
            table = job_table(shown, time.time(), shape, why)
            draw(Frame(table, f"{more}{next_of_list(jobs)}", answers.trouble))


def watch_job(target: Target, name: str) -> None:
    """Show one job until it has ended."""

    def look() -> Manifest:
        return target.cluster.get_job(target.namespace, name)

    def look_closely() -> tuple[Manifest, list[Manifest]]:
        manifest = look()
        job = ElasticJob.from_manifest(manifest)
        return manifest, target.cluster.pods_of([job])[job.uid]

    if not can_redraw():
        changes = _Changes(job_table)
        for job in Answers(look, REDRAW_EVERY_S, say=say).each():
            changes.show([job])
            if _ended(job):
                return
    answers = Answers(look_closely, REDRAW_EVERY_S)
    with drawing() as draw:
        for job, pods in answers.each():
            table = views.status_table(job, pods, time.time(), bar_encoding=bar_encoding())
            draw(Frame(table, next_line(job, live=True), answers.trouble))
            if _ended(job):
                return


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


def _ended(job: Manifest) -> bool:
    return ElasticJob.from_manifest(job).status.phase.terminal
