"""What must hold in every simulated story, checked against what really happened."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Cause, JobStatus
from tests.support.virtual.cluster import Pod

if TYPE_CHECKING:
    from tests.support.virtual.script import Training
    from tests.support.virtual.staying import Ranks
    from tests.support.virtual.world import World

SILENT_S = 10.0
"""Less silence than this never makes a worker dead."""
BEAT_S = 3.0
"""A launcher without a poll under way calls this often."""
OWN = {Cause.APPLICATION, Cause.OOM_KILLED, Cause.STUCK}


class BrokenPromise(AssertionError):
    """A property does not hold."""


@dataclass(eq=False, slots=True)
class Ledger:
    """What happened to each worker, and what the controller has said of it."""

    world: World
    cuts: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    uncounted: set[str] = field(default_factory=set)
    """Ended because the job was suspended or over: no restarts."""
    broken: set[int] = field(default_factory=set)
    ended: dict[str, float] = field(default_factory=dict)
    faults_at: list[float] = field(default_factory=list)

    def note_fault(self) -> None:
        """The platform, or the owner, has taken something away."""
        self.faults_at.append(self.world.loop.time())

    def note_cut(self, node: str, for_s: float) -> None:
        """A node cannot reach the service for so long."""
        now = self.world.loop.time()
        self.cuts.setdefault(node, []).append((now, now + for_s))

    def note_end(self, pod: Pod) -> None:
        """What ran in a pod has ended."""
        self.ended[pod.uid] = self.world.loop.time()

    def was_silent(self, node: str, at: float) -> bool:
        """Had a node been unable to call, for long enough, a while before?

        It may have called for the last time a while before that, and its last call may have come late, or never. Nor
        need it have called between two cuts, if that was less time than between two calls.
        """
        since_s = SILENT_S - BEAT_S - self.world.network.weather.late_s
        long = (cut for cut in _joined(self.cuts.get(node, ())) if cut[1] - cut[0] >= since_s)
        return any(since <= at - since_s and at <= until + 90.0 for since, until in long)

    def check_budget(self) -> None:
        """A bug strikes once more than the budget allows restarts; what takes a worker away may excuse it once.

        One that no restart can help strikes once. A newcomer excuses it, too, for which ranks are stopped that have
        reported nothing yet: they may have been cleaning up.
        """
        world = self.world
        permanent = world.script.bug is not None and world.script.bug.permanent
        restarts = 0 if permanent else world.setup.backoff_limit
        struck, most = world.figures.hits_since_commit, restarts + 1 + len(self.faults_at)
        pairs = itertools.pairwise(world.status.generations)
        most += sum(old.resumed_step is None and new.reason.endswith(" joined") for old, new in pairs)
        if struck > most:
            raise BrokenPromise(f"the bug struck {struck} times; the budget allows {most}")

    def is_culprit_cut(self) -> bool:
        """Has somebody failed who could not tell the service at that time?"""
        failed = self.world.figures.own_failures
        cuts = ((self.world.launchers[uid].node, at) for uid, at in failed.items())
        return any(since <= at <= until for node, at in cuts for since, until in self.cuts.get(node, ()))

    def check_begin(self, training: Training) -> None:
        """A generation has come to one state: that of the furthest step that anybody holds in memory."""
        members = list(training.ranks.values())
        held = [ranks for ranks in (*members, *self._others(training)) if ranks.kept is not None]
        furthest = max((ranks.kept or 0 for ranks in held), default=0)
        if furthest > training.resumed:
            names = sorted(ranks.uid for ranks in held if ranks.kept == furthest)
            from_step = f"generation {training.generation} goes on from step {training.resumed}"
            raise BrokenPromise(f"{from_step}, but {names} hold step {furthest}")
        late = [ranks.uid for ranks in members if ranks.kept is None and not ranks.prepared]
        innocent = set(late) - self.world.figures.own_failures.keys()
        if training.from_memory and innocent and self.world.figures.told_to_stay and not self.world.is_disturbed:
            raise BrokenPromise(f"generation {training.generation} waited for the start of {sorted(innocent)}")

    def _others(self, training: Training) -> Iterator[Ranks]:
        """Those that could train on in their processes, and have been left out."""
        world = self.world
        for launcher in () if world.is_disturbed else world.launchers.values():
            ranks = launcher.ranks
            is_free = launcher.runs and not (launcher.got_sigterm or launcher.frozen)
            if is_free and ranks is not None and ranks.can_stay and ranks.uid not in training.members:
                yield ranks

    def check_delete(self, job: ElasticJob, name: str, uid: str) -> None:
        """A pod is about to be deleted by the controller."""
        worker = next((worker for worker in job.status.workers if worker.uid == uid), None)
        if worker is None or not (worker.removal or worker.cause):
            raise BrokenPromise(f"{name} was deleted, and no stored status says why")

    def check_write(self, job: ElasticJob, status: JobStatus) -> None:
        """The controller writes a status."""
        old, new = job.status, status
        before, after = ((s.phase, s.failures, sum(s.restarts.values())) for s in (old, new))
        if old.phase.terminal and before != after:  # the cause of an end may still become known: a node that was lost
            raise BrokenPromise(f"a job that was over went on: {before} {after}")
        self._check_counts(old, new)
        caused = {worker.uid for worker in old.workers if worker.cause is not None}
        for worker in new.workers:
            if worker.cause is not None and worker.uid not in caused:
                self._check_cause(worker.uid, worker.name, worker.node, worker.cause)
        known = {item.generation for item in old.generations if item.failure is not None}
        for item in new.generations:
            if item.failure is not None and item.generation not in known:
                self._check_blame(item.failure.worker, item.failure.verdict, item.generation)
        hits = self.world.figures.hits
        if hits <= self.world.setup.backoff_limit and new.failures > hits and not self.world.figures.taken_for_hung:
            raise BrokenPromise(f"{new.failures} failures are counted, but the script has failed {hits} times")

    def _check_counts(self, old: JobStatus, new: JobStatus) -> None:
        known, present = {w.uid: w for w in old.workers}, {w.uid for w in new.workers}
        fresh = {w.uid for w in new.workers if w.cause and not (w.uid in known and known[w.uid].cause)}
        fresh |= {w.uid for w in old.workers if not w.cause and w.uid not in present}
        again = fresh & (self.counted | self.uncounted)
        if again:
            raise BrokenPromise(f"an end was counted twice: {sorted(again)}")
        marks = {w.uid: w.removal for w in (*old.workers, *new.workers) if w.removal}
        silent = {uid for uid in fresh if marks.get(uid) in ("Suspended", "Finished")}
        if old.phase.terminal:
            silent = fresh
        broken = {g.generation for g in new.generations if g.failure is not None} - self.broken
        grown = sum(new.restarts.values()) - sum(old.restarts.values())
        if grown != len(fresh - silent) + len(broken):
            raise BrokenPromise(
                f"restarts grew by {grown}: {old.restarts} -> {new.restarts}; ends {sorted(fresh - silent)}, "
                f"broken generations {sorted(broken)}"
            )
        self.counted |= fresh - silent
        self.uncounted |= silent
        self.broken |= broken

    def _check_cause(self, uid: str, name: str, node: str, cause: Cause) -> None:
        world = self.world
        now = world.loop.time()
        if cause is Cause.UNRESPONSIVE and not self._was_unreachable(uid, node, now):
            raise BrokenPromise(f"{name} ({uid}) was replaced as unresponsive, but it called all the time")
        if world.figures.own_failures and self.is_culprit_cut():
            return  # who fails and cannot say so leaves the blame to those that it takes along: a known gap
        failed = world.figures.own_failures.keys() | world.figures.taken_for_hung
        if cause in OWN and cause is not Cause.STUCK and uid not in failed:
            raise BrokenPromise(f"{name} ({uid}) was blamed ({cause}), but its ranks never failed by themselves")

    def _was_unreachable(self, uid: str, node: str, now: float) -> bool:
        launcher = self.world.launchers.get(uid)
        if launcher is None or not launcher.runs:
            return True
        return self.was_silent(node, now)

    def _check_blame(self, name: str, verdict: str, generation: int) -> None:
        """A generation is said to have ended because ranks of a worker failed."""
        world = self.world
        uids = {uid for uid, one in world.launchers.items() if one.name == name}
        failed = world.figures.own_failures.keys() | world.figures.taken_for_hung
        if verdict != "collateral" and not uids & failed:
            raise BrokenPromise(f"{name} was blamed for generation {generation}, but its ranks never failed")
        if not (world.figures.hits or world.figures.taken_for_hung):
            raise BrokenPromise(f"generation {generation} was counted as failed ({name}), but no script failed")


def _joined(cuts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """These times, as one where nobody need have called in between."""
    found: list[tuple[float, float]] = []
    for since, until in sorted(cuts):
        if found and since < found[-1][1] + BEAT_S:
            found[-1] = (found[-1][0], max(until, found[-1][1]))
        else:
            found.append((since, until))
    return found
