"""How fast a job trains on a number of GPUs: measured rates, with Amdahl's law between and beyond the measured sizes.

Amdahl ("Validity of the single processor approach to achieving large scale computing capabilities", 1967): a part of
each step's time shrinks with the number of GPUs n, the rest does not, so the time for one unit of work is a + b / n.
That is a straight line over 1 / n, and fitted as one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

ASSUMED_FROM, ASSUMED_TO, ASSUMED_SPEEDUP = 4, 64, 9.0
"""Where only one size is known: the middle of the 8 to 10 times that the team whose platform this follows saw from 4 to
64 T4 GPUs."""


@dataclass(frozen=True, slots=True)
class Point:
    """A measured rate: units of work (steps, samples) per second on this many GPUs."""

    gpus: int
    rate: float


@dataclass(frozen=True, slots=True)
class ScalingCurve:
    """Measured points, at least one, in ascending order of GPUs; `shrinks_s` is b of a + b / n, in seconds a unit.

    `assumed` is True if there is only one point, so that the shape is an assumption.
    """

    points: tuple[Point, ...]
    shrinks_s: float
    assumed: bool

    @classmethod
    def through(cls, points: Sequence[Point]) -> ScalingCurve:
        """The curve through these points, one for each number of GPUs; ValueError without any, or with one of 0."""
        known = tuple(sorted(points, key=lambda point: point.gpus))
        if not known or any(point.gpus < 1 or not point.rate > 0 for point in known):
            raise ValueError("a curve needs points with at least 1 GPU and a rate above 0")
        if len({point.gpus for point in known}) < len(known):
            raise ValueError("two points have the same number of GPUs")
        if len(known) == 1:
            return cls(known, _assumed_s(known[0]), assumed=True)
        return cls(known, _fitted_s(known), assumed=False)

    def rate(self, gpus: float) -> float:
        """Units of work a second on so many GPUs, 0 on none: as measured where it was, else from Amdahl's law.

        Between two measured sizes the law goes through both; beyond them it goes through the nearest, with the fitted
        shrinking part.
        """
        if gpus <= 0:
            return 0.0
        where = bisect_left([point.gpus for point in self.points], gpus)
        right = self.points[min(where, len(self.points) - 1)]
        if right.gpus == gpus:
            return right.rate
        shrinks_s = self.shrinks_s
        if 0 < where < len(self.points):
            left = self.points[where - 1]
            shrinks_s = (1 / left.rate - 1 / right.rate) / (1 / left.gpus - 1 / right.gpus)
        return 1 / (1 / right.rate + shrinks_s * (1 / gpus - 1 / right.gpus))

    def measured(self, gpus: int) -> bool:
        """True if exactly this size was measured."""
        return any(point.gpus == gpus for point in self.points)


def _assumed_s(point: Point) -> float:
    """b for a single point, chosen so that the speed-up is the assumed one."""
    wider = ASSUMED_TO / ASSUMED_FROM
    serial = (wider / ASSUMED_SPEEDUP - 1) / (wider - 1)  # of the time on ASSUMED_FROM GPUs
    shrinks = (1 - serial) * ASSUMED_FROM  # the time on n GPUs is in proportion to serial + shrinks / n
    return point.gpus / point.rate * (shrinks / (serial * point.gpus + shrinks))


def _fitted_s(points: Sequence[Point]) -> float:
    """b that minimizes the squares of relative error, within bounds: more GPUs are neither slower nor faster than in
    proportion to their number."""
    weights = [point.rate**2 for point in points]
    total = sum(weights)
    xs, ys = [1 / point.gpus for point in points], [1 / point.rate for point in points]
    mean_x = sum(w * x for w, x in zip(weights, xs, strict=True)) / total
    mean_y = sum(w * y for w, y in zip(weights, ys, strict=True)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, x in zip(weights, xs, strict=True))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, x, y in zip(weights, xs, ys, strict=True)) / spread
    return min(max(slope, 0.0), min(point.gpus / point.rate for point in points))
