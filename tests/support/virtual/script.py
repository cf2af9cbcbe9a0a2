"""What the ranks of a job do, in virtual time: they import, meet, load, step, save, fail, tear down, hang and export.

`Script` is how a training script behaves, `Training` is one generation of it. Progress is computed from the pace when
somebody asks; only what somebody else notices is an event.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from elasticctl_launcher.hangs.pace import Pace
from tests.support.virtual.clock import VirtualLoop

STANDS_STILL = "it stands still"
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

    `step_s` is for one step with one worker; n workers take n**0.8 times less. A rank that is told to stop needs
    `stop_s`; one that fails tears down for `teardown_s` first. `reports`: it uses the training library.
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
    bug: Bug | None = None

    def pace_s(self, workers: int) -> float:
        """Seconds a step."""
        return self.step_s / workers**0.8


class Where(Enum):
    """What the ranks of one worker are doing."""

    IMPORTING = "importing"
    READY = "ready"  # they wait for those of their peers
    TRAINING = "training"
    EXPORTING = "exporting"
    TEARING_DOWN = "tearing down"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Exit:
    """How the ranks of a worker ended. `at` is in seconds since the story began; `own`: by an error of their own."""

    code: int
    at: float
    own: bool = False
    error: str = ""

    @property
    def of_peers(self) -> bool:
        return self.code != 0 and not self.own


LOST_PEER = "RuntimeError: Connection closed by peer"


@dataclass(eq=False, slots=True)
class Ranks:
    """The ranks of one worker in one generation; `on_exit` and `on_hang` are its launcher's."""

    uid: str
    node: str
    on_exit: Callable[[Exit], None]
    on_hang: Callable[[Exit], None]
    where: Where = Where.IMPORTING
    ends_as: Exit | None = None
    timer: asyncio.TimerHandle | None = None

    @property
    def alive(self) -> bool:
        return self.where is not Where.GONE


@dataclass(slots=True)
class Storage:
    """What the job has committed; while `away`, nothing is saved or loaded."""

    step: int | None = None
    commits: int = 0
    away: bool = False


@dataclass(slots=True)
class Figures:
    """What really happened, over all generations of a job."""

    pace: Pace = field(default_factory=lambda: Pace(None))
    """What launchers have measured."""
    steps_made: int = 0
    furthest: int = 0
    strikes: int = 0
    hits: int = 0
    """Strikes of the bug that somebody has noticed: a hang may end by something else before it is found."""
    hits_since_commit: int = 0
    last_step_at: float = 0.0
    own_failures: dict[str, float] = field(default_factory=dict)
    """When ranks of a worker (uid) last failed by themselves."""

    def count_hit(self) -> None:
        """The bug has ended a generation."""
        self.hits += 1
        self.hits_since_commit += 1


