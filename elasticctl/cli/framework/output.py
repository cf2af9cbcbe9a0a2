"""Printing: stdout is for data, stderr for messages.

On a terminal tables are aligned and coloured; elsewhere they are tab-separated, one line a row. rich is imported for a
terminal only.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from elasticctl.api.text import visible
from elasticctl.terminal import console, encodable, say

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from elasticctl.cluster.base import Manifest


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of cells under a header.

    `spare` names columns that a terminal leaves out if they are empty and, if it is narrow, also others, in this order.
    `cut` names the column that is then cut, the last one aside: NAME by default, or else the first. `wraps`: the last
    column may continue on the next line instead of being cut. `facts`: each row is a name and a value, and needs no
    header on a terminal. `kept` is a spare column that is not lost: its cells become `notes`, lines below the table.
    """

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    spare: tuple[str, ...] = ()
    wraps: bool = False
    facts: bool = False
    kept: str = ""
    notes: tuple[str, ...] = ()
    cut: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", [tuple(map(visible, row)) for row in self.rows])


DATA_VERSION = "cli.elasticctl/v1"
"""Of what verbs print as data (docs/cli.md); a field that goes or changes its meaning makes a new one."""
_GAP = 2
_LEAST_LAST = 24
"""A last column that is longer than this may be cut before other columns go."""
_LEAST_NAME = 24
"""The same of names, which are cut in the middle: those of a sweep differ at their ends."""
_PHASE_STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Failed": "bold red",
    "Cancelled": "dim",
    "Suspended": "yellow",
    "Restarting": "yellow",
    "Pending": "cyan",
}


def hint(line: str) -> None:
    """Print what to type next, unless the reader is a program."""
    if sys.stderr.isatty() and sys.stdout.isatty():
        say(line)


def emit(text: str) -> None:
    """Print text and a newline on stdout."""
    _write(visible(text))


def _write(text: str) -> None:
    sys.stdout.write(encodable(text, sys.stdout).removesuffix("\n") + "\n")
    sys.stdout.flush()  # or what `say` prints later would come first where both go to one pipe or file


def print_table(table: Table) -> None:
    """Print a table in the format that suits the reader of stdout."""
    if on_terminal():
        screen = console()
        screen.print(rich_table(fit_table(table, screen.width)))
    else:
        emit(format_tabs(table))


def print_objects(manifests: Sequence[Manifest], form: str, *, one: bool) -> None:
    """Print whole objects as json, yaml or names; `one`: a single object instead of a List."""
    if form == "name":
        for manifest in manifests:
            emit(manifest["metadata"]["name"])
        return
    print_plain(manifests[0] if one else {"apiVersion": "v1", "kind": "List", "items": list(manifests)}, form)


def print_data(kind: str, data: Mapping[str, Any], form: str) -> None:
    """Print the result of a verb as json or yaml, with its `kind` and version for programs.

    Its schema is docs/schemas/`kind`.json.
    """
    print_plain({"apiVersion": DATA_VERSION, "kind": kind, **data}, form)


def print_plain(data: Any, form: str) -> None:
    """Print data as json or yaml."""
    import json

    if form == "json":
        emit(json.dumps(data, indent=2, ensure_ascii=False))
    else:
        from elasticctl.api.yamltext import dump_yaml

        emit(dump_yaml(json.loads(json.dumps(data))))  # which knows enums


def format_tabs(table: Table) -> str:
    """A table for a pipe: cells separated by tabs, a dash for an empty one."""
    return "\n".join("\t".join(_cell(cell) for cell in row) for row in (table.header, *table.rows))


def format_aligned(table: Table, least: Sequence[int] = (), width: int | None = None) -> tuple[list[str], list[int]]:
    """A table as plain lines, header first, and the widths of its columns, which are at least `least`.

    Rows that come later can be aligned with those. Lines are cut at `width` columns, if it is given.
    """
    widths = [max(pair) for pair in zip_longest(_widths(table), least, fillvalue=0)]
    lines = []
    for row in (table.header, *table.rows):
        cells = [cell + " " * (size - _columns(cell)) for cell, size in zip(row, widths, strict=True)]
        line = (" " * _GAP).join(cells).rstrip()
        lines.append(line if width is None else _clip(line, width))
    return lines, widths


def fit_table(table: Table, width: int) -> Table:
    """The table for a terminal of `width` columns, without spare columns that are empty or do not fit.

    If it is still too wide, names are cut, and then the last column.
    """
    for name in table.spare:
        if name in table.header and not any(row[table.header.index(name)] for row in table.rows):
            table = _without(table, name)
    for name in table.spare:
        if _needed(table) <= width:
            break
        if name in table.header:
            table = _without(_noted(table) if name == table.kept else table, name)
    return table if table.wraps else _squeeze(table, width)


