"""A shared cluster in memory, whose workers follow what is decided, late; and what has to hold of every decision."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from elasticctl_controller.core.sharing.claims import (
    Claim,
    Node,
    Project,
    SharedPool,
    SharingDecision,
    SharingRules,
    Worker,
)
from elasticctl_controller.core.sharing.grant_workers import decide

RULES = SharingRules(patience_s=600.0, settle_s=60.0)
NOTICE_S = 10.0
"""How long a worker that has to go still holds its slots."""


@dataclass(slots=True)
class Place:
    """Nodes, projects and jobs of one pool. `going`: (until when, slots, node) of workers that have to go."""

    nodes: dict[str, int] = field(default_factory=dict)
    projects: dict[str, Project] = field(default_factory=dict)
    jobs: dict[str, Claim] = field(default_factory=dict)
    going: list[tuple[float, int, str]] = field(default_factory=list)
    now: float = 0.0
    wishes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    names: Iterable[int] = field(default_factory=itertools.count)

    @property
    def pool(self) -> SharedPool:
        return SharedPool("t4", tuple(Node(name, slots) for name, slots in self.nodes.items()))

    def ask(self) -> SharingDecision:
        return decide([self.pool], self.projects.values(), self.jobs.values(), self.now, RULES)

    def decide(self) -> SharingDecision:
        """Decide once: the decision must hold, must not depend on the order, and is granted."""
        decision = self.ask()
        check(self, decision)
        again = decide([self.pool], reverse(self.projects.values()), reverse(self.jobs.values()), self.now, RULES)
        assert again == decision
        self.grant(decision)
        assert sizes(self.ask()) == sizes(decision), "decided on its own outcome, it changed something"
        return decision

    def grant(self, decision: SharingDecision) -> None:
        for key, job in self.jobs.items():
            grant = decision.grants[key]
            if grant.workers != job.granted:
                job = replace(job, granted=grant.workers, changed_at=self.now)
            staying = tuple(worker for worker in job.workers if worker.name not in grant.leave)
            for worker in job.workers:
                if worker.name in grant.leave and worker.node:
                    self.going.append((self.now + NOTICE_S, job.slots_per_worker, worker.node))
            self.jobs[key] = replace(job, workers=staying)
            self.wishes[key] = grant.nodes

    def follow(self, order: Callable[[list[str]], Sequence[str]] = sorted) -> None:
        """Those whose notice is over go, missing workers are made, and those without a node get one that has room."""
        self.going = [one for one in self.going if one[0] > self.now and one[2] in self.nodes]
        for key, job in self.jobs.items():
            made = [Worker(f"{key}-{next(self.names)}", self.now) for _ in range(job.granted - len(job.workers))]
            self.jobs[key] = replace(job, workers=(*job.workers, *made))
        free = self.free()
        for key in order(list(self.jobs)):
            job = self.jobs[key]
            wishes = list(self.wishes.get(key, ()))
            workers = list(job.workers)
            for number, worker in enumerate(workers):
                nodes = [name for name in (*wishes, *sorted(free)) if free.get(name, 0) >= job.slots_per_worker]
                if not worker.node and nodes:
                    free[nodes[0]] -= job.slots_per_worker
                    workers[number] = replace(worker, node=nodes[0])
                    wishes = wishes[1:] if nodes[0] in wishes[:1] else wishes
            self.jobs[key] = replace(job, workers=tuple(workers))

    def free(self) -> dict[str, int]:
        """What is free of each node now."""
        free = dict(self.nodes)
        for _, slots, node in self.going:
            free[node] -= slots
        for job in self.jobs.values():
            for worker in job.workers:
                if worker.node:
                    free[worker.node] -= job.slots_per_worker
        assert all(slots >= 0 for slots in free.values()), free
        return free

    def lose(self, node: str) -> None:
        """A node goes, and with it the workers on it."""
        del self.nodes[node]
        self.going = [one for one in self.going if one[2] != node]
        for key, job in self.jobs.items():
            self.jobs[key] = replace(job, workers=tuple(one for one in job.workers if one.node != node))

    def end(self, key: str) -> None:
        del self.jobs[key]


def reverse(things: Iterable[Any]) -> list[Any]:
    return list(things)[::-1]


def sizes(decision: SharingDecision) -> dict[str, int]:
    return {key: grant.workers for key, grant in decision.grants.items()}


def check(place: Place, decision: SharingDecision) -> None:
    """What holds of every decision, whatever the sizes of workers."""
    assert decision.grants.keys() == place.jobs.keys()
    used: dict[str, int] = {}
    for key, grant in decision.grants.items():
        job = place.jobs[key]
        assert grant.workers == 0 or job.least <= grant.workers <= job.most
        assert grant.reason.waits == (grant.workers == 0)
        assert 0 <= grant.borrowed <= grant.workers
        assert bool(grant.change) == (grant.workers != job.granted)
        names = {worker.name for worker in job.workers}
        assert set(grant.leave) <= names
        assert len(names) - len(grant.leave) <= grant.workers
        used[job.project] = used.get(job.project, 0) + grant.workers * job.slots_per_worker
    assert sum(used.values()) <= place.pool.slots
    for usage in decision.usage:
        assert usage.used == used.get(usage.project, 0)
        assert usage.limit is None or usage.used <= usage.limit
    assert decision.wake_at is None or decision.wake_at > place.now
    if all(job.slots_per_worker == 1 for job in place.jobs.values()):
        _check_single(place, decision)
    else:
        _check_fits(place, decision)


def _check_fits(place: Place, decision: SharingDecision) -> None:
    """Who stays where it is fits its node."""
    free = dict(place.nodes)
    for key, job in place.jobs.items():
        for worker in job.workers:
            if worker.name not in decision.grants[key].leave and worker.node:
                free[worker.node] -= job.slots_per_worker
    assert all(slots >= 0 for slots in free.values())


def _check_single(place: Place, decision: SharingDecision) -> None:
    """What can be said exactly where a worker takes one slot and so fits wherever one is free."""
    given = sizes(decision)
    projects = {usage.project: usage for usage in decision.usage}
    free = place.pool.slots - sum(given.values())
    covered = sum(usage.guaranteed for usage in decision.usage) <= place.pool.slots
    for key, job in place.jobs.items():
        own = projects[job.project]
        limit = float("inf") if own.limit is None else own.limit
        youngest_that_stays = max(
            (w.started_at for w in job.workers if w.node and w.name not in decision.grants[key].leave), default=0.0
        )
        oldest_that_leaves = min(
            (w.started_at for w in job.workers if w.node and w.name in decision.grants[key].leave),
            default=youngest_that_stays,
        )
        assert youngest_that_stays <= oldest_that_leaves
        more = 1 if given[key] else job.least
        if given[key] >= job.most or own.used + more > limit:
            continue
        assert more > free, f"{key} could use what is idle"
        assert not covered or own.used + more > own.guaranteed, f"{key} lacks what is guaranteed"
        if not given[key]:
            _check_waits(place, given, projects, job, free)


def _check_waits(place: Place, given: dict[str, int], projects: dict, job: Claim, free: int) -> None:
    """Check that a waiting job could not start even with all that others must give up for it."""
    surplus: dict[str, int] = {}
    for key, other in place.jobs.items():
        surplus[other.project] = surplus.get(other.project, 0) + max(0, given[key] - other.least)
    own = surplus.pop(job.project, 0)
    borrowed = sum(min(more, max(0, projects[name].used - projects[name].guaranteed)) for name, more in surplus.items())
    assert free + own + borrowed < job.least, f"{job.key} waits for workers that others have above their least"
    own_guarantee = projects[job.project].guaranteed
    siblings = [other for other in place.jobs.values() if other.project == job.project and given[other.key]]
    lower = sum(given[other.key] for other in siblings if other.priority < job.priority)
    rest = own_guarantee - (projects[job.project].used - lower)
    covered = own_guarantee if rest < job.least else 0  # what its smaller siblings have before it
    assert free + lower - min(lower, covered) < job.least, f"{job.key} waits for jobs of lower priority"
    if job.changed_at + RULES.patience_s <= place.now:
        younger = [one for one in siblings if one.priority <= job.priority and _came(one) > _came(job)]
        theirs = sum(given[one.key] for one in younger)
        assert free + theirs - min(theirs, covered) < job.least, f"{job.key} starves"


def _came(job: Claim) -> tuple[float, str]:
    return (job.submitted_at, job.key)
