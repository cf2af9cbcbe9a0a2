"""`--watch`: a table that is redrawn in place on a terminal; anywhere else, a line for each change."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from elasticctl.cli import jobs as verbs
from elasticctl.cli import views
from elasticctl.cli.listing import Shape, job_table
from elasticctl.cli.output import Table, console, emit, say, tabbed
from elasticctl.cli.screen import ROOM_AROUND, Frame, can_redraw, drawing, most_telling
from elasticctl.cli.target import Target
from elasticctl.cluster.base import Manifest
from elasticctl.errors import BusyError, UnreachableError
from elasticctl.spec import ElasticJob
from elasticctl.wording import span

REDRAW_EVERY_S = 0.5
_SHARE_OF_TIME = 0.2
"""A cluster that is slow to answer is asked less often: answers are waited for in no more of the time than this."""

T = TypeVar("T")
TableOf = Callable[[list[Manifest], float], Table]


def watch_list(target: Target, namespace: str | None, shape: Shape) -> None:
    """Show the jobs of a namespace (None: of all) until interrupted."""
    answers = Answers(lambda: target.cluster.list_jobs(namespace))
    if not can_redraw():
        changes = _Changes(lambda jobs, now: job_table(jobs, now, shape))
        for jobs in answers.each():
            changes.show(jobs, answers.trouble)
        return
    with drawing() as draw:
        for jobs in answers.each():
            if not jobs:
                draw(Frame(None, verbs.none_line(target, namespace), answers.trouble))
                continue
            shown = most_telling(jobs, console().size.height - ROOM_AROUND)
            more = f"{len(jobs) - len(shown)} more jobs; " if len(shown) < len(jobs) else ""
            table = verbs.table(target, shown, time.time(), shape)
            draw(Frame(table, f"{more}{verbs.next_of_list(jobs)}", answers.trouble))


def watch_job(target: Target, name: str) -> None:
    """Show one job until it has ended."""

    def look() -> tuple[Manifest, list[Manifest]]:
        return target.cluster.get_job(target.namespace, name), target.cluster.list_pods(target.namespace, name)

    if not can_redraw():
        alone = Answers(lambda: target.cluster.get_job(target.namespace, name))
        changes = _Changes(job_table)
        for job in alone.each():
            changes.show([job], alone.trouble)
            if _ended(job):
                break
        return
    answers = Answers(look)
    with drawing() as draw:
        for job, pods in answers.each():
            table = views.status_table(job, pods, time.time(), bar_encoding=verbs.bar_encoding())
            draw(Frame(table, verbs.next_line(job, live=True), answers.trouble))
            if _ended(job):
                return


@dataclass(slots=True)
class Answers(Generic[T]):
    """What a question is answered, again and again; while nobody answers, what was answered last.

    `trouble` says since when nobody does; "" while all is well.
    """

    question: Callable[[], T]
    trouble: str = ""

    def each(self) -> Iterator[T]:
        """Yield answers without end. The first question has to be answered; later ones only have to make sense."""
        asked_at = time.monotonic()
        last = self.question()
        heard_at = time.monotonic()
        while True:
            took_s = time.monotonic() - asked_at
            yield last
            time.sleep(max(REDRAW_EVERY_S, took_s * (1 / _SHARE_OF_TIME - 1)))
            asked_at = time.monotonic()
            try:
                last = self.question()
                self.trouble, heard_at = "", time.monotonic()
            except (UnreachableError, BusyError) as e:
                self.trouble = f"this is from {span(time.monotonic() - heard_at)} ago, asking again: {e}"


class _Changes:
    """Remembers what has been printed of each job, so that only news is."""

    def __init__(self, table_of: TableOf) -> None:
        self._table_of = table_of
        self._printed: dict[str, tuple[str, ...]] = {}
        self._in_trouble = False

    def show(self, jobs: list[Manifest], trouble: str) -> None:
        """Print a line for each job that has changed, under a header the first time; say once that there is trouble."""
        if trouble and not self._in_trouble:
            say(trouble)
        self._in_trouble = bool(trouble)
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
