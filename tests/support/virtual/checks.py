"""What must hold in every simulated scenario: `Ledger` checks events as they happen, `Watcher` looks from time to time.

Both compare what the controller says with what really happened.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import Cause, JobStatus, Phase
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
    """What happened to each worker, and what the controller has reported about it."""

    world: World
    cuts: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    counted: set[str] = field(default_factory=set)
    uncounted: set[str] = field(default_factory=set)
    """Ended because the job was suspended or over: no restarts."""
    broken: set[int] = field(default_factory=set)
    ended: dict[str, float] = field(default_factory=dict)
    faults_at: list[float] = field(default_factory=list)

    def note_fault(self) -> None:
        """Record that the platform, or the owner, has taken something away."""
        self.faults_at.append(self.world.loop.time())

    def note_cut(self, node: str, for_s: float) -> None:
        """Record that a node cannot reach the service for so long."""
        now = self.world.loop.time()
        self.cuts.setdefault(node, []).append((now, now + for_s))

    def note_end(self, pod: Pod) -> None:
        """Record that the process of a pod has ended."""
        self.ended[pod.uid] = self.world.loop.time()

    def was_silent(self, node: str, at: float) -> bool:
        """Return whether a node was unable to call for long enough before `at`.

        Its last call may have been a while before the cut, and may have come late, or never. Two cuts count as one if
        the time between them is shorter than that between two calls.
        """
        since_s = SILENT_S - BEAT_S - self.world.network.weather.late_s
        long = (cut for cut in _joined(self.cuts.get(node, ())) if cut[1] - cut[0] >= since_s)
        return any(since <= at - since_s and at <= until + 90.0 for since, until in long)

    def check_budget(self) -> None:
        """Check that the bug struck at most once more than the backoff limit, and once more for each worker taken away.

        A permanent bug strikes once. A newcomer also excuses a strike if it stops ranks that have reported nothing yet,
        because they may have been cleaning up.
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
        """Return whether a worker has failed that could not reach the service at that time."""
        failed = self.world.figures.own_failures
        cuts = ((self.world.launchers[uid].node, at) for uid, at in failed.items())
        return any(since <= at <= until for node, at in cuts for since, until in self.cuts.get(node, ()))

    def check_begin(self, training: Training) -> None:
        """Check that a generation begins from the furthest step that any rank holds in memory."""
        members = list(training.ranks.values())
        held = [ranks for ranks in (*members, *self._others(training)) if ranks.kept is not None]
        furthest = max((ranks.kept or 0 for ranks in held), default=0)
        if furthest > training.resumed:
            names = sorted(ranks.uid for ranks in held if ranks.kept == furthest)
            from_step = f"generation {training.generation} goes on from step {training.resumed}"
            raise BrokenPromise(f"{from_step}, but {names} hold step {furthest}")
        late = [ranks.uid for ranks in members if ranks.kept is None and not ranks.prepared]
        innocent = set(late) - self.world.figures.own_failures.keys()
        if training.from_memory and innocent and self.world.figures.ranks_stay and not self.world.is_disturbed:
            raise BrokenPromise(f"generation {training.generation} waited for the start of {sorted(innocent)}")

    def _others(self, training: Training) -> Iterator[Ranks]:
        """Return the ranks that could continue in their processes, but have been left out."""
        world = self.world
        for launcher in () if world.is_disturbed else world.launchers.values():
            ranks = launcher.ranks
            is_free = launcher.runs and not (launcher.got_sigterm or launcher.frozen)
            if is_free and ranks is not None and ranks.can_stay and ranks.uid not in training.members:
                yield ranks

    def check_delete(self, job: ElasticJob, name: str, uid: str) -> None:
        """Check a pod that the controller is about to delete."""
        worker = next((worker for worker in job.status.workers if worker.uid == uid), None)
        if worker is None or not (worker.removal or worker.cause):
            raise BrokenPromise(f"{name} was deleted, and no stored status says why")

    def check_write(self, job: ElasticJob, status: JobStatus) -> None:
        """Check a status that the controller writes."""
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
            return  # if the culprit cannot report, the workers that fail with it are blamed: a known gap
        failed = world.figures.own_failures.keys() | world.figures.taken_for_hung
        if cause in OWN and cause is not Cause.STUCK and uid not in failed:
            raise BrokenPromise(f"{name} ({uid}) was blamed ({cause}), but its ranks never failed by themselves")

    def _was_unreachable(self, uid: str, node: str, now: float) -> bool:
        launcher = self.world.launchers.get(uid)
        if launcher is None or not launcher.runs:
            return True
        return self.was_silent(node, now)

    def _check_blame(self, name: str, verdict: str, generation: int) -> None:
        """Check a generation that the status reports as ended by the ranks of a worker."""
        world = self.world
        uids = {uid for uid, one in world.launchers.items() if one.name == name}
        failed = world.figures.own_failures.keys() | world.figures.taken_for_hung
        if verdict != "collateral" and not uids & failed:
            raise BrokenPromise(f"{name} was blamed for generation {generation}, but its ranks never failed")
        if not (world.figures.hits or world.figures.taken_for_hung):
            raise BrokenPromise(f"generation {generation} was counted as failed ({name}), but no script failed")


