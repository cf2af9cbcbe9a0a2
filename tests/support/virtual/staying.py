"""Ranks that stay in their processes when the group changes: what a process holds, and how a group agrees on a state.

The real `elasticctl_train.inplace.newest_state.decide` decides who has the newest state, and who receives it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from elasticctl_train.inplace.newest_state import Standing, decide
from tests.support.virtual.clock import VirtualLoop

HANDOVER_S = 0.2
ALL_BUT_ONE_SHARE = 0.3
"""How often a loss strikes between the first and the last rank's end of a step."""


class Where(Enum):
    """What the ranks of one worker are doing."""

    IMPORTING = "importing"
    WAITING = "waiting"  # for a place in the next generation, in their process
    READY = "ready"  # they wait for those of their peers
    TRAINING = "training"
    EXPORTING = "exporting"
    TEARING_DOWN = "tearing down"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Exit:
    """How the ranks of a worker ended. `at` is in seconds since the scenario began; `own`: by an error of their own."""

    code: int
    at: float
    own: bool = False
    error: str = ""

    @property
    def of_peers(self) -> bool:
        return self.code != 0 and not self.own


@dataclass(eq=False, slots=True)
class Ranks:
    """The ranks of one worker, as one process; `on_exit`, `on_hang` and `on_lost` are its launcher's.

    `generation` is the newest that it has a place in; `attached`: it can be kept when that ends. `kept` is the step
    whose state it holds in memory (None: it has none), `warm`: it has made a step, so that its next one takes no longer
    than any other. `prepared`: it was started while a group trained without it.
    """

    uid: str
    node: str
    on_exit: Callable[[Exit], None]
    on_hang: Callable[[Exit], None]
    on_lost: Callable[[Exit], None] = lambda how: None
    where: Where = Where.IMPORTING
    ends_as: Exit | None = None
    timer: asyncio.TimerHandle | None = None
    generation: int = 0
    attached: bool = False
    kept: int | None = None
    warm: bool = False
    prepared: bool = False

    @property
    def alive(self) -> bool:
        return self.where is not Where.GONE

    @property
    def can_stay(self) -> bool:
        """Whether its launcher sees a process that is connected."""
        return self.alive and self.attached and self.where is not Where.EXPORTING

    def cancel(self) -> None:
        """What was about to happen does not."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def end(self) -> None:
        """The process is gone, without a group that could notice."""
        self.cancel()
        self.where = Where.GONE

    def prepare(self, loop: VirtualLoop, after_s: float, on_ready: Callable[[], None]) -> None:
        """Import and build while the group trains without it, until it needs a place."""

        def is_ready() -> None:
            self.timer, self.where, self.attached = None, Where.WAITING, True
            on_ready()

        self.prepared = True
        self.timer = loop.after(after_s, is_ready)


def vote(members: Sequence[Ranks]) -> tuple[int | None, bool]:
    """Return from which step in memory these continue (None: no rank has a state), and whether one receives it."""
    agreement = decide([Standing(ranks.kept or 0, has_state=ranks.kept is not None) for ranks in members])
    return (None if agreement.source is None else agreement.newest.step), bool(agreement.receivers)


def keep_state(members: Sequence[Ranks], step: int, *, warm: bool) -> None:
    """Training has ended with this step: those that train hold it."""
    for ranks in members:
        if ranks.where is Where.TRAINING:
            ranks.kept, ranks.warm = step, ranks.warm or warm


def tear(members: Sequence[Ranks], dice: random.Random) -> int:
    """A loss in the middle of a step: some may have made it, and others not. Returns the furthest step."""
    training = [ranks for ranks in members if ranks.where is Where.TRAINING and ranks.kept is not None]
    if training and dice.random() < ALL_BUT_ONE_SHARE:
        for ranks in dice.sample(training, dice.randint(1, len(training))):
            ranks.kept = (ranks.kept or 0) + 1
    return max((ranks.kept or 0 for ranks in training), default=0)