def rich_table(table: Table) -> RenderableType:
    """A table for a terminal: all columns as wide as their cells, except that the last one has to fit."""
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    shown = RichTable(
        box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold", show_header=not table.facts
    )
    widths = _widths(Table((), table.rows) if table.facts and table.rows else table)
    for name, width in zip(table.header[:-1], widths, strict=False):
        shown.add_column(name, no_wrap=True, overflow="ellipsis", min_width=width, style="dim" if table.facts else "")
    shown.add_column(table.header[-1], no_wrap=not table.wraps, overflow="fold" if table.wraps else "ellipsis")
    for row in table.rows:
        shown.add_row(*(_colour_phase(Text(cell)) for cell in row))
    notes = [Text(note, style="dim", overflow="fold") for note in table.notes]
    return Group(shown, *notes) if notes else shown


def bar(share: float, width: int, encoding: str | None) -> str:
    """A share from 0 to 1 as a bar of `width` columns, in characters that the encoding has."""
    full, empty = ("\u2588", "\u2591") if (encoding or "").lower().replace("-", "").startswith("utf") else ("#", ".")
    done = int(share * width)
    return full * done + empty * (width - done)


def _colour_phase(text: Text) -> Text:
    """Colour the phase at the beginning of a cell."""
    word = text.plain.partition("  ")[0]
    if word in _PHASE_STYLES:
        text.stylize(_PHASE_STYLES[word], 0, len(word))
    return text


def _noted(table: Table) -> Table:
    """The table with the cells of its kept column as notes, each after its row's name."""
    names, kept = _names(table), table.header.index(table.kept)
    return dataclasses.replace(table, notes=tuple(f"{row[names]}: {row[kept]}" for row in table.rows if row[kept]))


def _without(table: Table, name: str) -> Table:
    kept = [index for index, title in enumerate(table.header) if title != name]
    rows = [tuple(row[index] for index in kept) for row in table.rows]
    return dataclasses.replace(table, header=tuple(table.header[index] for index in kept), rows=rows)


def _needed(table: Table) -> int:
    """The smallest width of the table, with its names and its last column cut as far as allowed."""
    widths, names = _widths(table), _names(table)
    least = [*widths[:-1], max(_columns(table.header[-1]), min(widths[-1], _LEAST_LAST))]
    least[names] = min(least[names], _LEAST_NAME)
    return sum(least) + _GAP * (len(least) - 1)


def _names(table: Table) -> int:
    """The index of the column of names, or of another one that is cut in their place."""
    name = table.cut or "NAME"
    return table.header.index(name) if name in table.header else 0


def _squeeze(table: Table, width: int) -> Table:
    """The table with its names, and then its last column, cut as far as `width` requires."""
    names, last = _names(table), len(table.header) - 1
    if last > 0:
        others = _needed(table) - min(_widths(table)[names], _LEAST_NAME)
        table = _cut(table, names, max(_LEAST_NAME // 2, width - others), tail_share=1 / 3)
    room = width - sum(_widths(table)[:-1]) - _GAP * last
    return _cut(table, last, max(1, room))


def _cut(table: Table, column: int, width: int, *, tail_share: float = 0.0) -> Table:
    tail = int(width * tail_share)

    def short(text: str) -> str:
        if _columns(text) <= width:
            return text
        return f"{_clip(text, width - tail - 1)}\u2026{_clip(text[::-1], tail)[::-1]}"

    rows = [(*row[:column], short(row[column]), *row[column + 1 :]) for row in table.rows]
    return dataclasses.replace(table, rows=rows)


def _widths(table: Table) -> list[int]:
    rows = (table.header, *table.rows) if table.header else table.rows
    return [max(map(_columns, column)) for column in zip(*rows, strict=True)]


def _columns(text: str) -> int:
    """The number of terminal columns that the text takes: some characters, such as emoji, take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len  # slow to import, and most text is plain

    return cell_len(text)


def _clip(text: str, columns: int) -> str:
    """The longest beginning of the text that fits into this many columns."""
    if text.isascii():
        return text[: max(0, columns)]
    while _columns(text) > columns and text:
        text = text[: max(0, len(text) - max(1, (_columns(text) - columns) // 2))]
    return text


def on_terminal() -> bool:
    """True when a person reads stdout."""
    return sys.stdout.isatty()


def has_colour() -> bool:
    """True when stdout takes colours: a terminal, and no NO_COLOR."""
    return on_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def has_cursor() -> bool:
    """True when stdout is a terminal whose cursor can be moved."""
    return on_terminal() and os.environ.get("TERM", "dumb") != "dumb"


def joined(parts: Iterable[str]) -> str:
    """The parts that are not empty, separated by two spaces."""
    return "  ".join(part for part in parts if part)


def _cell(text: str) -> str:
    return " ".join(text.split()) or "-"
