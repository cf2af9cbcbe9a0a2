"""Who holds what and who waits, on a terminal: rows, bars and sentences. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from elasticctl.api.quota import JobUsage, PoolUsage, ProjectUsage
from elasticctl.api.text import counted
from elasticctl.cli.framework.output import Table

_BAR_WIDTH = 20
_BLOCKS, _PLAIN = ("█", "▓", "░"), ("#", "+", ".")
_COLUMNS = ("PROJECT", "KIND", "HELD", "GUARANTEED", "LIMIT", "BORROWED", "WAITING", "HELD OF GUARANTEED")
_SPARE = ("LIMIT", "HELD OF GUARANTEED")


def table(rows: Sequence[ProjectUsage], encoding: str | None) -> Table:
    """The rows with a bar each, all to one scale, in characters that the encoding has."""
    scale = max((max(row.held, row.guaranteed) for row in rows), default=0)
    cells = [
        (
            row.project,
            row.pool,
            str(row.held),
            str(row.guaranteed),
            "" if row.limit is None else str(row.limit),
            str(row.borrowed),
            str(row.waiting),
            bar(row, scale, encoding),
        )
        for row in rows
    ]
    return Table(_COLUMNS, cells, spare=_SPARE)


def bar(row: ProjectUsage, scale: int, encoding: str | None) -> str:
    """Full: held by right; shaded: borrowed; light: guaranteed and not used. `scale` slots fill the whole width."""
    own, lent, idle = _BLOCKS if (encoding or "").lower().replace("-", "").startswith("utf") else _PLAIN
    if not scale:
        return ""
    ends = [round(slots * _BAR_WIDTH / scale) for slots in (row.held - row.borrowed, row.held, row.guaranteed)]
    return own * ends[0] + lent * (ends[1] - ends[0]) + idle * max(0, ends[2] - ends[1])


def left(found: Iterable[PoolUsage]) -> Iterator[str]:
    """A sentence for each pool of which it is known how much is left."""
    for item in found:
        if item.slots is not None and item.free is not None:
            yield f"{item.pool}: {item.free} of {counted(item.slots, item.unit)} free"


def told(held: Iterable[JobUsage]) -> Iterator[str]:
    """A sentence for each job: what it has, and why not more."""
    for item in held:
        last = f" Last change: {item.change}." if item.change else ""
        yield f"{item.project}/{item.job} {item.message}.{last}"
