"""From a log that broke off to its stored copy: which lines of the copy come next; pure.

The copy has the same lines in the same order and numbers them, but its end may be missing, and its times are those of
the worker, which stamps a line before it is printed; those of the log come a moment later. Who has read a log from its
first line on has counted, and goes on at the next number. Others, and whoever has miscounted, look for the lines that
they have read last.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

REMEMBERED = 64
"""Of the lines that have been read."""
KEY_CHARS = 1024
"""Of a line that are compared: what lies between may have broken a longer one up."""
LAG_S = 0.5
"""A line has its second time within this, or its place is not known for sure."""
OVERLAP_S = 30.0
_ROUNDING_S = 2e-6
_FEWER = (REMEMBERED, 16, 4, 1)


@dataclass(frozen=True, slots=True)
class Numbered:
    """A line of the copy; `number` counts from 1, `at` is in seconds since the epoch."""

    number: int
    at: float
    text: str


class Handover:
    """What has been read of one log; `whole`: from its first line on."""

    def __init__(self, *, whole: bool) -> None:
        self._whole, self._count = whole, 0
        self._last: deque[tuple[float, str]] = deque(maxlen=REMEMBERED)

    @property
    def begun(self) -> bool:
        """Has anything been read?"""
        return bool(self._last)

    @property
    def needs_since(self) -> float | None:
        """The time from which on the copy is needed; None: all of it."""
        return self._last[-1][0] - OVERLAP_S if self._last else None

    def note(self, at: float, text: str) -> None:
        """A line has been read; to be called for every one, in order."""
        self._count += 1
        self._last.append((at, text[:KEY_CHARS]))

    def rest(self, copy: Sequence[Numbered]) -> Sequence[Numbered]:
        """The lines of the copy that have not been read. `copy` begins at `needs_since` or before."""
        if not self._last or not copy:
            return copy
        if self._whole and self._agrees(copy):
            return [line for line in copy if line.number > self._count]
        keys = [line.text[:KEY_CHARS] for line in copy]
        for fewer in _FEWER:
            place = self._place(copy, keys, fewer)
            if place is not None:
                return copy[place + 1 :]
        return [line for line in copy if line.at > self._last[-1][0]]

    def _agrees(self, copy: Sequence[Numbered]) -> bool:
        """Is what has been counted numbered alike in the copy, as far as both are at hand?"""
        first = self._count - len(self._last) + 1
        return all(
            line.text[:KEY_CHARS] == self._last[line.number - first][1]
            for line in copy
            if first <= line.number <= self._count
        )

    def _place(self, copy: Sequence[Numbered], keys: Sequence[str], fewer: int) -> int | None:
        """Where in the copy the line is that was read last: behind those that were read before it."""
        wanted = [key for _, key in self._last][-fewer:]
        newest = self._last[-1][0]
        for place in range(len(copy) - 1, len(wanted) - 2, -1):
            lag_s = newest - copy[place].at
            if lag_s > LAG_S:
                return None
            if lag_s >= -_ROUNDING_S and keys[place - len(wanted) + 1 : place + 1] == wanted:
                return place
        return None