def _joined(cuts: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join cuts between which no call was due."""
    found: list[tuple[float, float]] = []
    for since, until in sorted(cuts):
        if found and since < found[-1][1] + BEAT_S:
            found[-1] = (found[-1][0], max(until, found[-1][1]))
        else:
            found.append((since, until))
    return found


LAG_S = 8.0
"""How long the truth must have stayed the same before a status is compared with it."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The real state: the generation that trains, what it does, and how many workers run; `leaving` must leave."""

    generation: int
    members: tuple[str, ...]
    doing: str
    running: int
    leaving: int


@dataclass(eq=False, slots=True)
class Watcher:
    """Compares status and truth every `every_s`; after `quiet_s` nothing goes wrong any more."""

    world: World
    quiet_s: float
    every_s: float
    _before: Truth | None = field(default=None)

    def start(self) -> None:
        """Start watching."""
        self.world.loop.after(self.every_s, self._look)

    def _look(self) -> None:
        self._before = self.truth()
        self.world.loop.after(LAG_S, self._compare)

    def _compare(self) -> None:
        truth, world = self.truth(), self.world
        if world.status.phase.terminal:
            world.loop.stop()
            return
        world.ledger.check_budget()
        world.loop.after(self.every_s - LAG_S, self._look)
        if truth == self._before and truth is not None and not world.is_disturbed:
            self._check(truth)

    def truth(self) -> Truth | None:
        """Return the real state; None while it is in transition."""
        world, training = self.world, self.world.now_training
        if training is None:
            return None
        names = tuple(world.launchers[uid].name for uid in training.members)
        running = [launcher for launcher in world.launchers.values() if launcher.runs]
        leaving = sum(launcher.got_sigterm for launcher in running)
        return Truth(training.generation, names, self._doing(training), len(running), leaving)

    def _doing(self, training: Training) -> str:
        if (
            training.halted_at is not None
            or training.stalled
            or training.asked_to_drain
            or len(training.ranks) < len(training.members)
        ):
            return ""
        if not training.begun or training.first_at is None:
            return "starting"
        if training.has_stepped:
            return "training"
        past_s = self.world.loop.time() - (training.first_at + training.paused_s - training.first_s)
        return "first step" if past_s > 0 else "starting"

    def _check(self, truth: Truth) -> None:
        status, world = self.world.status, self.world
        if not truth.doing:
            return
        needed = max(1, world.setup.minimum)
        enough = {count >= needed for count in (truth.running, truth.running - truth.leaving)}  # as one sees it
        if (status.phase is Phase.RUNNING) not in enough:
            raise BrokenPromise(f"status says {status.phase}, but {truth.running} workers run")
        if (status.generation, status.generations[-1].workers) != (truth.generation, truth.members):
            raise BrokenPromise(f"status says generation {status.generation}, but {truth} trains")
        shown = status.activity.doing if status.activity is not None else ""
        if shown not in self._words(truth):
            raise BrokenPromise(f"status says {shown!r}, but the ranks are {truth.doing}")
        step = status.progress.step
        furthest = max(world.figures.furthest, world.now_training.step if world.now_training else 0)
        if step is not None and step > furthest:
            raise BrokenPromise(f"status says step {step}, but no rank has made more than {furthest}")

    def _words(self, truth: Truth) -> tuple[str, ...]:
        script = self.world.script
        if not script.reports:
            return ("running",) if truth.doing == "training" else ("running", "starting")
        if truth.doing == "starting":
            return ("starting", "loading", "waiting", "running")
        if truth.doing == "first step" and world_forgot(self.world):
            return ("running", "starting", truth.doing)  # reports made while the API server was away are not stored
        if (
            truth.doing == "training"
            and world_forgot(self.world)
            and self.world.status.generations[-1].formed_at is None
        ):
            return ("running", truth.doing)  # no step has been reported since
        return (truth.doing,)

    def check_moves(self) -> None:
        """Check that steps are made, because everything has been in order for long."""
        world, training = self.world, self.world.now_training
        if world.status.phase.terminal:
            return
        if training is not None and self._has_just_ended(training):
            return
        if training is None or not (self._is_busy(training) or world.figures.last_step_at > self.quiet_s):
            states = [(one.name, one.state.value, one.doing) for one in world.launchers.values() if one.runs]
            raise BrokenPromise(
                f"no steps are made though everything is in order: {world.status.phase}, {world.status.reason}, "
                f"{world.status.activity}, launchers {states}"
            )

    def _has_just_ended(self, training: Training) -> bool:
        """Whether its workers ended after the last step so recently that the controller may not know yet."""
        ended = [self.world.ledger.ended.get(uid) for uid in training.members]
        since = self.world.loop.time() - LAG_S
        return training.step == self.world.script.steps and all(at is not None and at > since for at in ended)

    def _is_busy(self, training: Training) -> bool:
        exporting = any(ranks.where.value == "exporting" for ranks in training.ranks.values())
        return (training.is_moving and training.has_stepped) or exporting


def world_forgot(world: World) -> bool:
    """Whether the controller's process was restarted, and has lost what ranks had reported."""
    return world.plane.starts > 1
