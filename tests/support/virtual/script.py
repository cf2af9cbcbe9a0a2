"""What the ranks of a job do, in virtual time: they import, meet, load, step, save, fail, tear down, hang and export.

`Script` is how a training script behaves, `Training` is one generation of it. Progress is computed from the pace on
demand; only what others notice is an event.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from elasticctl_launcher.hangs.standstill import TimeLimit
from tests.support.virtual.clock import TICK_S, VirtualLoop
from tests.support.virtual.staying import HANDOVER_S, Exit, Ranks, Where, keep_state, tear, vote

STANDS_STILL = "the group hangs: it stands still"
"""What the launchers that found a hang say."""


class Fault(Enum):
    """What is wrong with a script."""

    RAISES = "raises"
    EXITS_3 = "exits 3"
    KILLS_ITSELF = "kills itself"
    FAILS_IN_IMPORT = "fails in import"
    HAS_A_SYNTAX_ERROR = "has a syntax error"
    HANGS = "hangs"

    def __repr__(self) -> str:
        return f"Fault.{self.name}"


@dataclass(frozen=True, slots=True)
class Bug:
    """`rank` modulo the number of workers fails after step `step`.

    `closes_first`: its peers lose their connection to it before it tears down, not after. `times`: how often; then the
    script works (0: always).
    """

    fault: Fault
    step: int = 5
    rank: int = 0
    closes_first: bool = False
    times: int = 0

    @property
    def error(self) -> str:
        """What its traceback says."""
        return {
            Fault.RAISES: "ValueError: the bug",
            Fault.EXITS_3: "",
            Fault.KILLS_ITSELF: "",
            Fault.FAILS_IN_IMPORT: "ModuleNotFoundError: No module named 'bug'",
            Fault.HAS_A_SYNTAX_ERROR: "SyntaxError: the bug",
            Fault.HANGS: STANDS_STILL,
        }[self.fault]

    @property
    def exit_code(self) -> int:
        return {Fault.EXITS_3: 3, Fault.KILLS_ITSELF: 137}.get(self.fault, 1)

    @property
    def permanent(self) -> bool:
        return self.fault in (Fault.FAILS_IN_IMPORT, Fault.HAS_A_SYNTAX_ERROR)


@dataclass(frozen=True, slots=True)
class Script:
    """How long a training script takes for everything, in seconds, and what is wrong with it.

    `step_s` is for one step with one worker; n workers take n**0.8 times less. A rank that is asked to stop needs
    `stop_s`; one that fails tears down for `teardown_s` first. `reports`: it uses the training library. `stays`: its
    ranks stay in their processes when the group changes.
    """

    import_s: float = 5.0
    load_s: float = 2.0
    first_step_s: float = 10.0
    step_s: float = 1.0
    steps: int = 3600
    save_every_s: float = 120.0
    save_s: float = 2.0
    stop_s: float = 0.5
    teardown_s: float = 0.1
    export_s: float = 0.0
    reports: bool = True
    stays: bool = False
    bug: Bug | None = None

    def pace_s(self, workers: int) -> float:
        """Seconds a step."""
        return self.step_s / workers**0.8


LOST_PEER = "RuntimeError: Connection closed by peer"


@dataclass(slots=True)
class Storage:
    """What the job has committed; while `away`, nothing is saved or loaded."""

    step: int | None = None
    commits: int = 0
    away: bool = False


@dataclass(slots=True)
class Figures:
    """What really happened, over all generations of a job."""

    time_limit: TimeLimit = field(default_factory=lambda: TimeLimit(None))
    """What launchers have measured."""
    steps_made: int = 0
    furthest: int = 0
    strikes: int = 0
    hits: int = 0
    """Strikes of the bug that were noticed: a hang may end for another reason before it is detected."""
    hits_since_commit: int = 0
    taken_for_hung: set[str] = field(default_factory=set)
    """Workers whose ranks have waited too long for a machine that could not be reached."""
    last_step_at: float = 0.0
    ranks_stay: bool = False
    """Ranks have said that they stay in their processes."""
    own_failures: dict[str, float] = field(default_factory=dict)
    """When ranks of a worker (uid) last failed by themselves."""

    def count_hit(self) -> None:
        """The bug has ended a generation."""
        self.hits += 1
        self.hits_since_commit += 1


@dataclass(eq=False, slots=True)
class Training:
    """One generation.

    `report(uid, message)` is called with what a rank reports to its launcher, `on_begin(training)` when its ranks have
    come to one state.

    `first_at` is when its first step ends, which takes `first_s`, `halted_at` when it stopped making steps. It makes no
    steps while `stalled` is not empty: nodes that do not move, or cannot be reached.
    """

    loop: VirtualLoop
    dice: random.Random
    script: Script
    storage: Storage
    figures: Figures
    generation: int
    members: tuple[str, ...]
    report: Callable[[str, dict[str, object]], None]
    on_begin: Callable[[Training], None] = lambda training: None
    ranks: dict[str, Ranks] = field(default_factory=dict)
    resumed: int = 0
    begun: bool = False
    first_s: float = 0.0
    first_at: float | None = None
    halted_at: float | None = None
    halted_step: int = 0
    broken: bool = False
    from_memory: bool = False
    asked_to_drain: bool = False
    leaves: bool = False
    draining: bool = False
    stalled: set[str] = field(default_factory=set)
    stalled_since: float = 0.0
    paused_s: float = 0.0
    timers: list[asyncio.TimerHandle] = field(default_factory=list)

    @property
    def pace_s(self) -> float:
        return self.script.pace_s(len(self.members))

    @property
    def is_moving(self) -> bool:
        """Steps are being made, or the first one is under way."""
        return self.begun and self.halted_at is None and not self.stalled

    @property
    def has_stepped(self) -> bool:
        return self.step > self.resumed

    @property
    def step(self) -> int:
        """The last step that it has made."""
        if self.halted_at is not None:
            return self.halted_step
        if self.first_at is None:
            return self.resumed
        now = self.stalled_since if self.stalled else self.loop.time()
        past_s = now - self.first_at - self.paused_s
        if past_s < 0:
            return self.resumed
        return min(self.script.steps, self.resumed + 1 + math.floor(past_s / self.pace_s + 1e-9))

    def time_of(self, step: int) -> float:
        """When a step ends, if nothing stalls."""
        if self.first_at is None:
            raise ValueError("it has not begun")
        return self.first_at + self.paused_s + (step - self.resumed - 1) * self.pace_s

    def _here(self) -> list[Ranks]:
        """The ranks that have not gone on to a later generation in their processes."""
        return [ranks for ranks in self.ranks.values() if ranks.generation == self.generation]

    # What launchers do

    def start(self, ranks: Ranks) -> None:
        """Start the ranks of one worker, or give those that have stayed in their process a place."""
        uid = ranks.uid
        if not self.ranks:
            self.figures.time_limit.start_generation(self.loop.time())
        self.ranks[uid], ranks.generation = ranks, self.generation
        if ranks.attached:
            if ranks.where is Where.WAITING:
                self._is_ready(ranks)
            return
        import_s = self.script.import_s * self.dice.uniform(0.9, 1.1)
        bug = self.script.bug
        if bug is not None and bug.permanent and self._strikes(bug) and self._culprit(bug) == uid:
            ranks.timer = self.loop.after(import_s / 2, self._strike, bug)
        else:
            ranks.timer = self.loop.after(import_s, self._is_ready, ranks)

    def stop(self, ranks: Ranks, grace_s: float, on_stopped: Callable[[], None]) -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        if not ranks.alive:
            self.loop.after(0.0, on_stopped)
            return
        ranks.cancel()
        self.halt()
        stop_s = min(grace_s, self.script.stop_s * self.dice.uniform(0.5, 1.0))
        ranks.where = Where.TEARING_DOWN
        ranks.ends_as = None
        ranks.timer = self.loop.after(stop_s, self._stopped, ranks, on_stopped)

    def release(self, ranks: Ranks) -> None:
        """The generation is over: they wait in their process for the next, once they notice."""
        self.halt()
        if ranks.where in (Where.TRAINING, Where.READY, Where.WAITING):
            ranks.cancel()
            ranks.where = Where.WAITING
        self._break()

    def kill(self, ranks: Ranks, *, silently: bool = False) -> None:
        """End them immediately; `silently`: with their node, so that no connection is closed."""
        ranks.cancel()
        if ranks.alive:
            was_moving, trained = self.is_moving, ranks.where is Where.TRAINING
            ranks.where = Where.GONE
            self.halt()
            if self.script.stays and was_moving and trained and self._can_make_another_step():
                furthest = tear(self._here(), self.dice)
                self.figures.steps_made += furthest > self.halted_step
                self.figures.furthest = max(self.figures.furthest, furthest)
            if not silently:
                self._break()

    def drain(self, on_drained: Callable[[], None], *, to_leave: bool = False) -> None:
        """Have the ranks agree on a step, and commit it; where processes stay, only if one of them has to leave."""
        self.leaves |= to_leave
        if self.halted_at is not None or not self.begun or self.first_at is None:
            return
        self.asked_to_drain = True
        now = self.loop.time()
        at = max(now, self.first_at + self.paused_s) + self.pace_s
        save_s = self.script.save_s if self._commits_drain else 0.0
        self.timers.append(self.loop.at(at + save_s, self._drained, on_drained))

    @property
    def _commits_drain(self) -> bool:
        return self.leaves or not self.script.stays

    # What happens to ranks

    def halt(self) -> None:
        """No further step is made."""
        if self.halted_at is None:
            self.halted_step = self.step
            self.halted_at = self.loop.time()
            self.figures.furthest = max(self.figures.furthest, self.halted_step)
            if self.halted_step > self.resumed:
                self.figures.steps_made += self.halted_step - self.resumed
                self.figures.last_step_at = self.halted_at
            keep_state(self._here(), self.halted_step, warm=self.halted_step > self.resumed)
            for timer in self.timers:
                timer.cancel()
            self.timers.clear()

    def stall(self, node: str) -> None:
        """A node does not move any more, or its peers cannot reach it."""
        if any(ranks.node == node and ranks.alive for ranks in self._here()) and self.halted_at is None:
            if not self.stalled:
                self.stalled_since = self.loop.time()
                self._look_for_hang(self.stalled_since)
            self.stalled.add(node)
            for timer in self.timers:
                timer.cancel()
            self.timers.clear()

    def resume(self, node: str) -> None:
        """It moves again."""
        if node in self.stalled and self.halted_at is None:
            self.stalled.discard(node)
            if not self.stalled:
                self._report_places("")
                self._note_last_step()
                self.paused_s += self.loop.time() - self.stalled_since
                if self.begun:
                    self._plan()
                else:
                    self._meet()

    def _note_last_step(self) -> None:
        """Launchers have heard of each step until the stall, not only of those that are reported here."""
        if self.script.reports and self.has_stepped:
            at = self.time_of(self.step)
            self.figures.time_limit.start_generation(at)
            for kind in ("resumed", "progress"):
                self.figures.time_limit.record_report(kind, at)

    def _is_ready(self, ranks: Ranks) -> None:
        ranks.timer = None
        ranks.where, ranks.attached = Where.READY, self.script.stays
        self._meet()

    def _meet(self) -> None:
        """Begin if all ranks are ready."""
        all_started = len(self.ranks) == len(self.members)
        is_free = self.halted_at is None and not self.begun and not self.stalled
        if is_free and all_started and all(ranks.where is Where.READY for ranks in self._here()):
            self._begin()

    def _begin(self) -> None:
        members = [self.ranks[uid] for uid in self.members]
        kept, is_handed_over = vote(members)
        if kept is None and self.storage.away:
            self._report_waiting()
            self.timers.append(self.loop.after(10.0, self._meet))
            return
        self.begun, self.from_memory = True, kept is not None
        self.resumed = (self.storage.step or 0) if kept is None else kept
        self.on_begin(self)
        for ranks in members:
            ranks.where = Where.TRAINING
            ranks.kept = self.resumed if self.script.stays else None
        load_s = self.script.load_s if kept is None else HANDOVER_S if is_handed_over else 0.0
        self.first_s = self.pace_s if all(ranks.warm for ranks in members) else self.script.first_step_s
        self.first_at = self.loop.time() + load_s + self.first_s - self.paused_s
        self._plan()

    def _plan(self) -> None:
        """Set timers for what comes: the first step, reports, commits, the bug, the end."""
        assert self.first_at is not None
        now, script = self.loop.time(), self.script
        if self.resumed >= script.steps:
            self.timers.append(self.loop.after(script.load_s, self._finish))
            return
        if script.reports:
            resumed_at = self.first_at + self.paused_s - self.first_s
            if resumed_at >= now - TICK_S:
                self.timers.append(self.loop.at(resumed_at, self._report_resumed))
            next_step = self.step + 1
            self.timers.append(self.loop.at(self.time_of(next_step), self._report_progress, 1.0))
        first = max(now, self.first_at + self.paused_s)
        self.timers.append(self.loop.at(first + script.save_every_s, self._save))
        bug = script.bug
        at = None if bug is None or bug.permanent or not self._strikes(bug) else self._time_of_bug(bug)
        if at is not None and at >= now:
            self.timers.append(self.loop.at(at, self._strike, bug))
        self.timers.append(self.loop.at(self.time_of(script.steps), self._finish))

    def _time_of_bug(self, bug: Bug) -> float | None:
        """When it strikes: at the end of its step; where processes stay, which do not make that again, in the next."""
        if not self.script.stays:
            return None if self.resumed >= max(bug.step, 1) else self.time_of(max(bug.step, self.resumed + 1))
        if self.resumed > bug.step:
            return None
        return self.time_of(bug.step + 1) - (self.first_s if self.resumed == bug.step else self.pace_s) / 2

    def _report_resumed(self) -> None:
        self.figures.ranks_stay = self.script.stays
        self.figures.time_limit.record_report("resumed", self.loop.time())
        fields = {"kind": "resumed", "generation": self.generation, "step": self.resumed}
        source = "memory" if self.from_memory else "storage"
        self.report(self.members[0], {**fields, "source": source, "stays": self.script.stays})

    def _report_waiting(self) -> None:
        if self.script.reports:
            self.report(self.members[0], {"kind": "waiting", "reason": "the storage"})

    def _report_progress(self, every_s: float) -> None:
        if every_s == 1.0:  # really, each step is reported: the first ones give the time limit
            self.figures.time_limit.record_report("progress", self.loop.time())
            self.timers.append(self.loop.after(max(1.0, self.pace_s), self._measure_step))
        self.report(self.members[0], self._progress())
        self.timers.append(self.loop.after(every_s, self._report_progress, every_s * 2))

    def _measure_step(self) -> None:
        self.figures.time_limit.record_report("progress", self.loop.time())

    def _progress(self) -> dict[str, object]:
        return {
            "kind": "progress",
            "generation": self.generation,
            "step": self.step,
            "total_steps": self.script.steps,
            "samples_per_s": 32.0 / self.pace_s,
        }

    def _save(self) -> None:
        self.timers.append(self.loop.after(self.script.save_s, self._saved, self.step))

    def _saved(self, step: int) -> None:
        if self.storage.away:
            self._report_waiting()
            self.timers.append(self.loop.after(10.0, self._saved, step))
        else:
            self._commit(step)
            self.timers.append(self.loop.after(self.script.save_every_s, self._save))

    def _commit(self, step: int) -> None:
        if step > (self.storage.step or 0) or self.storage.step is None:
            self.storage.step = step
            self.storage.commits += 1
            self.figures.hits_since_commit = 0
            if self.script.reports:
                fields = {"generation": self.generation, "step": step, "committed": self.storage.commits}
                self.report(self.members[0], {"kind": "committed", "url": "s3://b/run", "size_bytes": 1, **fields})

    def _drained(self, on_drained: Callable[[], None]) -> None:
        if self.halted_at is not None or self.draining:
            return
        if self.storage.away and self._commits_drain:
            self.timers.append(self.loop.after(1.0, self._drained, on_drained))
            return
        self.draining = True
        if self._commits_drain:
            self._commit(self.step)
        self.report(self.members[0], self._progress())
        self.halt()
        if self.script.stays:
            for ranks in self._here():
                ranks.where = Where.WAITING if ranks.where is Where.TRAINING else ranks.where
        on_drained()

    def _culprit(self, bug: Bug) -> str:
        return self.members[bug.rank % len(self.members)]

    def _can_make_another_step(self) -> bool:
        bug = self.script.bug
        is_in_it = bug is not None and not bug.permanent and self._strikes(bug) and self.halted_step >= bug.step
        return self.halted_step < self.script.steps and not is_in_it

    def _strikes(self, bug: Bug) -> bool:
        return not bug.times or self.figures.strikes < bug.times

    def _strike(self, bug: Bug) -> None:
        """The bug: one worker's ranks fail, or hang."""
        culprit = self.ranks[self._culprit(bug)]
        if self.begun and self.script.reports:
            self.report(self.members[0], self._progress())
        self.halt()
        self.figures.strikes += 1
        self.figures.own_failures[culprit.uid] = self.loop.time()
        if bug.fault is Fault.HANGS:
            self._look_for_hang(self.loop.time(), culprit.uid)
            return
        self.figures.count_hit()
        self._fail(culprit, Exit(bug.exit_code, 0.0, True, bug.error), closes_first=bug.closes_first)

    def _look_for_hang(self, since: float, culprit: str = "") -> None:
        """The ranks have stood still since then: have the launchers detect it in time."""
        allowed = self.figures.time_limit.allowance()
        self.loop.at(since + allowed.report_s, self._report_hang, since)
        if allowed.end_s is not None:
            self.loop.at(since + allowed.end_s, self._find_hang, since, culprit)

    def _stands_still(self, since: float) -> bool:
        return since in (self.halted_at, self.stalled_since if self.stalled else None)

    def _report_hang(self, since: float) -> None:
        if self._stands_still(since):
            self._report_places("all_reduce")

    def _report_places(self, where: str) -> None:
        """Report where ranks stand, of those that can; an empty place means that they move again."""
        for number, uid in enumerate(self.members):
            ranks = self.ranks.get(uid)
            if ranks in self._here() and ranks.where is Where.TRAINING and ranks.node not in self.stalled:
                place = {"rank": number, "where": where, "waits": True}
                fields = {"kind": "hang", "generation": self.generation, "step": self.step, "ranks": [place]}
                self.report(uid, fields)

    def _find_hang(self, since: float, culprit: str) -> None:
        if not self._stands_still(since):
            return
        waiting = [r for r in self._here() if r.where is Where.TRAINING and r.node not in self.stalled]
        if culprit and waiting:
            self.figures.count_hit()
        elif not culprit:
            self.figures.taken_for_hung.update(ranks.uid for ranks in waiting)
        for ranks in waiting:
            ranks.on_hang(Exit(1, self.loop.time(), ranks.uid == culprit, STANDS_STILL))

    def _fail(self, ranks: Ranks, how: Exit, *, closes_first: bool = False) -> None:
        """They raise, tear down, and exit."""
        if not ranks.alive or ranks.where is Where.TEARING_DOWN:
            return
        ranks.cancel()
        ranks.where, ranks.ends_as = Where.TEARING_DOWN, how
        teardown_s = 0.0 if how.code == 137 else self.script.teardown_s * self.dice.uniform(0.8, 1.0)
        ranks.timer = self.loop.after(teardown_s, self._exit, ranks)
        if closes_first:
            self._break()

    def _exit(self, ranks: Ranks) -> None:
        how, ranks.where, ranks.timer = ranks.ends_as, Where.GONE, None
        assert how is not None
        if how.code:
            self.halt()
            self._break()
        ranks.on_exit(Exit(how.code, self.loop.time(), how.own, how.error))

    def _stopped(self, ranks: Ranks, on_stopped: Callable[[], None]) -> None:
        ranks.where, ranks.timer = Where.GONE, None
        self._break()
        on_stopped()

    def _break(self) -> None:
        """A connection has been closed: all peers that use it fail."""
        if self.broken or not self.begun:
            return
        self.broken = True
        for ranks in self._here():
            if ranks.where is Where.TRAINING and ranks.node not in self.stalled:
                lost = Exit(1, 0.0, False, LOST_PEER)
                self.loop.after(self.dice.uniform(0.02, 0.5), self._lose_peer, ranks, lost)

    def _lose_peer(self, ranks: Ranks, lost: Exit) -> None:
        if ranks.where is not Where.TRAINING or ranks not in self._here():
            return
        if self.script.stays:
            ranks.where = Where.WAITING
            ranks.on_lost(replace(lost, at=self.loop.time()))
        else:
            self._fail(ranks, lost)

    def _finish(self) -> None:
        """The last step is done: a last save, then the first worker exports, and all exit with 0."""
        if self.storage.away:
            self.timers.append(self.loop.after(10.0, self._finish))
            return
        self._commit(self.script.steps)
        if self.script.reports and self.resumed < self.script.steps:
            self.report(self.members[0], self._progress())
        self.halt()
        for number, uid in enumerate(self.members):
            ranks = self.ranks[uid]
            if ranks.where is Where.TRAINING:
                ranks.where, ranks.ends_as = Where.EXPORTING, Exit(0, 0.0)
                export_s = self.script.export_s if number == 0 else 0.0
                ranks.timer = self.loop.after(0.1 + export_s, self._exit, ranks)
                if self.script.reports:
                    self.report(uid, {"kind": "finished", "generation": self.generation, "step": self.script.steps})