@dataclass(eq=False, slots=True)
class Training:
    """One generation. `tell(uid, message)` is called with what a rank reports to its launcher.

    `first_at` is when its first step ends, `halted_at` when it stopped making steps; `drained` the step it agreed to
    stop at. It makes no steps while `stalled` is not empty: nodes that do not move, or cannot be reached.
    """

    loop: VirtualLoop
    dice: random.Random
    script: Script
    storage: Storage
    figures: Figures
    generation: int
    members: tuple[str, ...]
    tell: Callable[[str, dict[str, object]], None]
    ranks: dict[str, Ranks] = field(default_factory=dict)
    resumed: int = 0
    begun: bool = False
    first_at: float | None = None
    halted_at: float | None = None
    halted_step: int = 0
    broken: bool = False
    asked_to_drain: bool = False
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

    # What launchers do

    def start(self, uid: str, node: str, on_exit: Callable[[Exit], None], on_hang: Callable[[Exit], None]) -> Ranks:
        """Start the ranks of one worker."""
        if not self.ranks:
            self.figures.pace.begin(self.loop.time())
        ranks = self.ranks[uid] = Ranks(uid, node, on_exit, on_hang)
        import_s = self.script.import_s * self.dice.uniform(0.9, 1.1)
        bug = self.script.bug
        if bug is not None and bug.permanent and self._strikes(bug) and self._culprit(bug) == uid:
            ranks.timer = self.loop.after(import_s / 2, self._strike, bug)
        else:
            ranks.timer = self.loop.after(import_s, self._is_ready, ranks)
        return ranks

    def stop(self, ranks: Ranks, grace_s: float, on_stopped: Callable[[], None]) -> None:
        """SIGTERM, and SIGKILL after the grace period."""
        if not ranks.alive:
            self.loop.after(0.0, on_stopped)
            return
        self._cancel(ranks)
        self.halt()
        stop_s = min(grace_s, self.script.stop_s * self.dice.uniform(0.5, 1.0))
        ranks.where = Where.TEARING_DOWN
        ranks.ends_as = None
        ranks.timer = self.loop.after(stop_s, self._stopped, ranks, on_stopped)

    def kill(self, ranks: Ranks, *, silently: bool = False) -> None:
        """They are gone at once; `silently`: with their node, so that no connection is closed."""
        self._cancel(ranks)
        if ranks.alive:
            ranks.where = Where.GONE
            self.halt()
            if not silently:
                self._break()

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Have the ranks agree on a step and commit it."""
        if self.halted_at is not None or not self.begun or self.first_at is None:
            return
        self.asked_to_drain = True
        now = self.loop.time()
        at = max(now, self.first_at + self.paused_s) + self.pace_s
        self.timers.append(self.loop.at(at + self.script.save_s, self._drained, on_drained))

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
            for timer in self.timers:
                timer.cancel()
            self.timers.clear()

    def stall(self, node: str) -> None:
        """A node does not move any more, or its peers cannot reach it."""
        if any(ranks.node == node and ranks.alive for ranks in self.ranks.values()) and self.halted_at is None:
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
                self.paused_s += self.loop.time() - self.stalled_since
                if self.begun:
                    self._plan()
                else:
                    self._meet()

    def _is_ready(self, ranks: Ranks) -> None:
        ranks.timer = None
        ranks.where = Where.READY
        self._meet()

    def _meet(self) -> None:
        """Begin if all ranks are ready."""
        all_started = len(self.ranks) == len(self.members)
        is_free = self.halted_at is None and not self.begun and not self.stalled
        if is_free and all_started and all(ranks.where is Where.READY for ranks in self.ranks.values()):
            self._begin()

    def _begin(self) -> None:
        if self.storage.away:
            self._tell_waiting()
            self.timers.append(self.loop.after(10.0, self._meet))
            return
        self.begun = True
        for ranks in self.ranks.values():
            ranks.where = Where.TRAINING
        self.resumed = self.storage.step or 0
        now = self.loop.time()
        self.first_at = now + self.script.load_s + self.script.first_step_s - self.paused_s
        self._plan()

    def _plan(self) -> None:
        """Set timers for what comes: the first step, reports, commits, the bug, the end."""
        assert self.first_at is not None
        now, script = self.loop.time(), self.script
        if self.resumed >= script.steps:
            self.timers.append(self.loop.after(script.load_s, self._finish))
            return
        if script.reports:
            resumed_at = self.first_at + self.paused_s - script.first_step_s
            if resumed_at >= now:
                self.timers.append(self.loop.at(resumed_at, self._tell_resumed))
            next_step = self.step + 1
            self.timers.append(self.loop.at(self.time_of(next_step), self._tell_progress, 1.0))
        first = max(now, self.first_at + self.paused_s)
        self.timers.append(self.loop.at(first + script.save_every_s, self._save))
        bug = script.bug
        if bug is not None and not bug.permanent and self._strikes(bug) and self.resumed < max(bug.step, 1):
            at = self.time_of(max(bug.step, self.resumed + 1))
            if at >= now:
                self.timers.append(self.loop.at(at, self._strike, bug))
        self.timers.append(self.loop.at(self.time_of(script.steps), self._finish))

    def _tell_resumed(self) -> None:
        self.figures.pace.note_report("resumed", self.loop.time())
        self.tell(self.members[0], {"kind": "resumed", "generation": self.generation, "step": self.resumed})

    def _tell_waiting(self) -> None:
        if self.script.reports:
            self.tell(self.members[0], {"kind": "waiting", "reason": "the storage"})

    def _tell_progress(self, every_s: float) -> None:
        self.figures.pace.note_report("progress", self.loop.time())
        self.tell(self.members[0], self._progress())
        self.timers.append(self.loop.after(every_s, self._tell_progress, every_s * 2))

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
            self._tell_waiting()
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
                told = {"generation": self.generation, "step": step, "committed": self.storage.commits}
                self.tell(self.members[0], {"kind": "committed", "url": "s3://b/run", "size_bytes": 1, **told})

    def _drained(self, on_drained: Callable[[], None]) -> None:
        if self.halted_at is not None or self.draining:
            return
        if self.storage.away:
            self.timers.append(self.loop.after(1.0, self._drained, on_drained))
            return
        self.draining = True
        self._commit(self.step)
        self.tell(self.members[0], self._progress())
        self.halt()
        on_drained()

    def _culprit(self, bug: Bug) -> str:
        return self.members[bug.rank % len(self.members)]

    def _strikes(self, bug: Bug) -> bool:
        return not bug.times or self.figures.strikes < bug.times

    def _strike(self, bug: Bug) -> None:
        """The bug: one worker's ranks fail, or hang."""
        culprit = self.ranks[self._culprit(bug)]
        if self.begun and self.script.reports:
            self.tell(self.members[0], self._progress())
        self.halt()
        self.figures.strikes += 1
        self.figures.own_failures[culprit.uid] = self.loop.time()
        if bug.fault is Fault.HANGS:
            self._look_for_hang(self.loop.time(), culprit.uid)
            return
        self.figures.count_hit()
        self._fail(culprit, Exit(bug.exit_code, 0.0, True, bug.error), closes_first=bug.closes_first)

    def _look_for_hang(self, since: float, culprit: str = "") -> None:
        """The ranks have stood still since then: launchers find out in time."""
        end_s = self.figures.pace.allowance().end_s
        if end_s is not None:
            self.loop.at(since + end_s, self._find_hang, since, culprit)

    def _find_hang(self, since: float, culprit: str) -> None:
        if since not in (self.halted_at, self.stalled_since if self.stalled else None):
            return
        waiting = [r for r in self.ranks.values() if r.where is Where.TRAINING and r.node not in self.stalled]
        if culprit and waiting:
            self.figures.count_hit()
        for ranks in waiting:
            ranks.on_hang(Exit(1, self.loop.time(), ranks.uid == culprit, STANDS_STILL))

    def _fail(self, ranks: Ranks, how: Exit, *, closes_first: bool = False) -> None:
        """They raise, tear down, and exit."""
        if not ranks.alive or ranks.where is Where.TEARING_DOWN:
            return
        self._cancel(ranks)
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
        for ranks in self.ranks.values():
            if ranks.where is Where.TRAINING and ranks.node not in self.stalled:
                lost = Exit(1, 0.0, False, LOST_PEER)
                self.loop.after(self.dice.uniform(0.02, 0.5), self._lose_peer, ranks, lost)

    def _lose_peer(self, ranks: Ranks, lost: Exit) -> None:
        if ranks.where is Where.TRAINING:
            self._fail(ranks, lost)

    def _finish(self) -> None:
        """The last step is done: a last save, then the first worker exports, and all exit with 0."""
        if self.storage.away:
            self.timers.append(self.loop.after(10.0, self._finish))
            return
        self._commit(self.script.steps)
        if self.script.reports and self.resumed < self.script.steps:
            self.tell(self.members[0], self._progress())
        self.halt()
        for number, uid in enumerate(self.members):
            ranks = self.ranks[uid]
            if ranks.where is Where.TRAINING:
                ranks.where, ranks.ends_as = Where.EXPORTING, Exit(0, 0.0)
                export_s = self.script.export_s if number == 0 else 0.0
                ranks.timer = self.loop.after(0.1 + export_s, self._exit, ranks)
                if self.script.reports:
                    self.tell(uid, {"kind": "finished", "generation": self.generation, "step": self.script.steps})

    def _cancel(self, ranks: Ranks) -> None:
        if ranks.timer is not None:
            ranks.timer.cancel()
            ranks.timer = None
