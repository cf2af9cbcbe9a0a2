"""The data of a job's training group, and its state.

Agents and the controller report to `membership.Group`, which is such a record. What follows is decided by functions
over records, in `failures`, `silent_workers`, `newcomers` and `generations`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Self

from elasticctl.api.observed.hang_description import RankPlace
from elasticctl.api.observed.workers import is_member
from elasticctl.api.status import JobStatus
from elasticctl.api.usage import JobUsage, WorkerUsage
from elasticctl_controller.core.group.group_rules import GroupRules
from elasticctl_controller.core.group.group_states import (
    BreakingGroup,
    DrainingGroup,
    FormingGroup,
    GroupEvent,
    GroupState,
    GroupWorld,
    ImpossibleGroupEvent,
    Member,
    OverGroup,
    RestoredGroup,
    Situation,
    StartingGroup,
    TrainingGroup,
    transition,
)
from elasticctl_controller.core.group.root_cause import Judgement, RanksEnd
from elasticctl_controller.core.history import TrainingHistory
from elasticctl_controller.core.interruption_notices import Notices

ADOPT_S = 45.0
"""How long newcomers wait for a restarted service to hear from a group that may still be training: a launcher whose
connection has died without a sign calls again after 40 s."""

SHOW_EVERY_S = 9.0
"""How often a job's status shows anew what workers use of their machines. Launchers measure every 10 s, so with many
workers there is a new report at any moment."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A worker's newest sign of life: when (`at`), and what it is `doing` since when; in seconds since the epoch."""

    at: float
    doing: str = ""
    since: float = 0.0


@dataclass(slots=True)
class UsageReports:
    """The newest measurement of each worker, by uid."""

    newest: dict[str, WorkerUsage] = field(default_factory=dict)
    shown_at: float = -SHOW_EVERY_S

    def note(self, uid: str, usage: WorkerUsage, now: float) -> bool:
        """Keep a worker's measurement; True if the job's status should be updated now."""
        is_due = uid not in self.newest or now >= self.shown_at + SHOW_EVERY_S
        self.newest[uid] = usage
        if is_due:
            self.shown_at = now
        return is_due

    def keep(self, uids: Collection[str]) -> None:
        """Forget the measurements of all other workers."""
        for uid in [uid for uid in self.newest if uid not in uids]:
            del self.newest[uid]

    def of_group(self, alive: Mapping[str, str]) -> JobUsage | None:
        """The usage of the live workers, in their order; None if there is no measurement of any."""
        found = [self.newest[uid] for uid in alive if uid in self.newest]
        return JobUsage.of(found) if found else None


