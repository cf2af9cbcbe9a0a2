"""What the page is told of projects, as JSON: who holds what of what is shared, who waits for whom, and why. Pure.

The figures are those of `elasticctl quota list`; here they are only put in order, and cut to what a page can show.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elasticctl.codec import Manifest, to_json
from elasticctl.holdings import Held, Holding, Stock, holdings, stocks

Projects = dict[str, Any]
"""As `projects` returns it; without pools where nothing is shared."""

MAX_TEXT = 500
MAX_ROWS = 200
MAX_JOBS = 100


def projects(quotas: Iterable[Manifest], held: Sequence[Held], notes: Sequence[str], *, all_seen: bool) -> Projects:
    """Each pool with its projects, then the jobs; `notes` say what is missing of it, `all_seen` that no job is."""
    rows = holdings(quotas, held)
    pools = stocks(rows, held, all_seen=all_seen)
    return {
        "pools": [_pool(stock, [row for row in rows if row.pool == stock.pool]) for stock in pools],
        "waiting": _jobs([item for item in held if not item.workers]),
        "running": _jobs([item for item in held if item.workers]),
        "notes": [note[:MAX_TEXT] for note in notes],
    }


def _pool(stock: Stock, rows: Sequence[Holding]) -> dict[str, Any]:
    """All bars of a pool are drawn to one scale: so many slots fill the width."""
    scale = max((row.held + row.unused for row in rows), default=0)
    if stock.slots is not None:  # a limit that is beyond all that there is limits nothing
        scale = max([scale, *(row.limit for row in rows if row.limit is not None and row.limit <= stock.slots)])
    shown = [to_json(row) for row in rows[:MAX_ROWS]]
    return {**to_json(stock), "scale": scale, "projects": shown, "more": len(rows) - len(shown)}


def _jobs(held: Sequence[Held]) -> dict[str, Any]:
    shown = [{**to_json(item), **_texts(item)} for item in held[:MAX_JOBS]]
    return {"jobs": shown, "more": len(held) - len(shown)}


def _texts(item: Held) -> dict[str, str]:
    """What others have written, cut to a length."""
    return {"message": item.message[:MAX_TEXT], "change": item.change[:MAX_TEXT], "reason": item.reason[:MAX_TEXT]}
