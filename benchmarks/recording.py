"""Record the demo on a terminal: as an asciicast for asciinema, and as an animated picture for the README.

    make recording                     # or: python -m benchmarks.recording [--epochs 60]

Runs `examples/digits/demo.py` as it is. Long pauses in the output are shortened; the path of
this checkout does not appear in the recording.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

import pexpect
import pyte

from benchmarks.programs import ROOT, count, parser

CAST, PICTURE = ROOT / "docs/images/demo.cast", ROOT / "docs/images/demo.svg"
COLUMNS, LINES = 110, 26
LONGEST_PAUSE_S, LAST_S = 0.75, 6.0
LINE_PX, CHARACTER_PX, EDGE_PX = 18, 8.0, 14
GROUND, TEXT = "#161b21", "#e4e9ee"
COLOURS = {
    "red": "#ff7d78", "green": "#52c585", "brown": "#dfb04a", "blue": "#7aabff", "magenta": "#c49bf5",
    "cyan": "#5fcfbd", "brightblack": "#97a3b0",
}  # fmt: skip

Event = tuple[float, str]
Styled = tuple[tuple[str, str, bool], ...]
"""A line of the screen: text, colour and weight of each of its parts."""


@dataclass(frozen=True, slots=True)
class Shown:
    """A line, counted from the first one that was printed, from one moment until another (None: the end)."""

    line: int
    parts: Styled
    since_s: float
    until_s: float | None


def run_demo(epochs: int) -> Iterator[Event]:
    """Return what the demo prints, and when. Raises SystemExit if it fails."""
    command = [str(ROOT / "examples/digits/demo.py"), "--epochs", str(epochs)]
    child: pexpect.spawn[str] = pexpect.spawn(
        sys.executable, command, cwd=str(ROOT), dimensions=(LINES, COLUMNS), encoding="utf-8", timeout=300
    )
    began, last_s, at_s, said = time.monotonic(), 0.0, 0.0, ""
    while True:
        try:
            text = child.read_nonblocking(4096)
        except pexpect.EOF:
            break
        said += text
        now_s = time.monotonic() - began
        at_s += min(now_s - last_s, LONGEST_PAUSE_S)
        last_s = now_s
        yield at_s, text.replace(str(ROOT), "~/elasticctl").replace(str(Path.home()), "~")
    child.close()
    if child.exitstatus:
        raise SystemExit(f"{said[-2000:]}\nthe demo ended with {child.exitstatus}")


def lines_of(events: Sequence[Event]) -> list[Shown]:
    """Return what was where on the terminal, and when."""
    screen, scrolled = pyte.Screen(COLUMNS, LINES), 0
    index = screen.index

    def count() -> None:
        nonlocal scrolled
        scrolled += screen.cursor.y == LINES - 1
        index()

    screen.index = count  # type: ignore[method-assign]
    stream = pyte.Stream(screen)
    now: dict[int, tuple[float, Styled]] = {}
    found = []
    for at_s, text in events:
        stream.feed(text)
        for row in range(LINES):
            parts, line = _styled(screen.buffer[row]), scrolled + row
            since_s, before = now.get(line, (at_s, ()))
            if parts != before:
                if before:
                    found.append(Shown(line, before, since_s, at_s))
                now[line] = at_s, parts
    return [*found, *(Shown(line, parts, since_s, None) for line, (since_s, parts) in now.items() if parts)]


def _styled(row: Any) -> Styled:
    cells = [row[column] for column in range(COLUMNS)]
    grouped = groupby(cells, key=lambda cell: (str(cell.fg), bool(cell.bold)))
    parts = [("".join(cell.data for cell in run), colour, bold) for (colour, bold), run in grouped]
    while parts and not parts[-1][0].strip():
        parts.pop()
    if parts:
        text, colour, bold = parts[-1]
        parts[-1] = text.rstrip(), colour, bold
    return tuple(parts)


def picture(shown: Sequence[Shown], ends_s: float) -> str:
    """Return a picture with all lines, each visible in its time, on a background that scrolls. It stands still at its
    end."""
    width, height = round(COLUMNS * CHARACTER_PX + 2 * EDGE_PX), LINES * LINE_PX + 2 * EDGE_PX
    whole_s = ends_s + LAST_S
    rules, texts = [], []
    for number, item in enumerate(sorted(shown, key=lambda each: (each.line, each.since_s))):
        begin, end = 100 * item.since_s / whole_s, 100 * (item.until_s or whole_s) / whole_s
        gone = "" if item.until_s is None else f"{end:.2f}%{{opacity:0}}"
        rules.append(f"@keyframes l{number}{{0%{{opacity:0}}{begin:.2f}%{{opacity:1}}{gone}}}")
        rules.append(f".l{number}{{animation-name:l{number}}}")
        still = "" if item.until_s is None else ' style="opacity:0"'
        spans = "".join(_span(*part) for part in item.parts)
        texts.append(f'<text class="l{number}" y="{(item.line + 0.8) * LINE_PX:.0f}"{still}>{spans}</text>')
    steps = _scrolling(shown)
    last = steps[-1][1] if steps else 0
    moves = "".join(f"{100 * at_s / whole_s:.2f}%{{transform:translateY(-{line * LINE_PX}px)}}" for at_s, line in steps)
    style = (
        f"text{{font:13px ui-monospace,Menlo,'DejaVu Sans Mono','Liberation Mono',monospace;fill:{TEXT};"
        "white-space:pre}.b{font-weight:700}"
        f"@media(prefers-reduced-motion:no-preference){{text,#s{{animation:{whole_s:.1f}s step-end infinite}}"
        f"#s{{animation-name:s}}@keyframes s{{0%{{transform:none}}{moves}}}{''.join(rules)}}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img"><title>The demo: a worker is killed, training goes on, and a fourth one joins</title>'
        f"<style>{style}</style>"
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>'
        f'<svg x="{EDGE_PX}" y="{EDGE_PX}" width="{width - 2 * EDGE_PX}" height="{LINES * LINE_PX}">'
        f'<g id="s" transform="translate(0,-{last * LINE_PX})">{"".join(texts)}</g></svg></svg>\n'
    )


def _scrolling(shown: Sequence[Shown]) -> list[tuple[float, int]]:
    """Return when each line becomes the first one on the screen."""
    steps: list[tuple[float, int]] = []
    top = 0
    for item in sorted(shown, key=lambda each: each.since_s):
        if item.line - LINES + 1 > top:
            top = item.line - LINES + 1
            steps = [*(step for step in steps if step[0] < item.since_s), (item.since_s, top)]
    return steps


def _span(text: str, colour: str, bold: bool) -> str:
    fill = f' fill="{COLOURS[colour]}" style="fill:{COLOURS[colour]}"' if colour in COLOURS else ""
    weight = ' class="b"' if bold else ""
    return f"<tspan{weight}{fill}>{escape(text)}</tspan>"


def main(argv: list[str] | None = None) -> None:
    """Run the demo, and write both files."""
    options = parser(__doc__)
    options.add_argument("--epochs", type=count, default=60, metavar="N", help="how long the demo trains (60)")
    write(list(run_demo(options.parse_args(argv).epochs)))


def write(events: Sequence[Event]) -> None:
    """Write the recording as an asciicast and as a picture."""
    head = {"version": 2, "width": COLUMNS, "height": LINES, "title": "make demo"}
    rows = [json.dumps(head), *(json.dumps([round(at_s, 3), "o", text]) for at_s, text in events)]
    CAST.write_text("\n".join(rows) + "\n")
    PICTURE.write_text(picture(lines_of(events), events[-1][0]))
    print(
        f"{CAST.name}: {CAST.stat().st_size:,} bytes, {events[-1][0]:.0f} s; {PICTURE.name}: {PICTURE.stat().st_size:,}"
    )


if __name__ == "__main__":
    main()
