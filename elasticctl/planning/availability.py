"""Estimates of how often spot machines go away and come back, from observations; old ones count for less.

Machines that have lasted tend to last, and pools that have been empty for long tend to stay so: on AWS's traces of 2022
and 2023 a pool's hazard falls by a factor of ten from its first hour to its fifth. So rates fall with age as
in `GUESS_LEAVES` and `GUESS_RETURNS`; a multiple of them is learnt from observations, and the guess counts as much as
`GUESS_EVENTS` observed events.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass

from elasticctl.planning.situation import AGES_H

GUESS_LEAVES = (1.0, 0.35, 0.15)
GUESS_RETURNS = (0.9, 0.3, 0.2)
"""Events per hour by age: the middle of four zones of AWS (one V100, us-east-1 and us-east-2, February 2023)."""
GUESS_EVENTS = 2.0
HALF_LIFE_H = 96.0


@dataclass(frozen=True, slots=True)
class AvailabilityRecord:
    """Hours and ends of a state, by age, halved every `HALF_LIFE_H`. `age_h` is the age of the present state."""

    up: bool
    age_h: float = 0.0
    hours: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,) * len(AGES_H), (0.0,) * len(AGES_H))
    ends: tuple[tuple[float, ...], tuple[float, ...]] = ((0.0,) * len(AGES_H), (0.0,) * len(AGES_H))

    def after(self, hours: float, up: bool) -> AvailabilityRecord:
        """Return what is known after the state lasted for this many more hours, and is `up` now."""
        fade = 0.5 ** (hours / HALF_LIFE_H)
        spent = [[value * fade for value in row] for row in self.hours]
        ended = [[value * fade for value in row] for row in self.ends]
        bucket = bisect_right(AGES_H, self.age_h) - 1
        spent[self.up][bucket] += hours
        age_h = self.age_h + hours
        if up != self.up:
            ended[self.up][bucket] += 1.0
            age_h = 0.0
        return AvailabilityRecord(up, age_h, (tuple(spent[0]), tuple(spent[1])), (tuple(ended[0]), tuple(ended[1])))

    @property
    def leaves(self) -> float:
        """How often it stops being up, as a multiple of the guess."""
        return self._multiple(True, GUESS_LEAVES)

    @property
    def returns(self) -> float:
        """How often it comes back, as a multiple of the guess."""
        return self._multiple(False, GUESS_RETURNS)

    @property
    def up_h(self) -> float:
        """Hours that it was up."""
        return sum(self.hours[True])

    @property
    def losses_per_h(self) -> float:
        """How often it stops being up, over all ages."""
        return (sum(self.ends[True]) + GUESS_EVENTS) / (self.up_h + GUESS_EVENTS / GUESS_LEAVES[1])

    def _multiple(self, up: bool, guess: tuple[float, ...]) -> float:
        expected = sum(hours * rate for hours, rate in zip(self.hours[up], guess, strict=True))
        return (sum(self.ends[up]) + GUESS_EVENTS) / (expected + GUESS_EVENTS)


def rounded(value: float) -> float:
    """Round to the nearest power of two, so that only a real change leads to a new plan."""
    return 2.0 ** round(math.log2(max(value, 2.0**-10)))
