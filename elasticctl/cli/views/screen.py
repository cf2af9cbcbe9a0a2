"""A table that is redrawn in place, on the terminal's other screen, and left standing on the usual one at the end."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticctl.api.status import Phase
from elasticctl.cli.framework.output import Table, console, fitted, grid, hint, on_terminal, print_table, say
from elasticctl.cluster.base import Manifest

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

ROOM_AROUND = 4
"""Lines of a screen that are not rows of its table: the header, a blank one, what to type next, trouble."""


@dataclass(frozen=True, slots=True)
class Frame:
    """What is to be seen: a table (None: there is nothing yet), a line about what to type next, and trouble if any."""

    table: Table | None
    next_line: str
    trouble: str = ""


def can_redraw() -> bool:
    """True on a terminal that can place its cursor."""
    return on_terminal() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


@contextmanager
def drawing() -> Iterator[Callable[[Frame], None]]:
    """Yield what draws a frame over the one before; the last one is printed when it is over, however it ends."""
    from rich.live import Live

    frames: list[Frame] = []
    try:
        with Live(console=console(), screen=True, auto_refresh=False, vertical_overflow="crop") as live:

            def draw(frame: Frame) -> None:
                frames[:] = [frame]
                live.update(drawn(frame, live.console), refresh=True)

            yield draw
    finally:
        for last in frames:
            if last.table is not None:
                print_table(last.table)
            (hint if last.table is not None else say)(last.next_line)


def drawn(frame: Frame, screen: Console) -> RenderableType:
    """A frame as it is drawn on a screen: no line is longer than that is wide."""
    from rich.console import Group
    from rich.text import Text

    def line(text: str, style: str) -> Text:
        return Text(text, style=style, no_wrap=True, overflow="ellipsis")

    parts: list[RenderableType] = []
    if frame.table is not None:
        parts += [grid(fitted(frame.table, screen.width)), Text("")]
    parts.append(line(frame.next_line, "dim"))
    if frame.trouble:
        parts.append(line(frame.trouble, "yellow"))
    return Group(*parts)


def most_telling(jobs: Sequence[Manifest], room: int) -> list[Manifest]:
    """As many of the jobs as there is room for, in their order: those that go on, then those that ended last."""
    if len(jobs) <= room:
        return list(jobs)
    newest_first = list(reversed(range(len(jobs))))
    kept = sorted(newest_first, key=lambda index: _has_ended(jobs[index]))[: max(1, room)]
    return [jobs[index] for index in sorted(kept)]


def _has_ended(job: Manifest) -> bool:
    phase = job.get("status", {}).get("phase")
    return phase in (Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED)
