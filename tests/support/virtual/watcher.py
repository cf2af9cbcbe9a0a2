"""Looks at a simulated job from time to time: does its status say what its ranks do?"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elasticctl.api.status import Phase
from tests.support.virtual.checks import BrokenPromise

if TYPE_CHECKING:
    from tests.support.virtual.script import Training
    from tests.support.virtual.world import World

LAG_S = 8.0
"""How long nothing may have changed for a status to be held against the truth."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What really is: the generation that trains, what it does, and how many workers run; `leaving` have to go."""

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

    def begin(self) -> None:
        """Look from now on."""
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
        """What really is; None if nothing simple can be said."""
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
        told = status.activity.doing if status.activity is not None else ""
        if told not in self._words(truth):
            raise BrokenPromise(f"status says {told!r}, but the ranks are {truth.doing}")
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
            return ("running", "starting", truth.doing)  # what was told while the API server was away is not stored
        if (
            truth.doing == "training"
            and world_forgot(self.world)
            and self.world.status.generations[-1].formed_at is None
        ):
            return ("running", truth.doing)  # no step has been told since
        return (truth.doing,)

    def check_moves(self) -> None:
        """Everything has been in order for long: steps have to be made."""
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
        """Have its workers made the last step and ended so short a time ago that the controller need not know yet?"""
        ended = [self.world.ledger.ended.get(uid) for uid in training.members]
        since = self.world.loop.time() - LAG_S
        return training.step == self.world.script.steps and all(at is not None and at > since for at in ended)

    def _is_busy(self, training: Training) -> bool:
        exporting = any(ranks.where.value == "exporting" for ranks in training.ranks.values())
        return (training.is_moving and training.has_stepped) or exporting


def world_forgot(world: World) -> bool:
    """Has the controller's process been restarted? Then ranks have told things that nobody knows any more."""
    return world.plane.starts > 1
