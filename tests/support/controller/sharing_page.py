"""docs/sharing.md once more, in the words of its list and as plainly as can be.

A worker takes one slot, or several on one large node: where workers fit is not the list's matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from elasticctl_controller.core.sharing.claims import Claim, Project

PATIENCE_S, SETTLED_S = 600.0, 60.0
"""The times of the page's table."""


@dataclass
class Page:
    """The page's division of one pool at `now`, among jobs that have what they were `granted`."""

    pool: str
    slots: int
    projects: Mapping[str, Project]
    jobs: list[Claim]
    now: float
    given: dict[str, int] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)
    """The slots of what is given, by project."""

    def decide(self) -> dict[str, int]:
        """How many workers each job gets. "Repeating it changes nothing": it is repeated until that is so."""
        before = {job.key: job.granted for job in self.jobs}
        seen: list[dict[str, int]] = []
        while (given := self.divide()) not in seen and given != {job.key: job.granted for job in self.jobs}:
            seen.append(given)
            if given == before:
                break  # there and back: nothing is changed
            self.jobs = [
                job if given[job.key] == job.granted else replace(job, granted=given[job.key], changed_at=self.now)
                for job in self.jobs
            ]
        return given

    def divide(self) -> dict[str, int]:
        self.fits = {job.key: min(job.most, self.slots // job.slots_per_worker) for job in self.jobs}
        self.names = sorted({*self.projects, *(job.project for job in self.jobs)})
        self.reserved = {name: self.usable(name) for name in self.names}
        while True:
            self.given = {job.key: 0 for job in self.jobs}
            self.used = dict.fromkeys(self.names, 0)
            self.admit()
            unused = {name: max(0, kept - self.used[name]) for name, kept in self.reserved.items()}
            lent = {name: slots - min(slots, self.wanted(name)) for name, slots in unused.items()}
            if not any(lent.values()):
                break
            self.reserved = {name: kept - lent[name] for name, kept in self.reserved.items()}
        self.grow()
        self.reserved = {name: min(kept, self.used[name]) for name, kept in self.reserved.items()}
        self.grow()
        return self.given

    def project(self, name: str) -> Project:
        return self.projects.get(name, Project(name))

    def guaranteed(self, name: str) -> int:
        return self.project(name).guaranteed.get(self.pool, 0)

    def limit(self, name: str) -> float:
        return self.project(name).limit.get(self.pool, inf)

    def give(self, job: Claim, workers: int) -> None:
        self.given[job.key] += workers
        self.used[job.project] += workers * job.slots_per_worker

    def wanted(self, name: str) -> int:
        """What running jobs of the project could use beyond their minimum."""
        running = [job for job in self.jobs if job.project == name and self.given[job.key]]
        return sum((self.fits[job.key] - self.given[job.key]) * job.slots_per_worker for job in running)

    def usable(self, name: str) -> int:
        """1. Guarantees are reserved, as far as the project's jobs can use them by themselves."""
        most = min(self.guaranteed(name), self.limit(name))
        least = more = 0
        for job in sorted(self.jobs, key=lambda job: (-job.priority, self.is_impatient(job), *came(job))):
            need = job.least * job.slots_per_worker
            if job.project == name and job.least <= self.fits[job.key] and least + need <= most:
                least += need
                more += (self.fits[job.key] - job.least) * job.slots_per_worker
        return int(min(most, least + more))

    def is_impatient(self, job: Claim) -> bool:
        """Whether it waits, for less than its patience so far: it comes after its equals that run."""
        return not job.granted and self.now < job.changed_at + PATIENCE_S

    def keeps(self, job: Claim) -> bool:
        """Would its next worker be one of a size that has not settled?"""
        return self.given[job.key] < job.granted and self.now < job.changed_at + SETTLED_S

    def is_within(self, job: Claim, slots: int) -> bool:
        return self.used[job.project] + slots <= self.reserved[job.project]

    def share(self, job: Claim, within: bool) -> float:
        """How much the project has of its guarantee, or has borrowed for its weight."""
        used, guarantee = self.used[job.project], self.guaranteed(job.project)
        weight = max(self.project(job.project).weight, 1e-9)
        return used / max(1, guarantee) if within else max(0, used - guarantee) / weight

    def room(self, job: Claim, slots: int) -> bool:
        """Return whether so much is not reserved for others, and within the limit."""
        free = self.slots - sum(self.used.values())
        if not self.is_within(job, slots):
            kept = {name: max(0, reserved - self.used[name]) for name, reserved in self.reserved.items()}
            free -= sum(kept.values()) - kept[job.project]
        return slots <= free and self.used[job.project] + slots <= self.limit(job.project)

    def admit(self) -> None:
        """2. Each job gets its minimum, or nothing."""
        waiting = list(self.jobs)
        while waiting:

            def precedence(job: Claim) -> tuple[object, ...]:
                within = self.is_within(job, job.least * job.slots_per_worker)
                return (not within, -job.priority, self.is_impatient(job), self.share(job, within), came(job))

            first = min(waiting, key=precedence)
            waiting.remove(first)
            if first.least <= self.fits[first.key] and self.room(first, first.least * first.slots_per_worker):
                self.give(first, first.least)

    def grow(self) -> None:
        """4. The rest, worker by worker: a project's turn first, and then one of its jobs'."""
        hungry = [job for job in self.jobs if self.given[job.key]]
        while hungry := [job for job in hungry if self.given[job.key] < self.fits[job.key]]:
            firsts = [self.first_of(name, hungry) for name in sorted({job.project for job in hungry})]
            first = min(firsts, key=self.precedence_of_project)
            if self.room(first, first.slots_per_worker):
                self.give(first, 1)
            else:
                hungry.remove(first)

    def first_of(self, project: str, hungry: Iterable[Claim]) -> Claim:
        def precedence(job: Claim) -> tuple[object, ...]:
            has = self.given[job.key] * job.slots_per_worker
            within = self.is_within(job, job.slots_per_worker)
            return (not within, not self.keeps(job), -job.priority, has, not self.holds(job), came(job))

        return min((job for job in hungry if job.project == project), key=precedence)

    def precedence_of_project(self, job: Claim) -> tuple[object, ...]:
        within = self.is_within(job, job.slots_per_worker)
        return (
            not within,
            not within and not self.keeps(job),
            self.share(job, within),
            not self.holds(job),
            job.project,
        )

    def holds(self, job: Claim) -> bool:
        """Whether it has the next worker already, which it keeps among equals."""
        return self.given[job.key] < job.granted


def came(job: Claim) -> tuple[float, str]:
    return (job.submitted_at, job.key)
