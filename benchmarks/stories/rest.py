"""How jobs stand when nothing changes any more: GPUs that are idle though a job could use them, minima that wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from benchmarks.stories.story import GPUS, GUARANTEED, PROJECTS, Job


@dataclass(frozen=True, slots=True)
class Stand:
    """A job and the GPUs that its pods hold; `settled`: none of its pods is on its way in or out."""

    job: Job
    has: int
    settled: bool = True

    @property
    def runs(self) -> bool:
        """True for a job that has its minimum."""
        return self.has >= self.job.least

    @property
    def wants(self) -> int:
        """How many GPUs more it would take."""
        return 0 if self.job.suspended else max(0, self.job.most - self.has)

    @property
    def above(self) -> int:
        """How many it has above its minimum."""
        return max(0, self.has - self.job.least)


@dataclass(frozen=True, slots=True)
class Rest:
    """`idle`: GPUs that do nothing and that some job could use; `waits`: minima that others' surplus would let start.

    `over`: GPUs that are held, and do not exist.
    """

    idle: int
    waits: tuple[str, ...]
    over: int

    @property
    def is_ideal(self) -> bool:
        """True when there is nothing left to wish for."""
        return not self.idle and not self.waits and not self.over


def judge(stands: Mapping[str, Stand], taken: Mapping[str, int]) -> Rest:
    """`taken`: by project, how many GPUs its jobs hold: those of `stands`, and of jobs that are going."""
    held = sum(taken.values())
    useless = sum(one.has for one in stands.values() if not one.runs)
    unused = GPUS - held + useless
    waits = tuple(
        sorted(
            name
            for name, one in stands.items()
            if not one.runs and not one.job.suspended and one.job.least <= unused + _givable(one.job, stands, taken)
        )
    )
    return Rest(_usable(stands, max(0, unused)), waits, max(0, held - GPUS))


def _usable(stands: Mapping[str, Stand], unused: int) -> int:
    """How many of the unused GPUs jobs could use at best."""
    more = sum(one.wants for one in stands.values() if one.runs)
    waiting = [one.job for one in stands.values() if not one.runs and not one.job.suspended]
    best = 0
    for number in range(len(waiting) + 1):
        for chosen in combinations(waiting, number):
            if sum(job.least for job in chosen) <= unused:
                best = max(best, min(unused, more + sum(job.most for job in chosen)))
    return best


def _givable(job: Job, stands: Mapping[str, Stand], taken: Mapping[str, int]) -> int:
    """What others have above their minimum, and have borrowed where they are of another project."""
    found = 0
    for project in PROJECTS:
        above = sum(one.above for one in stands.values() if one.runs and one.job.project == project)
        borrowed = max(0, taken.get(project, 0) - GUARANTEED)
        found += above if project == job.project else min(above, borrowed)
    return found
