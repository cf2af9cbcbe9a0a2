"""The metrics of a run as curves: by step, by samples or by time, thinned without losing a spike. Pure.

Training that goes back to a checkpoint repeats steps. By step or samples, what is repeated replaces what was there; by
time, everything is shown.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from elasticctl.api.status import JobStatus

Row = Mapping[str, Any]
STEP, TIME, SAMPLES = "step", "time", "samples"
RATE = "samples/s"
MAX_METRICS = 100
MAX_NAME = 100
MAX_LOST = 100
_GROUP = 64
"""The extremes and the sum of each group of points are kept, so that a picture of a long run does not read them all."""


class Series:
    """One metric over ascending `x`; `other` is the time if `x` is the step, and vice versa. Not thread-safe."""

    def __init__(self, *, replaces: bool) -> None:
        """`replaces`: a point that is not beyond the last one replaces all from there on; otherwise it is appended."""
        self._replaces = replaces
        self.x, self.other, self.y = array("d"), array("d"), array("d")
        self.lost: list[tuple[float, str]] = []
        self._is_lost = False
        self._low, self._high, self._sum = array("d"), array("d"), array("d")

    def add(self, x: float, other: float, value: float) -> None:
        """Add a point; one that is not finite becomes a gap up to the next finite one."""
        end = max(self.x[-1] if self.x else -math.inf, self.lost[-1][0] if self.lost else -math.inf)
        if x <= end:
            if self._replaces:
                self._cut(x)
            else:
                x = end
        if not math.isfinite(value):
            if not self._is_lost:
                self.lost.append((x, "NaN" if math.isnan(value) else "inf" if value > 0 else "-inf"))
            self._is_lost = True
            return
        self._is_lost = False
        self.x.append(x)
        self.other.append(other)
        self.y.append(value)
        if len(self.y) % _GROUP == 0:
            group = self.y[-_GROUP:]
            self._low.append(min(group))
            self._high.append(max(group))
            self._sum.append(math.fsum(group))

    def _cut(self, x: float) -> None:
        place = bisect_left(self.x, x)
        for column in (self.x, self.other, self.y):
            del column[place:]
        for column in (self._low, self._high, self._sum):
            del column[place // _GROUP :]
        self.lost = [item for item in self.lost if item[0] < x]
        last = self.x[-1] if self.x else -math.inf
        self._is_lost = bool(self.lost) and self.lost[-1][0] > last

    def picture(self, low: float, high: float, points: int) -> dict[str, Any]:
        """The part from `low` to `high` in about this many points: their mean, and the extremes that it hides."""
        start = max(0, bisect_left(self.x, low) - 1)
        stop = min(len(self.x), bisect_right(self.x, high) + 1)
        size = -(-(stop - start) // max(1, points))
        if size <= 2:
            x, other, y = (list(column[start:stop]) for column in (self.x, self.other, self.y))
            picture: dict[str, Any] = {"x": x, "other": other, "y": y, "low": None, "high": None}
        else:
            picture = self._thinned(start, stop, size)
        seen = [(at, word) for at, word in self.lost if low <= at <= high]
        for at, _ in seen:
            place = bisect_right(picture["x"], at)
            for name, value in (("x", at), ("other", None), ("y", None), ("low", None), ("high", None)):
                if picture[name] is not None:
                    picture[name].insert(place, value)
        return {**picture, "lost": seen[:MAX_LOST]}

    def _thinned(self, start: int, stop: int, size: int) -> dict[str, Any]:
        if size >= 2 * _GROUP:
            size = -(-size // _GROUP) * _GROUP
            start -= start % _GROUP
        ends = [(place, self.y[place], self.y[place], self.y[place]) for place in (start, stop - 1)]
        between = []
        for begin in range(start, stop, size):
            end = min(begin + size, stop)
            between.append(((begin + end) // 2, *self._extremes(begin, end)))
        seen = [ends[0], *between, ends[1]]  # the ends as they are: the last value is what is read first
        places, low, high, means = map(list, zip(*seen, strict=True))
        x, other = ([column[place] for place in places] for column in (self.x, self.other))
        return {"x": x, "other": other, "y": means, "low": low, "high": high}

    def _extremes(self, begin: int, end: int) -> tuple[float, float, float]:
        if begin % _GROUP == 0 and end % _GROUP == 0:
            groups = slice(begin // _GROUP, end // _GROUP)
            total = math.fsum(self._sum[groups])
            return min(self._low[groups]), max(self._high[groups]), total / (end - begin)
        part = self.y[begin:end]
        return min(part), max(part), math.fsum(part) / len(part)

    def summary(self) -> dict[str, Any]:
        """The last, lowest and highest value, and since when the metric has not been finite, if it is not now."""
        ragged = self.y[len(self._low) * _GROUP :]
        return {
            "last": self.y[-1] if self.y else None,
            "min": min([*self._low, *ragged], default=None),
            "max": max([*self._high, *ragged], default=None),
            "lostNow": self.lost[-1] if self._is_lost else None,
        }


class Curves:
    """The metrics of one run, built up row by row."""

    def __init__(self) -> None:
        self._by: dict[str, dict[str, Series]] = {}
        self._samples = Series(replaces=True)

    @property
    def names(self) -> list[str]:
        """The reported metrics, in order of their first value."""
        return list(self._by)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows in chronological order: `step`, `at` and metrics."""
        for row in rows:
            step, at = float(row["step"]), float(row["at"])
            samples = _number(row.get(SAMPLES))
            if samples is not None:
                self._samples.add(step, at, samples)
            for name, reported in row.items():
                value = _number(reported)
                if name in (STEP, "at", SAMPLES) or value is None:
                    continue
                series = self._by.get(name)
                if series is None:
                    if len(self._by) >= MAX_METRICS or len(name) > MAX_NAME:
                        continue
                    series = self._by[name] = {STEP: Series(replaces=True), TIME: Series(replaces=False)}
                series[STEP].add(step, at, value)
                series[TIME].add(at, step, value)

    @property
    def has_samples(self) -> bool:
        """True if the number of samples is known at some step."""
        return bool(self._samples.y)

    def picture(self, name: str, over: str, low: float, high: float, points: int) -> dict[str, Any] | None:
        """`Series.picture` of a metric over STEP, TIME or SAMPLES; None if it has not been reported."""
        series = self.series(name, STEP if over == SAMPLES else over)
        if series is None:
            return None
        if over != SAMPLES:
            return series.picture(low, high, points)
        known = self._samples
        if not known.y:
            return {"x": [], "other": [], "y": [], "low": None, "high": None, "lost": []}
        first, last = min(bisect_left(known.y, low), len(known.y) - 1), max(bisect_right(known.y, high) - 1, 0)
        return self._by_samples(series.picture(known.x[first], known.x[last], points))

    def _by_samples(self, picture: dict[str, Any]) -> dict[str, Any]:
        """Turn a picture over steps into one over samples, without steps before the first with known samples."""
        known, top = self._samples, -math.inf
        first = bisect_left(picture["x"], known.x[0])
        kept = {name: column and column[first:] for name, column in picture.items() if name != "lost"}
        for place, step in enumerate(kept["x"]):
            top = kept["x"][place] = max(top, self._samples_at(step))
        lost = [(self._samples_at(step), word) for step, word in picture["lost"] if step >= known.x[0]]
        return {**kept, "lost": lost}

    def _samples_at(self, step: float) -> float:
        """The samples at a step, interpolated between its neighbours; those of the last step beyond it."""
        known = self._samples
        place = bisect_right(known.x, step) - 1
        if known.x[place] == step or place + 1 == len(known.x):
            return known.y[place]
        part = (step - known.x[place]) / (known.x[place + 1] - known.x[place])
        return known.y[place] + part * (known.y[place + 1] - known.y[place])

    def series(self, name: str, over: str) -> Series | None:
        """One metric over STEP or TIME; None if it has not been reported."""
        found = self._by.get(name)
        return found[over] if found else None

    def table(self) -> Iterator[str]:
        """All finite values as lines of CSV: metric, step, moment, value."""
        yield "metric,step,at,value\n"
        for name, series in self._by.items():
            quoted = '"' + name.replace('"', '""') + '"'
            points = series[TIME]
            for at, step, value in zip(points.x, points.other, points.y, strict=True):
                yield f"{quoted},{step:.0f},{at:.3f},{value!r}\n"


def _number(reported: object) -> float | None:
    if isinstance(reported, bool) or not isinstance(reported, int | float | str):
        return None
    try:
        return float(reported)
    except (ValueError, OverflowError):
        return None


def curves_of_status(status: JobStatus) -> Curves:
    """The curves in the job's status: about a hundred points, and the rate."""
    curve, curves = status.curve, Curves()
    if curve.since is None:
        return curves
    length = len(curve.at_s)

    def padded(column: Iterable[float | None]) -> list[float | str | None]:
        reported: list[float | str | None] = ["NaN" if value is None else value for value in column]
        return [*[None] * (length - len(reported)), *reported][:length]

    columns = {name: padded(column) for name, column in curve.metrics.items()}
    columns[RATE] = [*[None] * (length - len(curve.samples_per_s)), *curve.samples_per_s]
    words = {name: item.value for name, item in status.progress.not_finite.items()}
    for place, (at_s, step) in enumerate(zip(curve.at_s, curve.step, strict=False)):
        row = {name: column[place] for name, column in columns.items()}
        named = {name: words.get(name, value) if value == "NaN" else value for name, value in row.items()}
        curves.add([{**named, "step": step, "at": curve.since + at_s}])
    return curves
