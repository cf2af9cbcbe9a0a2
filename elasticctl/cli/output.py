"""Printing: stdout is data, stderr is talk.

On a terminal a table is aligned and may be coloured; anywhere else it is tab-separated, one line a row. rich is
imported for a terminal only.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from elasticctl.cluster.base import Manifest


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a header.

    `spare` names columns that a narrow terminal does without, the first to go first; `wraps`: the last column may go
    on in the next line instead of being cut.
    """

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    spare: tuple[str, ...] = ()
    wraps: bool = False


DATA_VERSION = "cli.elasticctl/v1"
"""Of what `explain`, `events`, `describe` and `history` print as data; a field that goes or changes makes a new one."""
_GAP = 2
_PHASE_STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Cancelled": "dim",
    "Suspended": "yellow",
    "Restarting": "yellow",
    "Pending": "cyan",
}


def say(line: str) -> None:
    """One line of talk."""
    sys.stderr.write(_encodable(line, sys.stderr) + "\n")
    sys.stderr.flush()


def hint(line: str) -> None:
    """What to type next, for a person: nothing is said to a program."""
    if sys.stderr.isatty() and sys.stdout.isatty():
        say(line)


def emit(text: str) -> None:
    """Text for stdout, with a newline at its end."""
    sys.stdout.write(_encodable(text, sys.stdout).removesuffix("\n") + "\n")


def print_table(table: Table) -> None:
    """Print a table as the reader of stdout likes it."""
    if on_terminal():
        screen = console()
        screen.print(grid(fitted(table, screen.width)))
    else:
        emit(tabbed(table))


def print_objects(manifests: Sequence[Manifest], form: str, *, one: bool) -> None:
    """Print whole objects as json, yaml or names; `one`: the object itself, not a List of it."""
    if form == "name":
        for manifest in manifests:
            emit(manifest["metadata"]["name"])
        return
    data: Any = manifests[0] if one else {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
    if form == "json":
        import json

        emit(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        from elasticctl.yamltext import dump

        emit(dump(data))


def print_data(kind: str, data: Mapping[str, Any], form: str) -> None:
    """Print what a verb has found out, as json or yaml; `kind` and the version tell programs what they read."""
    whole = {"apiVersion": DATA_VERSION, "kind": kind, **data}
    if form == "json":
        import json

        emit(json.dumps(whole, indent=2, ensure_ascii=False))
    else:
        from elasticctl.yamltext import dump

        emit(dump(whole))


def tabbed(table: Table) -> str:
    """A table for a pipe: cells apart by tabs, a dash for an empty one."""
    return "\n".join("\t".join(_cell(cell) for cell in row) for row in (table.header, *table.rows))


def aligned(table: Table, least: Sequence[int] = (), width: int | None = None) -> tuple[list[str], list[int]]:
    """A table as plain lines, the header first, and how wide its columns are: at least as wide as `least` says.

    For rows that come one by one, under those that are there. Lines are cut at `width` columns, if it is given.
    """
    widths = [max(pair) for pair in zip_longest(_widths(table), least, fillvalue=0)]
    lines = []
    for row in (table.header, *table.rows):
        cells = [cell.ljust(size) for cell, size in zip(row, widths, strict=True)]
        lines.append((" " * _GAP).join(cells).rstrip()[:width])
    return lines, widths


def fitted(table: Table, width: int) -> Table:
    """The table without the spare columns that `width` has no room for."""
    for name in table.spare:
        if sum(_widths(table)) + _GAP * (len(table.header) - 1) <= width:
            break
        kept = [index for index, title in enumerate(table.header) if title != name]
        rows = [tuple(row[index] for index in kept) for row in table.rows]
        table = dataclasses.replace(table, header=tuple(table.header[index] for index in kept), rows=rows)
    return table


def grid(table: Table) -> RenderableType:
    """A table for a terminal: all columns as wide as they need, the last one as wide as there is room."""
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for name, width in zip(table.header[:-1], _widths(table), strict=False):
        shown.add_column(name, no_wrap=True, overflow="ellipsis", min_width=width)
    shown.add_column(table.header[-1], no_wrap=not table.wraps, overflow="fold" if table.wraps else "ellipsis")
    for row in table.rows:
        shown.add_row(*(Text(cell, style=_PHASE_STYLES.get(cell, "")) for cell in row))
    return shown


def _widths(table: Table) -> list[int]:
    return [max(map(len, column)) for column in zip(table.header, *table.rows, strict=True)]


def console(stream: TextIO | None = None, width: int | None = None) -> Console:
    """A console on stdout that keeps to NO_COLOR."""
    from rich.console import Console

    return Console(file=stream or sys.stdout, width=width, highlight=False, markup=False, soft_wrap=False)


def on_terminal() -> bool:
    """True when a person reads stdout."""
    return sys.stdout.isatty()


def colour() -> bool:
    """True when stdout takes colours: a terminal, and no NO_COLOR."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def joined(parts: Iterable[str]) -> str:
    """The parts that say something, apart by two spaces."""
    return "  ".join(part for part in parts if part)


def _cell(text: str) -> str:
    return " ".join(text.split()) or "-"


def _encodable(text: str, stream: TextIO) -> str:
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
