"""Evaluate the state of jobs when nothing changes any more: idle GPUs that a job could use, and minima that wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from benchmarks.stories.story import GPUS, GUARANTEED, PROJECTS, Job


@dataclass(frozen=True, slots=True)
class Stand:
    """A job and the GPUs that its pods hold; `settled`: none of its pods is starting or ending."""

    job: Job
    has: int
    settled: bool = True

    @property
    def runs(self) -> bool:
        """Whether the job has its minimum."""
        return self.has >= self.job.least

    @property
    def wants(self) -> int:
        """How many more GPUs it would use."""
        return 0 if self.job.suspended else max(0, self.job.most - self.has)

    @property
    def above(self) -> int:
        """How many GPUs it has above its minimum."""
        return max(0, self.has - self.job.least)


@dataclass(frozen=True, slots=True)
class Rest:
    """`idle`: unused GPUs that some job could use; `waits`: minima that could start with the surplus of others.

    `over`: GPUs that are held although they do not exist.
    """

    idle: int
    waits: tuple[str, ...]
    over: int

    @property
    def is_ideal(self) -> bool:
        """Whether nothing could be better."""
        return not self.idle and not self.waits and not self.over


def judge(stands: Mapping[str, Stand], taken: Mapping[str, int]) -> Rest:
    """Evaluate the jobs; `taken` is project -> GPUs that its jobs hold: those in `stands`, and jobs that are ending."""
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
    """Return how many of the unused GPUs jobs could use at best."""
    more = sum(one.wants for one in stands.values() if one.runs)
    waiting = [one.job for one in stands.values() if not one.runs and not one.job.suspended]
    best = 0
    for number in range(len(waiting) + 1):
        for chosen in combinations(waiting, number):
            if sum(job.least for job in chosen) <= unused:
                best = max(best, min(unused, more + sum(job.most for job in chosen)))
    return best


def _givable(job: Job, stands: Mapping[str, Stand], taken: Mapping[str, int]) -> int:
    """Return what others have above their minimum and, if they belong to another project, have borrowed."""
    found = 0
    for project in PROJECTS:
        above = sum(one.above for one in stands.values() if one.runs and one.job.project == project)
        borrowed = max(0, taken.get(project, 0) - GUARANTEED)
        found += above if project == job.project else min(above, borrowed)
    return found
