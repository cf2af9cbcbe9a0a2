"""How this worker's ranks spend their time, from the sums that the training library reports with steps."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping
from typing import Any

PARTS = ("data", "all_reduce", "save")
KEEP_S = 120.0
"""How long the last known shares are reported, because a step may take longer than the time between two reports."""
_MOST_RANKS = 4096

Sums = dict[str, float]


class StepTimes:
    """Collects reports of ranks with `note`; `shares` returns what is new since its last call. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = -1
        self._newest: dict[int, Sums] = {}
        self._before: dict[int, Sums] = {}
        self._shares: dict[str, float] = {}
        self._known_s = -math.inf

    def note(self, generation: int, rank: object, times: Mapping[str, Any]) -> None:
        """Store the sums of a rank in a generation, in seconds: the total (`wall`) and the known ones of `PARTS`."""
        sums = {name: float(times[name]) for name in ("wall", *PARTS) if _is_time(times.get(name))}
        if "wall" not in sums or not isinstance(rank, int):
            return
        with self._lock:
            if generation != self._generation:
                self._generation, self._newest, self._before = generation, {}, {}
            if rank in self._newest or len(self._newest) < _MOST_RANKS:
                self._newest[rank] = sums

    def shares(self) -> dict[str, float]:
        """Return the share of each part (0 to 1) in the time since the last call, over all ranks.

        `compute` is the remainder. Empty if no rank has reported any time for `KEEP_S` seconds.
        """
        with self._lock:
            newest, before = dict(self._newest), self._before
            self._before = newest
        passed = [_difference(sums, before.get(rank, {})) for rank, sums in newest.items()]
        wall_s, now_s = sum(times["wall"] for times in passed), time.monotonic()
        if wall_s > 0:
            names = [name for name in PARTS if all(name in times for times in passed)]
            shares = {name: min(1.0, sum(times[name] for times in passed) / wall_s) for name in names}
            shares["compute"] = max(0.0, 1.0 - sum(shares.values()))
            self._shares, self._known_s = {name: round(share, 4) for name, share in shares.items()}, now_s
        return self._shares if now_s - self._known_s < KEEP_S else {}


def _difference(now: Sums, before: Sums) -> Sums:
    """The increase of each sum. Sums that have become smaller were restarted from 0."""
    base = before if before.get("wall", 0.0) <= now["wall"] else {}
    return {name: max(0.0, value - base.get(name, 0.0)) for name, value in now.items()}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9
