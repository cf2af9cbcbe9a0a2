"""How training went over time, in few numbers: a curve that is thinned as it grows, so that a job's status can hold it.

Pure. Whoever looks at a job late sees its whole course all the same, from the first step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from elasticctl.codec import Timestamp

T = TypeVar("T")

MAX_POINTS = 120
"""Some 4 KB of JSON with two metrics, and as many points as a small chart can show apart."""
MAX_METRICS = 6


@dataclass(frozen=True, slots=True)
class Curve:
    """Points in order of time, as columns: `at_s` is seconds after `since`, `samples_per_s` over the whole group.

    A column that began later is shorter: its last value belongs to the last point, and so on backwards.
    """

    since: Timestamp | None = None
    at_s: tuple[float, ...] = ()
    step: tuple[int, ...] = ()
    samples_per_s: tuple[float, ...] = ()
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


def extended(
    curve: Curve, at: Timestamp | None, step: int | None, samples_per_s: float | None, metrics: Mapping[str, float]
) -> Curve:
    """The curve with one more point; the same one where the point is not later, or says nothing.

    Beyond `MAX_POINTS` the point goes whose neighbours are nearest to each other in time: what is left is spread
    evenly, however the points came. The first and the last always stay.
    """
    if at is None or step is None:
        return curve
    since = at if curve.since is None else curve.since
    at_s = round(at - since, 1)
    if curve.at_s and at_s < curve.at_s[-1]:
        return curve
    if curve.at_s and at_s == curve.at_s[-1]:
        curve = _without(curve, len(curve.at_s) - 1)
    known = {name: values for name, values in curve.metrics.items() if values}
    names = [*known, *(name for name in metrics if name not in known)][:MAX_METRICS]
    longer = Curve(
        since=since,
        at_s=(*curve.at_s, at_s),
        step=(*curve.step, step),
        samples_per_s=_longer(curve.samples_per_s, samples_per_s),
        metrics={name: _longer(known.get(name, ()), metrics.get(name)) for name in names},
    )
    return longer if len(longer.at_s) <= MAX_POINTS else _without(longer, _least(longer.at_s))


def _longer(column: tuple[float, ...], value: float | None) -> tuple[float, ...]:
    """With one more value; a number that was not told this time is what it was."""
    if value is None:
        return (*column, column[-1]) if column else column
    rounded = float(f"{value:.5g}")
    # The largest floats round up to infinity, which JSON cannot hold; scripts begin a best loss with them.
    return (*column, rounded if math.isfinite(rounded) else value)


def _least(at_s: tuple[float, ...]) -> int:
    """Which inner point says least."""
    return min(range(1, len(at_s) - 1), key=lambda i: at_s[i + 1] - at_s[i - 1])


def _without(curve: Curve, point: int) -> Curve:
    from_end = point - len(curve.at_s)
    return Curve(
        since=curve.since,
        at_s=_cut(curve.at_s, from_end),
        step=_cut(curve.step, from_end),
        samples_per_s=_cut(curve.samples_per_s, from_end),
        metrics={name: _cut(values, from_end) for name, values in curve.metrics.items()},
    )


def _cut(column: tuple[T, ...], from_end: int) -> tuple[T, ...]:
    """Without the value so far from the end; as it is where it does not reach back to there."""
    if -from_end > len(column):
        return column
    return column[:from_end] + column[len(column) + from_end + 1 :]
