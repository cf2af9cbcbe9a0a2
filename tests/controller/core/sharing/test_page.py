"""docs/sharing.md once more, in the words of its list as plainly as can be: what is decided is what the page says."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl_controller.core.sharing.claims import Claim, Node, Pool, Project
from elasticctl_controller.core.sharing.decide import decide
from tests.support.controller.shared_pool import RULES, sizes

NOW = 1e6
"""Long after everything: nobody's patience lasts, and every size has settled."""


@dataclass
class Page:
    """The page's division, in one slot per worker or several on one large node."""

    slots: int
    projects: dict[str, Project]
    jobs: list[Claim]

    def divide(self) -> dict[str, int]:
        self.fits = {job.key: min(job.most, self.slots // job.slots_per_worker) for job in self.jobs}
        self.reserved = {name: self.usable(name) for name in self.projects}
        while True:
            self.given = {job.key: 0 for job in self.jobs}
            self.admit()
            unused = {name: max(0, kept - self.used(name)) for name, kept in self.reserved.items()}
            lent = {name: slots - min(slots, self.wanted(name)) for name, slots in unused.items()}
            if not any(lent.values()):
                break
            self.reserved = {name: kept - lent[name] for name, kept in self.reserved.items()}
        self.grow()
        self.reserved = {name: min(kept, self.used(name)) for name, kept in self.reserved.items()}
        self.grow()
        return self.given

    def guaranteed(self, name: str) -> int:
        return self.projects[name].guaranteed.get("t4", 0)

    def limit(self, name: str) -> float:
        return self.projects[name].limit.get("t4", inf)

    def used(self, name: str) -> int:
        return sum(self.given[job.key] * job.slots_per_worker for job in self.jobs if job.project == name)

    def wanted(self, name: str) -> int:
        """What running jobs of the project could use beyond their minimum."""
        running = [job for job in self.jobs if job.project == name and self.given[job.key]]
        return sum((self.fits[job.key] - self.given[job.key]) * job.slots_per_worker for job in running)

    def usable(self, name: str) -> int:
        """1. Guarantees are reserved, as far as the project's jobs can use them by themselves."""
        most = min(self.guaranteed(name), self.limit(name))
        least = more = 0
        for job in sorted(self.jobs, key=lambda job: (-job.priority, job.submitted_at, job.key)):
            need = job.least * job.slots_per_worker
            if job.project == name and job.least <= self.fits[job.key] and least + need <= most:
                least += need
                more += (self.fits[job.key] - job.least) * job.slots_per_worker
        return int(min(most, least + more))

    def is_within(self, job: Claim, slots: int) -> bool:
        return self.used(job.project) + slots <= self.reserved[job.project]

    def share(self, job: Claim, within: bool) -> float:
        """How much the project has of its guarantee, or has borrowed for its weight."""
        used, guarantee = self.used(job.project), self.guaranteed(job.project)
        return used / max(1, guarantee) if within else max(0, used - guarantee) / self.projects[job.project].weight

    def room(self, job: Claim, slots: int) -> bool:
        """Is there so much that is not reserved for others, within the limit?"""
        free = self.slots - sum(self.used(name) for name in self.projects)
        if not self.is_within(job, slots):
            kept = {name: max(0, reserved - self.used(name)) for name, reserved in self.reserved.items()}
            free -= sum(kept.values()) - kept[job.project]
        return slots <= free and self.used(job.project) + slots <= self.limit(job.project)

    def admit(self) -> None:
        """2. Each job gets its minimum, or nothing."""
        waiting = list(self.jobs)
        while waiting:

            def precedence(job: Claim) -> tuple[object, ...]:
                within = self.is_within(job, job.least * job.slots_per_worker)
                return (not within, -job.priority, self.share(job, within), job.submitted_at, job.key)

            first = min(waiting, key=precedence)
            waiting.remove(first)
            if first.least <= self.fits[first.key] and self.room(first, first.least * first.slots_per_worker):
                self.given[first.key] = first.least

    def grow(self) -> None:
        """4. The rest, worker by worker."""
        hungry = [job for job in self.jobs if self.given[job.key]]
        while hungry := [job for job in hungry if self.given[job.key] < self.fits[job.key]]:

            def precedence(job: Claim) -> tuple[object, ...]:
                within, has = self.is_within(job, job.slots_per_worker), self.given[job.key] * job.slots_per_worker
                in_project = (-job.priority, has, job.submitted_at, job.key)
                return (not within, self.share(job, within), job.project, in_project)

            first = min(hungry, key=precedence)
            if self.room(first, first.slots_per_worker):
                self.given[first.key] += 1
            else:
                hungry.remove(first)


quotas = st.none() | st.integers(0, 7)
jobs = st.tuples(
    st.sampled_from("abc"), st.integers(1, 4), st.integers(0, 5), st.sampled_from([1, 1, 2]), st.sampled_from([0, 0, 3])
)


@settings(max_examples=1000, deadline=None)
@given(
    slots=st.integers(1, 14),
    wanted=st.lists(jobs, min_size=1, max_size=7),
    quota=st.tuples(quotas, quotas, quotas),
    limit=st.tuples(quotas, quotas, quotas),
    weight=st.sampled_from([1.0, 2.0]),
)
def test_the_division_is_the_pages(
    slots: int,
    wanted: list[tuple[str, int, int, int, int]],
    quota: tuple[int | None, ...],
    limit: tuple[int | None, ...],
    weight: float,
) -> None:
    claims = [
        Claim(f"{project}/j{at}", project, "t4", least, least + more, each, priority, float(at), changed_at=float(at))
        for at, (project, least, more, each, priority) in enumerate(wanted)
    ]
    projects = {
        name: Project(
            name,
            weight if name == "b" else 1.0,
            {} if own is None else {"t4": own},
            {} if most is None else {"t4": most},
        )
        for name, own, most in zip("abc", quota, limit, strict=True)
    }
    pool = Pool("t4", (Node("n", slots),))
    expected = Page(slots, projects, claims).divide()
    found = decide([pool], projects.values(), claims, NOW, RULES)
    assert sizes(found) == expected
