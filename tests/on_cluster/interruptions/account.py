"""What each event cost, and how much of the training's pace was left with all of them, from the recorded steps.
Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import quantiles

from tests.support.faults.checks import Step

MAX_FAULTS = 5


@dataclass(frozen=True, slots=True)
class Event:
    """What was done to which machine or worker, from `at` until the next event; with the newest commit at that time.

    `whole_s`: how long after it all workers trained again, on machines that stay; None: not within the limit.
    """

    kind: str
    notice: bool
    target: str
    at: float
    until: float
    committed: int
    load: float
    whole_s: float | None


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an event, over all groups that formed after it and before the next one.

    `first_step_s`: from the event to the first step of a new group; None: none formed. `standstill_s`: how long no rank
    trained, in total. `redone`: steps that the whole group had made and that were repeated; `interrupted`: those that
    only some of its ranks have recorded, which do not count. `smallest`: the size of the smallest of the groups.
    """

    first_step_s: float | None = None
    standstill_s: float = 0.0
    groups: int = 0
    redone: int = 0
    interrupted: int = 0
    smallest: int | None = None


def costs(events: Sequence[Event], steps: Iterable[Step]) -> list[Cost]:
    """Return the cost of each of the events, which are in order."""
    ordered = sorted(steps, key=lambda step: step.at)
    ranks: Counter[int] = Counter()  # how many of the newest group have recorded a step
    found, number, newest = [], 0, 0
    begun, made, made_at = 0, 0, 0.0
    for event in events:
        first_at, standstill_s, redone, interrupted = None, 0.0, 0, 0
        worlds: list[int] = []
        while number < len(ordered) and ordered[number].at <= event.until:
            step = ordered[number]
            number += 1
            if step.generation > newest:
                if newest and step.at > event.at:
                    first_at = step.at if first_at is None else first_at
                    standstill_s += step.at - made_at
                    redone += max(0, made - step.step + 1)
                    interrupted += max(0, begun - max(made, step.step - 1))
                    worlds.append(step.world)
                newest = step.generation
                ranks.clear()
            if step.generation < newest:
                continue  # recorded by a rank that was frozen
            ranks[step.step] += 1
            begun = max(begun, step.step)
            if ranks[step.step] == step.world:
                made, made_at = max(made, step.step), step.at
        first_step_s = None if first_at is None else first_at - event.at
        smallest = min(worlds, default=None)
        found.append(Cost(first_step_s, standstill_s, len(worlds), redone, interrupted, smallest))
    return found


def pace(steps: Iterable[Step], begin: float, end: float) -> float:
    """Return the net number of steps per second between two times."""
    reached = {True: 0, False: 0}
    for step in steps:
        if step.at <= end:
            before = step.at <= begin
            reached[before] = max(reached[before], step.step)
    return max(0, reached[False] - reached[True]) / (end - begin)


def redone_after_notice(events: Sequence[Event], prices: Sequence[Cost]) -> list[str]:
    """Return faults if steps were repeated after an event with notice."""
    pairs = zip(events, prices, strict=True)
    return [
        f"{event.kind} ({event.target}) at {event.at:.1f}: {cost.redone + cost.interrupted} steps"
        for event, cost in pairs
        if event.notice and cost.redone + cost.interrupted
    ][:MAX_FAULTS]


def never_whole(events: Sequence[Event]) -> list[str]:
    """Return faults if the group was not complete again after an event."""
    return [f"{event.kind} ({event.target}) at {event.at:.1f}" for event in events if event.whole_s is None]


@dataclass(frozen=True, slots=True)
class Row:
    """The events of one kind: times in seconds, at the median and the 95th percentile."""

    kind: str
    notice: bool
    events: int
    standstill_s: tuple[float, float]
    whole_s: tuple[float, float]
    redone: int
    most_redone: int


def rows(events: Sequence[Event], prices: Sequence[Cost]) -> list[Row]:
    """Return a row for each kind, those with notice first, then one for all with notice and one for all without."""
    of_kind: dict[tuple[bool, str], list[tuple[Event, Cost]]] = {}
    for event, cost in zip(events, prices, strict=True):
        for kind in (event.kind, "all with notice" if event.notice else "all without"):
            of_kind.setdefault((not event.notice, kind), []).append((event, cost))
    order = sorted(of_kind, key=lambda key: (key[0], key[1].startswith("all "), key[1]))
    return [_row(kind, not silent, of_kind[silent, kind]) for silent, kind in order]


def _row(kind: str, notice: bool, found: Sequence[tuple[Event, Cost]]) -> Row:
    redone = [cost.redone for _, cost in found]
    still = _spread(cost.standstill_s for _, cost in found)
    whole = _spread(event.whole_s for event, _ in found if event.whole_s is not None)
    return Row(kind, notice, len(found), still, whole, sum(redone), max(redone))


def _spread(values: Iterable[float]) -> tuple[float, float]:
    found = list(values) or [float("nan")]
    cuts = (
        quantiles(found * 2, n=20, method="inclusive") if len(found) < 2 else quantiles(found, n=20, method="inclusive")
    )
    return cuts[9], cuts[18]


def deck(shares: Mapping[str, int]) -> list[str]:
    """Return that many of each kind."""
    return [kind for kind, share in shares.items() for _ in range(share)]