@dataclass(slots=True)
class GroupRecord:
    """The data of one job's group.

    The newest generation: `members` are its members by uid, in order of rank; `trained` those that have done its last
    step; `finished` those whose ranks have all succeeded, `terminated` those of them whose ranks somebody had sent
    SIGTERM; `ends` is how the ranks of others have ended. `places` is where ranks stand that do not move, by rank.
    `obstacle` is what ranks say they are waiting for, such as a storage that does not answer, and `unsaved` why they
    train without saving.

    The next generation: `joined` are the workers that are ready for it. `growth` is why newcomers that are ready are
    not admitted yet. `gone` are workers that have left although their pods are still ending; `overdue` those that were
    left out of the newest generation because they gave no `signs` of life, and `silent` those of them that are to be
    replaced. `unreachable` are workers whose connections have broken, each with the time from which on it counts as
    unreachable unless it calls again. `hung_up` is the last that closed its connection, and when.

    Failures: `failures` have been counted since the last checkpoint; `judged` is the newest of them until the next
    generation forms. `unexplained` is a generation that broke although every member that reported its end had lost a
    peer. `hangs` have ended generations since the last step.

    A restarted service: it knows the job since `known_at`. Until it hears who the `members` are, it has `remembered`:
    the uids of members in the status, and of members that have called. When it started, it knew nothing after the
    generation `stored`; `begun` is the first that it has formed or heard of (0: none yet), and `recalled` are the
    generations in between whose failures were reported to it. `unseen` is a generation that may have ended while there
    was no service.

    With `stays`, ranks stay in their processes when the group changes, so workers that have to start their ranks do
    that first (`preparing`) while the others train. `examples` tells them what the others call their model with, for
    them to compile theirs. With `serves_commands`, workers have no ranks, but run what a launcher program on the first
    of them asks for: a change of the group stops nothing.
    """

    job_uid: str
    rules: GroupRules = GroupRules()
    alive: Mapping[str, str] = field(default_factory=dict)
    leaving: frozenset[str] = frozenset()
    minimum: int = 1
    situation: Situation = StartingGroup()
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    joined: dict[str, Member] = field(default_factory=dict)
    first_join_at: float | None = None
    finished: set[str] = field(default_factory=set)
    terminated: set[str] = field(default_factory=set)
    trained: set[str] = field(default_factory=set)
    remembered: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    unreachable: dict[str, float] = field(default_factory=dict)
    hung_up: tuple[str, float] = ("", -math.inf)
    overdue: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    silenced_at: list[float] = field(default_factory=list)
    known_at: float | None = None
    signs: dict[str, Sign] = field(default_factory=dict)
    ends: dict[str, RanksEnd] = field(default_factory=dict)
    failures: int = 0
    hangs: int = 0
    judged: Judgement | None = None
    unseen: int = 0
    stored: int = 0
    begun: int = 0
    recalled: set[int] = field(default_factory=set)
    unexplained: int = 0
    growth: str = ""
    obstacle: str = ""
    unsaved: str = ""
    places: dict[int, RankPlace] = field(default_factory=dict)
    stays: bool = False
    preparing: set[str] = field(default_factory=set)
    examples: str = ""
    serves_commands: bool = False
    notices: Notices = field(default_factory=Notices)
    usage: UsageReports = field(default_factory=UsageReports)
    history: TrainingHistory = field(default_factory=TrainingHistory)

    @classmethod
    def restored(cls, job_uid: str, status: JobStatus) -> Self:
        """The group as a restarted service knows it; its agents fill in the rest when they next call."""
        newest = status.generations[-1:]
        return cls(
            job_uid=job_uid,
            situation=RestoredGroup() if status.generation else StartingGroup(),
            remembered={w.uid for w in status.workers if w.cause is None and any(is_member(w, g) for g in newest)},
            generation=status.generation,
            stored=status.generation,
            failures=status.failures_since_commit or 0,
            stays=next((known.stays for known in reversed(status.generations) if known.stays is not None), False),
            notices=Notices.restored(status.workers),
            history=TrainingHistory(
                list(status.generations), checkpoint=status.checkpoint, reports=status.progress.step is not None
            ),
        )

    @property
    def state(self) -> GroupState:
        """Where the group stands."""
        return self.situation.state

    @property
    def world(self) -> GroupWorld | None:
        """The formed generation; None while there is none."""
        formed = isinstance(self.situation, TrainingGroup | DrainingGroup | BreakingGroup)
        return self.situation.world if formed else None  # type: ignore[union-attr]

    @property
    def drain(self) -> DrainingGroup | None:
        """Why the group drains; None while it does not."""
        return self.situation if isinstance(self.situation, DrainingGroup) else None

    @property
    def reason(self) -> str:
        """Why there is no formed generation."""
        return self.situation.reason if isinstance(self.situation, FormingGroup) else "start"

    @property
    def is_deadlocked(self) -> bool:
        """Has the group hung twice without a step in between?

        Ranks that stay may wait in another collective than ranks that start from the beginning of the script, and these
        would then wait for them again in every next generation.
        """
        return self.hangs > 1

    def is_member(self, uid: str) -> bool:
        """True for a member of the formed generation."""
        return self.world is not None and uid in self.members

    def is_awaited(self, uid: str) -> bool:
        """Do the ranks of the other members wait for the ranks of this one?"""
        return uid in self.members and uid in self.alive and uid not in self.finished

    def advance(self, event: GroupEvent, now: float, reason: str = "", world: GroupWorld | None = None) -> None:
        """Enter the state that `transition` gives, and fill in its data; nothing changes if the event is ignored."""
        after = transition(self.state, event)
        if after is self.state:
            return
        world = world or self.world
        if after is GroupState.FORMING:
            pause_s = self.rules.pause_after(self.failures) if event is GroupEvent.FAILURE_JUDGED else 0.0
            self.situation = FormingGroup(now, reason, now + pause_s)
        elif after is GroupState.OVER:
            self.situation = OverGroup()
        elif world is None:
            raise ImpossibleGroupEvent(f"{event.value} while {self.state.value}, but no generation has formed")
        elif after is GroupState.DRAINING:
            self.situation = DrainingGroup(world, reason)
        elif after is GroupState.BREAKING:
            self.situation = BreakingGroup(world, now, self.drain.reason if self.drain else "")
        else:
            self.situation = TrainingGroup(world)
            self.remembered.clear()
            self.members = {member.uid: member for member in world.members}
