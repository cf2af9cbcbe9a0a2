"""A simulated cluster: events in order of time, the contender's decision after each, and what jobs do in between."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from benchmarks.sharing_trace import HOUR_S, Outage, SimulatedJob, WeekSettings, WeekTrace
from elasticctl_controller.core.group.newcomers import GrowthOption, decide_growth
from elasticctl_controller.core.sharing.claims import Claim, Node, Worker

POOL = "gpu"


@dataclass(frozen=True, slots=True)
class Granted:
    """What a job gets, and which of its workers leave."""

    workers: int
    leave: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DividedCluster:
    """All grants by job, and when to ask again if nothing changes."""

    grants: dict[str, Granted]
    wake_at: float | None = None


class SharingPolicy(Protocol):
    """A contender. `elastic`: its jobs continue when they lose workers."""

    name: str
    elastic: bool

    def decide(self, nodes: Sequence[Node], claims: Sequence[Claim], now: float) -> DividedCluster:
        """Divide these nodes among these claims."""


@dataclass(slots=True)
class SimWorker:
    """A worker on its node; it can train from `ready_s` on."""

    name: str
    node: str
    started_s: float
    ready_s: float


@dataclass(slots=True)
class SimulatedGroup:
    """A job that has arrived. `members` train, except before `busy_until`; `done` and `saved` are work.

    `rates` are those at which it has trained, by size: what a controller would have measured.
    """

    job: SimulatedJob
    settings: WeekSettings
    pool: str
    fixed: bool
    granted: int = 0
    changed_at: float = 0.0
    workers: dict[str, SimWorker] = field(default_factory=dict)
    members: set[str] = field(default_factory=set)
    busy_until: float = 0.0
    at: float = 0.0
    done: float = 0.0
    saved: float = 0.0
    saved_at: float = 0.0
    changes: int = 0
    began_at: float | None = None
    ended_at: float | None = None
    again_at: float | None = None
    redone: float = 0.0
    made: int = 0
    rates: dict[int, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        """Return the work per second while it trains."""
        return self.job.rate(len(self.members))

    def claim(self, leaving: set[str]) -> Claim:
        """Return it in the terms of the sharing: without workers on nodes that are about to go."""
        job = self.job
        return Claim(
            key=job.key,
            project=job.project,
            pool=self.pool,
            least=job.wanted if self.fixed else job.least,
            most=job.wanted if self.fixed else job.most,
            submitted_at=job.arrives_s,
            granted=self.granted,
            changed_at=self.changed_at,
            workers=tuple(
                Worker(one.name, one.started_s, one.node) for one in self.workers.values() if one.node not in leaving
            ),
        )

    def advance(self, now: float) -> None:
        """Train until `now`, with regular commits."""
        since = max(self.at, self.busy_until)
        if self.members and now > since:
            if now - self.saved_at >= self.settings.commit_s:
                commits = (now - self.saved_at) // self.settings.commit_s
                self.saved_at += commits * self.settings.commit_s
                self.saved = max(self.saved, self.done + self.rate * max(0.0, self.saved_at - since))
            self.done += self.rate * (now - since)
            self.rates[len(self.members)] = self.rate
        self.at = max(self.at, now)

    def ends_at(self) -> float | None:
        """Return when it will be done if nothing happens."""
        if not self.members:
            return None
        return max(self.at, self.busy_until) + max(0.0, self.job.work - self.done) / self.rate

    def commit(self, now: float) -> None:
        """Commit: what is announced costs no work."""
        self.saved, self.saved_at = self.done, now

    def drop(self, names: set[str], now: float, noticed: bool) -> None:
        """Lose these workers, with notice or without."""
        for name in names:
            self.workers.pop(name, None)
        if not names & self.members:
            return
        if noticed:
            self.commit(now)
        else:
            self.redone += self.done - self.saved
            self.done = self.saved
        self.members -= names
        self.changes += 1
        pause_s = self.settings.reform_s if noticed else self.settings.loss_s
        if len(self.members) < (self.job.wanted if self.fixed else self.job.least):
            self.members = set()
        else:
            self._form(self.members | self.ready(now), now, pause_s)

    def ready(self, now: float) -> set[str]:
        """Return the workers that could train now."""
        return {one.name for one in self.workers.values() if one.ready_s <= now}

    def form_group(self, now: float) -> None:
        """Form a group, or admit newcomers, if it is time to."""
        self.again_at = None
        ready = self.ready(now)
        if not self.granted or not ready - self.members:
            return
        coming = max(0, self.granted - len(ready))
        if not self.members:
            if not coming:
                self._form(ready, now, 0.0)  # the workers' start is the cost of starting
            return
        newcomers = ready - self.members
        verdict = decide_growth(
            GrowthOption(
                size=len(self.members),
                ready=len(newcomers),
                coming=coming,
                ready_since=min(self.workers[name].ready_s for name in newcomers),
                reform_cost_s=self.settings.reform_s,
                changes=self.changes,
                watched_s=now - (self.began_at or now),
                remaining_s=max(0.0, self.job.work - self.done) / self.rate,
                rates=self.rates,
            ),
            now,
        )
        if verdict.grow and now >= self.busy_until:
            self.commit(now)
            self._form(ready, now, self.settings.reform_s)
        elif verdict.grow:
            self.again_at = self.busy_until
        else:
            self.again_at = verdict.again_at

    def _form(self, members: set[str], now: float, pause_s: float) -> None:
        self.members = set(members)
        self.busy_until = now + pause_s
        self.saved_at = max(now, self.saved_at)
        self.began_at = now if self.began_at is None else self.began_at


ARRIVES, KNOWN, DOWN, UP, WAKE = range(5)


@dataclass(frozen=True, slots=True)
class Week:
    """The results of a contender on a trace.

    Of the week: `utilisation` is GPUs that train relative to the GPUs that exist, `of_possible` relative to the GPUs
    that the present jobs could have used. `goodput` is work done and kept relative to the GPU hours that exist, with
    work counted in GPU hours at the size that a job wanted: 1 is a cluster that trains all week and loses nothing, with
    every job on the GPUs that it wanted. Of all jobs, until the last one has ended: `completion_h` from arrival to end,
    and `cost_per_job_usd`, the cost of their workers' GPUs.
    """

    seed: int
    contender: str
    jobs: int
    utilisation: float
    of_possible: float
    goodput: float
    completion_h: tuple[float, ...]
    cost_per_job_usd: float


@dataclass(slots=True)
class Meter:
    """Integrals over the week, in GPU seconds, and over everything."""

    there: float = 0.0
    training: float = 0.0
    possible: float = 0.0
    held: float = 0.0
    kept: float = 0.0


@dataclass(slots=True)
class Simulation:
    """A run of one contender on one trace."""

    trace: WeekTrace
    policy: SharingPolicy
    now: float = 0.0
    events: list[tuple[float, int, int, str, Outage | None]] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    leaving: set[str] = field(default_factory=set)
    live: dict[str, SimulatedGroup] = field(default_factory=dict)
    ended: list[SimulatedGroup] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    wakes: set[float] = field(default_factory=set)
    numbers: int = 0

    def run(self) -> None:
        """Run until the week is over and all jobs have ended."""
        self.up = set(self.trace.nodes)
        jobs = {job.key: job for job in self.trace.jobs}
        for job in self.trace.jobs:
            self._at(job.arrives_s, ARRIVES, job.key)
        for outage in self.trace.outages:
            self._at(outage.known_s, KNOWN, outage=outage)
            self._at(outage.down_s, DOWN, outage=outage)
            self._at(outage.up_s, UP, outage=outage)
        self._at(self.trace.settings.week_s, WAKE)
        while len(self.ended) < len(jobs) or self.now < self.trace.settings.week_s:
            self._advance(self.events[0][0])
            while self.events and self.events[0][0] <= self.now:
                _, kind, _, key, event = heappop(self.events)
                if kind == ARRIVES:
                    group = SimulatedGroup(jobs[key], self.trace.settings, POOL, fixed=not self.policy.elastic)
                    group.changed_at = group.at = self.now
                    self.live[key] = group
                elif event is not None:
                    self._change_node(kind, event)
            self._end()
            self._decide()

    def _at(self, when: float, kind: int, key: str = "", outage: Outage | None = None) -> None:
        self.numbers += 1
        heappush(self.events, (when, kind, self.numbers, key, outage))

    def _advance(self, to: float) -> None:
        """Let time pass, and measure it."""
        settings = self.trace.settings
        there = len(self.up) * settings.gpus_per_node
        in_week = self.now < settings.week_s  # there is an event at the end of the week, so no step crosses it
        span_s = to - self.now
        possible = sum(group.job.wanted if group.fixed else group.job.most for group in self.live.values())
        if in_week:
            self.meter.there += there * span_s
            self.meter.possible += min(there, possible) * span_s
        for group in self.live.values():
            before = group.done
            self.meter.held += len(group.workers) * span_s
            if in_week and group.members:
                self.meter.training += len(group.members) * max(0.0, to - max(self.now, group.busy_until))
            group.advance(to)
            if in_week:
                self.meter.kept += group.done - before
        self.now = to

    def _change_node(self, kind: int, outage: Outage) -> None:
        if kind == UP:
            self.up.add(outage.node)
            return
        if kind == KNOWN and outage.known_s < outage.down_s:
            self.leaving.add(outage.node)
            if self.policy.elastic:
                self._lose(outage.node, noticed=True)
        elif kind == DOWN:
            self.up.discard(outage.node)
            self.leaving.discard(outage.node)
            self._lose(outage.node, noticed=False)

    def _lose(self, node: str, noticed: bool) -> None:
        """Remove all workers of a node."""
        for group in self.live.values():
            names = {worker.name for worker in group.workers.values() if worker.node == node}
            if not names:
                continue
            redone = group.redone
            group.drop(names, self.now, noticed)
            if self.now <= self.trace.settings.week_s:
                self.meter.kept -= group.redone - redone

    def _end(self) -> None:
        for key, group in list(self.live.items()):
            if group.done >= group.job.work * (1 - 1e-9):
                group.ended_at = self.now
                self.ended.append(self.live.pop(key))

    def _decide(self) -> None:
        """Have the contender decide, carry that out, and schedule the next event."""
        per_node = self.trace.settings.gpus_per_node
        nodes = [Node(name, per_node) for name in sorted(self.up - self.leaving)]
        verdict = self.policy.decide(nodes, [group.claim(self.leaving) for group in self.live.values()], self.now)
        for key, grant in verdict.grants.items():
            group = self.live[key]
            if grant.workers != group.granted:
                group.granted, group.changed_at = grant.workers, self.now
            if grant.leave:
                group.drop(set(grant.leave), self.now, noticed=True)
        free = {node.name: node.slots for node in nodes}
        for group in self.live.values():
            for node, count in Counter(worker.node for worker in group.workers.values()).items():
                if node in free:
                    free[node] -= count
        for group in self.live.values():
            self._start(group, free)
            group.form_group(self.now)
            self._wake_at(group.ends_at())
            self._wake_at(group.again_at)
        self._wake_at(verdict.wake_at)

    def _start(self, group: SimulatedGroup, free: dict[str, int]) -> None:
        """Create the missing workers, on the nodes that then have the fewest free GPUs."""
        for _ in range(group.granted - len(group.workers)):
            places = [(slots, name) for name, slots in free.items() if slots]
            if not places:
                return
            node = min(places)[1]
            free[node] -= 1
            group.made += 1
            name = f"{group.job.key}-{group.made}"
            group.workers[name] = SimWorker(name, node, self.now, self.now + self.trace.settings.start_s)
            self._wake_at(self.now + self.trace.settings.start_s)

    def _wake_at(self, when: float | None) -> None:
        """Schedule an event at that time, once."""
        if when is not None:
            when = (
                math.ceil(max(when, self.now + 1e-3) * 1000) / 1000
            )  # so that a rounding error does not make a second one
            if when not in self.wakes:
                self.wakes.add(when)
                self._at(when, WAKE)


def simulate(trace: WeekTrace, policy: SharingPolicy, gpu_usd_per_h: float) -> Week:
    """Run a contender on a trace."""
    simulation = Simulation(trace, policy)
    simulation.run()
    meter = simulation.meter
    ended = sorted(simulation.ended, key=lambda group: group.job.key)
    return Week(
        seed=trace.seed,
        contender=policy.name,
        jobs=len(ended),
        utilisation=meter.training / meter.there,
        of_possible=meter.training / meter.possible,
        goodput=meter.kept / meter.there,
        completion_h=tuple(((group.ended_at or 0.0) - group.job.arrives_s) / HOUR_S for group in ended),
        cost_per_job_usd=meter.held / HOUR_S * gpu_usd_per_h / len(ended),
    )
