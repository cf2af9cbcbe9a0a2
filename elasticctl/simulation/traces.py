"""Recorded availability of spot machines: `{"metadata": {"gap_seconds": S}, "data": [n, n, ...]}`.

Each number says how many of the requested machines were available at that tick; ticks are S seconds apart. The format
is that of the traces published with "Can't Be Late" (Wu and others, NSDI 2024).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elasticctl.api.errors import SpecError
from elasticctl.planning.availability import AvailabilityRecord
from elasticctl.planning.situation import Market

_MOST_TICKS = 10_000_000
_SEEN_EVERY_H = 0.5


@dataclass(frozen=True, slots=True)
class Trace:
    """The number of machines at each of at least two ticks, `gap_s` seconds apart."""

    name: str
    gap_s: float
    there: tuple[int, ...]

    @property
    def lasts_s(self) -> float:
        """Seconds from the first tick to the end of the last."""
        return self.gap_s * len(self.there)

    def scaled(self, workers: int) -> Trace:
        """The trace for another number of requested machines: at each tick the same share of them, rounded down."""
        most = max(max(self.there), 1)
        return Trace(self.name, self.gap_s, tuple(count * workers // most for count in self.there))

    def at_gap(self, gap_s: float) -> Trace:
        """The same trace with other ticks."""
        ticks = max(2, int(self.lasts_s / gap_s))
        last = len(self.there) - 1
        return Trace(self.name, gap_s, tuple(self.there[min(int(i * gap_s / self.gap_s), last)] for i in range(ticks)))


def parse_trace(text: str, source: str) -> Trace:
    """Parse one file. Raises SpecError if it is not a trace."""
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise SpecError(f"not a trace: it is not JSON ({e})", source=source) from e
    metadata = data.get("metadata") if isinstance(data, dict) else None
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if isinstance(gap_s, bool) or not isinstance(gap_s, int | float) or not 1 <= gap_s <= 86_400:
        raise SpecError("not a trace: metadata.gap_seconds must be between 1 and 86400 seconds", source=source)
    there = data.get("data")
    if not isinstance(there, list) or not 2 <= len(there) <= _MOST_TICKS:
        raise SpecError("not a trace: data must be a list of at least two numbers of machines", source=source)
    for tick, count in enumerate(there):
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 1_000_000:
            raise SpecError(f"not a trace: data[{tick}] must be a number of machines, 0 or more", source=source)
    return Trace(source, float(gap_s), tuple(there))


@dataclass(frozen=True, slots=True)
class Recording:
    """Traces of some pools side by side, with what was known about them at each tick (`markets`)."""

    traces: tuple[Trace, ...]
    usd_per_h: float
    markets: tuple[Market, ...]

    @classmethod
    def of(cls, traces: Sequence[Trace], workers: int, usd_per_h: float) -> Recording:
        """Make a recording of pools with the same price per worker, scaled to this many and cut to the shortest."""
        gap_s = min(trace.gap_s for trace in traces)
        same = [trace.scaled(workers).at_gap(gap_s) for trace in traces]
        ticks = min(len(trace.there) for trace in same)
        cut = tuple(Trace(trace.name, gap_s, trace.there[:ticks]) for trace in same)
        return cls(cut, usd_per_h, tuple(_markets(cut, usd_per_h)))

    @property
    def gap_s(self) -> float:
        """Seconds between ticks."""
        return self.traces[0].gap_s

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.traces[0].there)


def _markets(traces: Sequence[Trace], usd_per_h: float) -> list[Market]:
    """The beliefs about these pools at each tick, from all ticks before it."""
    gap_h = traces[0].gap_s / 3600
    first = max(trace.there[0] for trace in traces)
    together, alone = AvailabilityRecord(first > 0), [AvailabilityRecord(trace.there[0] > 0) for trace in traces]
    depth, weight = float(max(max(trace.there) for trace in traces)), 1.0
    found, unseen_h, losses = [], 0.0, _losses(alone)
    ups = [trace.there[0] > 0 for trace in traces]
    for tick in range(len(traces[0].there)):
        there = [trace.there[tick] for trace in traces]
        most = max(there)
        if tick:
            unseen_h += gap_h
        if unseen_h >= _SEEN_EVERY_H or [count > 0 for count in there] != ups:
            ups = [count > 0 for count in there]
            together = together.after(unseen_h, most > 0)
            alone = [seen.after(unseen_h, up) for seen, up in zip(alone, ups, strict=True)]
            unseen_h, losses = 0.0, _losses(alone)
        if most:
            weight = min(weight + 1.0, 24 / gap_h)
            depth += (most - depth) / weight
        now_h = together.age_h + unseen_h
        found.append(Market(together.leaves, together.returns, losses, max(1, round(depth)), usd_per_h, now_h))
    return found


def _losses(pools: Sequence[AvailabilityRecord]) -> float:
    """How often a pool in use is lost, over all ages and pools."""
    return sum(seen.losses_per_h * (1 + seen.up_h) for seen in pools) / sum(1 + seen.up_h for seen in pools)
