"""Prints lines of logs, each with its worker's name, and redraws progress bars in place.

A line that ends with a carriage return is the state of a progress bar. A terminal shows the newest of each worker below
the other lines, and redraws it in its place; elsewhere each is a line.
"""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable

from elasticctl.api.codec import to_rfc3339
from elasticctl.api.text import COLOUR_CODES, visible, visible_line
from elasticctl.cli.framework.output import has_colour, has_cursor
from elasticctl.cluster.base import LogLine
from elasticctl.terminal import encodable

# Readable on dark and light grounds alike: no white, black or plain blue.
_COLOURS = (36, 33, 32, 35, 96, 92, 95, 94)
_MOVES = re.compile(r"\x1b\[[0-9;]{0,20}[A-HJKSTf]")
"""What moves the cursor or erases: nested progress bars do."""


def print_log_lines(lines: Iterable[LogLine], job: str, *, timestamps: bool = False) -> None:
    """Print log lines as they come, each with its worker's short name, in colour on a terminal."""
    coloured, live = has_colour(), has_cursor()
    prefixes: dict[str, str] = {}
    bars = _Bars()
    for line in lines:
        prefix = prefixes.get(line.worker)
        if prefix is None:
            prefix = prefixes[line.worker] = _prefix(line.worker, job, len(prefixes) if coloured else None)
        is_bar, seen = line.text.endswith("\r"), _seen(line.text)
        if not seen and line.text:
            continue  # nothing but moves of the cursor
        time_text = f"{to_rfc3339(line.at)} " if timestamps else ""
        text = f"{prefix}{time_text}{visible_line(seen)}"
        if live:
            bars.draw(line.worker, text, is_bar=is_bar)
        elif not bars.is_known(line.worker, seen, is_bar=is_bar):
            sys.stdout.write(encodable(text, sys.stdout) + "\n")
        sys.stdout.flush()


class _Bars:
    """The newest state of each worker's progress bar, and the number of terminal lines that they take."""

    def __init__(self) -> None:
        self._newest: dict[str, str] = {}
        self._drawn = 0

    def is_known(self, worker: str, text: str, *, is_bar: bool) -> bool:
        """True if this line has already been printed as the last state of a bar."""
        before = self._newest.pop(worker, None)
        if is_bar:
            self._newest[worker] = text
        return before == text

    def draw(self, worker: str, text: str, *, is_bar: bool) -> None:
        """Print a line above the bars, or redraw a bar."""
        out = [f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""]
        self._newest.pop(worker, None)
        if is_bar:
            self._newest[worker] = text
        else:
            out.append(f"{text}\n")
        columns, rows = shutil.get_terminal_size()
        shown = list(self._newest.values())[-max(1, rows - 2) :]
        out += [f"{_cut(bar, columns - 1)}\n" for bar in shown]
        self._drawn = len(shown)
        sys.stdout.write(encodable("".join(out), sys.stdout))


def _seen(text: str) -> str:
    """What a terminal finally shows of a line with carriage returns."""
    if text.isprintable():
        return text
    still = _MOVES.sub("", text)
    if not COLOUR_CODES.sub("", still).replace("\r", "").replace("\t", "").isprintable():
        return text  # no progress bar: nothing of it is left out
    return next((part for part in reversed(still.split("\r")) if part.strip()), "")


def _cut(text: str, columns: int) -> str:
    """Cut the text at this many columns; colours stay."""
    kept, at, room = [], 0, columns
    for found in (*COLOUR_CODES.finditer(text), None):
        for char in text[at : len(text) if found is None else found.start()]:
            room -= 2 if unicodedata.east_asian_width(char) in "WF" else 1
            if room >= 0:
                kept.append(char)
        if found is not None:
            kept.append(found[0])
            at = found.end()
    return "".join(kept)


def _prefix(worker: str, job: str, number: int | None) -> str:
    short = visible(worker.removeprefix(f"{job}-"))
    return f"{short} | " if number is None else f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{short} |\x1b[0m "
