"""`--watch`: a table redrawn in place on a terminal; anywhere else, a line for each change."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticctl.api.spec import ElasticJob
from elasticctl.cli.framework.output import (
    Table,
    emit,
    fit_table,
    format_tabs,
    hint,
    on_terminal,
    print_table,
    rich_table,
)
from elasticctl.cli.views import job as views
from elasticctl.cli.views.job import bar_encoding, next_line
from elasticctl.cli.views.jobs import ListColumns, job_table, next_of_list, no_jobs_line, waiting_reasons
from elasticctl.cluster.base import Manifest
from elasticctl.operations.selection import JobFilter
from elasticctl.operations.target import ENDED, Poller, Target, phase_of
from elasticctl.terminal import console, say

if TYPE_CHECKING:
    from rich.console import Console, RenderableType


REDRAW_EVERY_S = 0.5

TableOf = Callable[[list[Manifest], float], Table]


def watch_list(target: Target, namespace: str | None, shape: ListColumns, chosen: JobFilter) -> None:
    """Show the chosen jobs of a namespace (None: of all) until interrupted."""

    def chosen_jobs() -> list[Manifest]:
        return chosen.of(target.cluster.list_jobs(namespace), time.time())

    if not can_redraw():
        changes = _Changes(lambda jobs, now: job_table(jobs, now, shape))
        for jobs in Poller(chosen_jobs, REDRAW_EVERY_S, observer=target.observer).each():
            changes.show(jobs)
        return

    def read_jobs() -> tuple[list[Manifest], list[Manifest], dict[str, str]]:
        """All jobs, those that fit on the screen, and why some of these wait."""
        jobs = chosen_jobs()
        shown = most_relevant(jobs, console().size.height - ROOM_AROUND)
        return jobs, shown, waiting_reasons(target, shown, time.time())

    answers = Poller(read_jobs, REDRAW_EVERY_S)
    with redrawing() as draw:
        for jobs, shown, why in answers.each():
            if not jobs:
                draw(Screenful(None, no_jobs_line(target, namespace, chosen), answers.trouble))
                continue
            more = f"{len(jobs) - len(shown)} more jobs; " if len(shown) < len(jobs) else ""
            table = job_table(shown, time.time(), shape, why)
            draw(Screenful(table, f"{more}{next_of_list(jobs)}", answers.trouble))


def watch_job(target: Target, watched: Manifest) -> None:
    """Show one job until it has ended. Raises NotFoundError once it is deleted, even if another one has its name."""

    def read_job() -> Manifest:
        return target.reread(watched)

    def read_job_and_pods() -> tuple[Manifest, list[Manifest]]:
        manifest = read_job()
        job = ElasticJob.from_manifest(manifest)
        return manifest, target.cluster.pods_of([job])[job.uid]

    if not can_redraw():
        changes = _Changes(job_table)
        for job in Poller(read_job, REDRAW_EVERY_S, observer=target.observer).each():
            changes.show([job])
            if _has_ended(job):
                return
    answers = Poller(read_job_and_pods, REDRAW_EVERY_S)
    with redrawing() as draw:
        for job, pods in answers.each():
            table = views.status_table(job, pods, time.time(), bar_encoding=bar_encoding())
            draw(Screenful(table, next_line(job, live=True), answers.trouble))
            if _has_ended(job):
                return


class _Changes:
    """Remembers what has been printed about each job, so that only changes are printed."""

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
            header, _, line = format_tabs(Table(current.header, [row])).partition("\n")
            emit(line if self._printed else f"{header}\n{line}")
            self._printed[job["metadata"]["uid"]] = key
        sys.stdout.flush()


ROOM_AROUND = 4
"""Lines of a screen that are not rows of its table: the header, a blank one, what to type next, trouble."""


@dataclass(frozen=True, slots=True)
class Screenful:
    """The content of a screen: a table (None: not yet), a line about what to type next, and any connection problem."""

    table: Table | None
    next_line: str
    trouble: str = ""


def can_redraw() -> bool:
    """True on a terminal that can place its cursor."""
    return on_terminal() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


@contextmanager
def redrawing() -> Iterator[Callable[[Screenful], None]]:
    """Yield a function that draws a frame over the one before; the last frame is printed at the end in any case."""
    from rich.live import Live

    frames: list[Screenful] = []
    try:
        with Live(console=console(), screen=True, auto_refresh=False, vertical_overflow="crop") as live:

            def draw(frame: Screenful) -> None:
                frames[:] = [frame]
                live.update(render_frame(frame, live.console), refresh=True)

            yield draw
    finally:
        for last in frames:
            if last.table is not None:
                print_table(last.table)
            (hint if last.table is not None else say)(last.next_line)


def render_frame(frame: Screenful, screen: Console) -> RenderableType:
    """A frame as it is drawn on a screen: no line is wider than the screen."""
    from rich.console import Group
    from rich.text import Text

    def line(text: str, style: str) -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    parts: list[RenderableType] = []
    if frame.table is not None:
        parts += [rich_table(fit_table(frame.table, screen.width)), Text("")]
    parts.append(line(frame.next_line, "dim"))
    if frame.trouble:
        parts.append(line(frame.trouble, "yellow"))
    return Group(*parts)


def most_relevant(jobs: Sequence[Manifest], room: int) -> list[Manifest]:
    """As many jobs as fit, in order; active ones take precedence, then the ones that ended last."""
    if len(jobs) <= room:
        return list(jobs)
    newest_first = list(reversed(range(len(jobs))))
    kept = sorted(newest_first, key=lambda index: _has_ended(jobs[index]))[: max(1, room)]
    return [jobs[index] for index in sorted(kept)]


def _has_ended(job: Manifest) -> bool:
    return phase_of(job) in ENDED
