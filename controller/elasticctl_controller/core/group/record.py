"""What is known of a job's training group, and in which state it is.

`membership.Group` is a record that agents and the controller tell what happens. What follows from it is decided in
functions over records: `failures`, `silence`, `newcomers` and `generations`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from elasticctl.api.observed.standstill import RankPlace
from elasticctl.api.observed.workers import is_member
from elasticctl.api.status import JobStatus
from elasticctl_controller.core.group.blame import GroupRules, Judgement, RanksEnd
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
from elasticctl_controller.core.history import TrainingHistory
from elasticctl_controller.core.notices import Notices
from elasticctl_controller.core.usage import UsageReports

ADOPT_S = 45.0
"""How long newcomers wait for a restarted service to hear from a group that may still be training: a launcher whose
connection died silently asks again after 40 s."""


@dataclass(frozen=True, slots=True)
class Sign:
    """The newest sign of life of a worker, and what it said it was doing since when; in seconds since the epoch."""

    at: float
    doing: str = ""
    since: float = 0.0


@dataclass(slots=True)
class GroupRecord:
    """The data of one job's group.

    `members` are those of the newest generation by uid, in order of rank; `trained` those who have done its last
    step; `finished` those whose ranks have all succeeded in it; `ends` how the ranks of others ended; `joined` the
    workers that are ready for the next. `gone` have left though their pods still end; `overdue` have been left out
    of the newest generation, for they gave no `signs` of life, and `silent` are those of them that are to be
    replaced. This service knows the job since `known_at`; one that was restarted has yet to hear who the `members`
    are, and until then has `remembered`: the uids of those that are stored, and of those that have called.
    `failures` have been counted since the last checkpoint; `judged` is the last of them, until the next generation
    forms. `unseen` is a generation that may have ended while there was no service; nothing that followed the
    generation `stored` was known when this service began, and `begun` is the first that it has formed or heard of
    while it ran (0: none yet). `recalled` are those in between of whose failures it was told. `unexplained` is one
    that broke, and all who told of it had lost a peer. `growth` says why newcomers that are ready are not taken in yet,
    `obstacle` what ranks say that they wait for, such as a storage that does not answer, and `unsaved` why they
    train on without saving; `places` are those of ranks that do not move, by rank.

    With `stays`, ranks go on in their processes when the group changes, so workers that have to start theirs do that
    first (`preparing`), and the others train meanwhile. With `serves_commands`, workers have no ranks but run what a
    launcher program on the first of them says: a change of the group stops nothing.
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
    trained: set[str] = field(default_factory=set)
    remembered: set[str] = field(default_factory=set)
    gone: set[str] = field(default_factory=set)
    unreachable: dict[str, float] = field(default_factory=dict)
    overdue: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    silenced_at: list[float] = field(default_factory=list)
    known_at: float | None = None
    signs: dict[str, Sign] = field(default_factory=dict)
    ends: dict[str, RanksEnd] = field(default_factory=dict)
    failures: int = 0
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
    serves_commands: bool = False
    notices: Notices = field(default_factory=Notices)
    usage: UsageReports = field(default_factory=UsageReports)
    history: TrainingHistory = field(default_factory=TrainingHistory)

    @classmethod
    def restored(cls, job_uid: str, status: JobStatus) -> Self:
        """The group as a restarted service knows it: its agents fill in the rest when they next call."""
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

    def is_member(self, uid: str) -> bool:
        """True for a member of the formed generation."""
        return self.world is not None and uid in self.members

    def is_awaited(self, uid: str) -> bool:
        """Do the other members' ranks wait for those of this one?"""
        return uid in self.members and uid in self.alive and uid not in self.finished

    def advance(self, event: GroupEvent, now: float, reason: str = "", world: GroupWorld | None = None) -> None:
        """Go to the state that `transition` gives, and fill in its data; nothing changes where the event is ignored."""
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
