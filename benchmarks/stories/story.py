"""The events of a story: derived only from its seed, so that it is the same for every arrangement."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

PROJECTS = ("story-a", "story-b")
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
class Story:
    """The existing jobs, by name; `next` generates the next event, whatever was the result of the former ones."""

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
