"""A scaling curve as text: a line for each size, GPUs and rate, apart by a comma, a semicolon or blanks. Pure."""

from __future__ import annotations

import math
import re

from elasticctl.errors import SpecError
from elasticctl.simulation.curve import Point
from elasticctl.wording import shown

_MOST_GPUS = 100_000


def parse(text: str, source: str) -> tuple[Point, ...]:
    """The points of a table; blank lines, `#` comments and one header of words are passed over.

    Raises SpecError, with the line, for what is no such table.
    """
    points: dict[int, Point] = {}
    header_seen = False
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        cells = [cell for cell in re.split(r"[,;\s]+", line.partition("#")[0].strip()) if cell]
        if not cells:
            continue
        if not points and not header_seen and not any(char.isdigit() for cell in cells for char in cell):
            header_seen = True
            continue
        point = _point(cells, number, source)
        if point.gpus in points:
            raise SpecError(f"{point.gpus} GPUs are there twice", line=number, source=source)
        points[point.gpus] = point
    if not points:
        raise SpecError("no line with GPUs and a rate, such as `4, 1250`", source=source)
    return tuple(points[gpus] for gpus in sorted(points))


def _point(cells: list[str], number: int, source: str) -> Point:
    try:
        gpus, rate = (int(cells[0]), float(cells[1])) if len(cells) == 2 else (0, 0.0)
    except ValueError:
        gpus, rate = 0, 0.0
    if not 1 <= gpus <= _MOST_GPUS or not 0 < rate < math.inf:
        raise SpecError(
            f"{shown(' '.join(cells))} is not a number of GPUs and a rate above 0, such as `4, 1250`",
            line=number,
            source=source,
        )
    return Point(gpus, rate)
