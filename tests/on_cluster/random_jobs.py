"""Random scenarios: jobs are submitted, scaled, suspended, resumed and deleted; and a verdict on the state they reach.

The events are derived only from a seed, so that they are the same for every arrangement. At rest, when nothing changes
any more, no GPU should be idle that a job could use, and no minimum should wait that could start with the surplus of
others.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

PROJECTS = ("scenario-a", "scenario-b")
GPUS = 6
GUARANTEED = 3
"""Half of the GPUs belong to each project."""
MOST_JOBS = 3
EVENTS = 6


@dataclass(frozen=True, slots=True)
class Job:
    """A job with one GPU per worker; one of fixed size has `least` equal to `most`."""

    name: str
    project: str
    least: int
    most: int
    elastic: bool
    suspended: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """`job` is its state from now on. It is gone after "delete"; after "finish" it ends by itself if it runs."""

    kind: str
    job: Job

    def __str__(self) -> str:
        size = f"{self.job.least}" if not self.job.elastic else f"{self.job.least}-{self.job.most}"
        return f"{self.kind} {self.job.project}/{self.job.name} ({size})"


@dataclass(slots=True)
class Scenario:
    """The existing jobs, by name; `next` generates the next event, whatever the former ones resulted in."""

    seed: int
    jobs: dict[str, Job] = field(default_factory=dict)
    _made: int = 0
    _chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)

    def next(self) -> Event:
        """Generate an event."""
        chance = self._chance
        kind = chance.choice(["submit", "submit", "scale", "suspend", "resume", "delete", "finish"])
        there = list(self.jobs.values())
        of_kind = {
            "scale": [job for job in there if job.elastic and not job.suspended],
            "suspend": [job for job in there if not job.suspended],
            "resume": [job for job in there if job.suspended],
        }.get(kind, there)
        if len(there) < MOST_JOBS and (kind == "submit" or not of_kind or len(there) < 2):
            return self._submit()
        if kind == "submit" or not of_kind:
            kind, of_kind = "delete", there
        job = chance.choice(sorted(of_kind, key=lambda one: one.name))
        if kind in ("delete", "finish"):
            del self.jobs[job.name]
            return Event(kind, job)
        if kind == "scale":
            job = replace(job, most=chance.randint(job.least, GPUS))
        else:
            job = replace(job, suspended=kind == "suspend")
        self.jobs[job.name] = job
        return Event(kind, job)

    def _submit(self) -> Event:
        least, elastic = self._chance.randint(1, 3), self._chance.random() < 0.8
        most = least + self._chance.randint(1, 3) if elastic else least
        self._made += 1
        job = Job(f"s{self.seed}-{self._made}", self._chance.choice(PROJECTS), least, min(most, GPUS), elastic)
        self.jobs[job.name] = job
        return Event("submit", job)


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
