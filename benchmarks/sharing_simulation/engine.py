"""The simulation: events in order of time, and the contender's decision after each."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush

from benchmarks.sharing_simulation.group import Group, SimWorker
from benchmarks.sharing_simulation.policies import POOL, Policy
from benchmarks.sharing_simulation.trace import HOUR_S, Outage, Trace
from elasticctl_controller.core.sharing.claims import Node

ARRIVES, KNOWN, DOWN, UP, LOOK = range(5)


@dataclass(frozen=True, slots=True)
class Figures:
    """The results of a contender on a trace.

    Of the week: `utilisation` is GPUs that train relative to those that exist, `of_possible` relative to those that the
    present jobs could have used. `goodput` is work done and kept relative to the GPU hours that exist, with work
    counted in GPU hours at the size that a job wanted: 1 is a cluster that trains all week and loses nothing, with
    every job on the GPUs that it wanted. Of all jobs, until the last one has ended: `completion_h` from arrival to end,
    and `cost_per_job_usd`, the cost of their workers' GPUs.
    """

    seed: int
    contender: str
    jobs: int
    utilisation: float
    of_possible: float
    goodput: float
    completed_in_week: int
    completion_h: tuple[float, ...]
    cost_per_job_usd: float
    redone_gpu_h: float
    reformings: int
    suspensions: int
    passes: int


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

    trace: Trace
    policy: Policy
    now: float = 0.0
    events: list[tuple[float, int, int, str, Outage | None]] = field(default_factory=list)
    up: set[str] = field(default_factory=set)
    doomed: set[str] = field(default_factory=set)
    live: dict[str, Group] = field(default_factory=dict)
    ended: list[Group] = field(default_factory=list)
    meter: Meter = field(default_factory=Meter)
    looked_at: set[float] = field(default_factory=set)
    numbers: int = 0
    passes: int = 0
    suspensions: int = 0

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
        self._at(self.trace.settings.week_s, LOOK)
        while len(self.ended) < len(jobs) or self.now < self.trace.settings.week_s:
            self._advance(self.events[0][0])
            while self.events and self.events[0][0] <= self.now:
                _, kind, _, key, outage = heappop(self.events)
                if kind == ARRIVES:
                    group = Group(jobs[key], self.trace.settings, POOL, fixed=not self.policy.elastic)
                    group.changed_at = group.at = self.now
                    self.live[key] = group
                elif outage is not None:
                    self._node(kind, outage)
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

    def _node(self, kind: int, outage: Outage) -> None:
        if kind == UP:
            self.up.add(outage.node)
            return
        if kind == KNOWN and outage.known_s < outage.down_s:
            self.doomed.add(outage.node)
            if self.policy.elastic:
                self._lose(outage.node, noticed=True)
        elif kind == DOWN:
            self.up.discard(outage.node)
            self.doomed.discard(outage.node)
            self._lose(outage.node, noticed=False)

    def _lose(self, node: str, noticed: bool) -> None:
        """Remove all workers of a node."""
        for group in self.live.values():
            names = {worker.name for worker in group.workers.values() if worker.node == node}
            if not names:
                continue
            redone = group.redone
            group.drop(set(group.workers) if self.policy.queues else names, self.now, noticed)
            if self.policy.queues:
                group.granted, group.changed_at = 0, self.now
            if self.now <= self.trace.settings.week_s:
                self.meter.kept -= group.redone - redone

    def _end(self) -> None:
        for key, group in list(self.live.items()):
            if group.done >= group.job.work * (1 - 1e-9):
                group.ended_at = self.now
                self.ended.append(self.live.pop(key))

    def _decide(self) -> None:
        """Ask the contender, carry out its decision, and schedule the next event."""
        self.passes += 1
        per_node = self.trace.settings.gpus_per_node
        nodes = [Node(name, per_node) for name in sorted(self.up - self.doomed)]
        verdict = self.policy.decide(nodes, [group.claim(self.doomed) for group in self.live.values()], self.now)
        for key, grant in verdict.grants.items():
            group = self.live[key]
            if grant.workers != group.granted:
                self.suspensions += grant.workers == 0
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
            group.look(self.now)
            self._look_again(group.ends_at())
            self._look_again(group.again_at)
        self._look_again(verdict.wake_at)

    def _start(self, group: Group, free: dict[str, int]) -> None:
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
            self._look_again(self.now + self.trace.settings.start_s)

    def _look_again(self, when: float | None) -> None:
        """Schedule an event at that time, once."""
        if when is not None:
            when = (
                math.ceil(max(when, self.now + 1e-3) * 1000) / 1000
            )  # so that a rounding error does not make a second one
            if when not in self.looked_at:
                self.looked_at.add(when)
                self._at(when, LOOK)


def simulate(trace: Trace, policy: Policy, gpu_usd_per_h: float) -> Figures:
    """Run a contender on a trace."""
    simulation = Simulation(trace, policy)
    simulation.run()
    meter = simulation.meter
    week_end = trace.settings.week_s
    ended = sorted(simulation.ended, key=lambda group: group.job.key)
    return Figures(
        seed=trace.seed,
        contender=policy.name,
        jobs=len(ended),
        utilisation=meter.training / meter.there,
        of_possible=meter.training / meter.possible,
        goodput=meter.kept / meter.there,
        completed_in_week=sum((group.ended_at or 0.0) <= week_end for group in ended),
        completion_h=tuple(((group.ended_at or 0.0) - group.job.arrives_s) / HOUR_S for group in ended),
        cost_per_job_usd=meter.held / HOUR_S * gpu_usd_per_h / len(ended),
        redone_gpu_h=sum(group.redone for group in ended) / HOUR_S,
        reformings=sum(max(0, group.formed - 1) for group in ended),
        suspensions=simulation.suspensions,
        passes=simulation.passes,
    )
