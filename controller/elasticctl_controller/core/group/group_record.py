"""A job's training group: the owners of its data, and its state.

Each owner alone assigns its fields; those of what launchers and ranks report about themselves, apart from steps and
checkpoints (`core.history`), are here. What follows from an event is decided by functions over the whole record, in
`generations` and `newcomers`; `membership.Group` routes the events of agents and the controller to them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from elasticctl.api.observed.workers import is_member
from elasticctl.api.status import JobStatus
from elasticctl.api.usage import JobUsage, WorkerUsage
from elasticctl_controller.core.group.failures import Failures, GroupRules, RanksEnd
from elasticctl_controller.core.group.group_states import (
    BreakingGroup,
    DrainingGroup,
    FormingGroup,
    GroupEvent,
    GroupState,
    GroupWorld,
    ImpossibleGroupEvent,
    OverGroup,
    RestoredGroup,
    Situation,
    StartingGroup,
    TrainingGroup,
    transition,
)
from elasticctl_controller.core.group.members import Members, NextGeneration, RestoredService
from elasticctl_controller.core.group.signs_of_life import SignsOfLife
from elasticctl_controller.core.history import TrainingHistory
from elasticctl_controller.core.interruption_notices import Notices
from elasticctl_protocol.reports import RankPlace

SHOW_EVERY_S = 9.0
"""How often a job's status is updated with what workers use of their machines. Launchers measure every 10 s, so with
many workers there is a new report at any moment."""


@dataclass(slots=True)
class UsageReports:
    """The newest measurement of each worker, by uid."""

    newest: dict[str, WorkerUsage] = field(default_factory=dict)
    shown_at: float = -SHOW_EVERY_S

    def add_usage(self, uid: str, usage: WorkerUsage, now: float) -> bool:
        """Keep a worker's measurement; True if the job's status should be updated now."""
        is_due = uid not in self.newest or now >= self.shown_at + SHOW_EVERY_S
        self.newest[uid] = usage
        if is_due:
            self.shown_at = now
        return is_due

    def drop_absent(self, alive: Collection[str]) -> None:
        """Drop the measurements of workers that are not alive."""
        for uid in [uid for uid in self.newest if uid not in alive]:
            del self.newest[uid]

    def of_group(self, alive: Mapping[str, str]) -> JobUsage | None:
        """The usage of the live workers, in their order; None if there is no measurement of any."""
        found = [self.newest[uid] for uid in alive if uid in self.newest]
        return JobUsage.of(found) if found else None


@dataclass(slots=True)
class ScriptReports:
    """What ranks report about their script and their state.

    With `stays`, ranks stay in their processes when the group changes, so workers that have to start their ranks do
    that first. `examples` is what the others call their model with, for them to compile theirs. With
    `serves_commands`, workers have no ranks, but run what a launcher program on the first of them asks for: a change of
    the group stops nothing.

    `obstacle` is what ranks are waiting for, such as a storage that does not answer, and `unsaved` why they train
    without saving. `places` is where ranks stand that do not move, by rank.
    """

    stays: bool = False
    examples: str = ""
    serves_commands: bool = False
    obstacle: str = ""
    unsaved: str = ""
    places: dict[int, RankPlace] = field(default_factory=dict)

    @property
    def cannot_save(self) -> bool:
        """Would a stop now lose what has not been saved?"""
        return bool(self.obstacle or self.unsaved)

    def set_stays(self, stays: bool) -> None:
        """Ranks report whether they will stay in their processes."""
        self.stays = stays

    def introduce(self, *, stays: bool, serves_commands: bool) -> None:
        """A launcher reports what its ranks are; one report holds for the whole group."""
        self.stays |= stays
        self.serves_commands |= serves_commands

    def set_examples(self, examples: str) -> None:
        """Ranks report what they call their model with."""
        self.examples = examples

    def set_obstacle(self, obstacle: str, unsaved: str = "") -> None:
        """Ranks wait for something, or train without saving; both empty: neither any more."""
        self.obstacle, self.unsaved = obstacle, unsaved

    def clear_obstacle(self) -> None:
        """Ranks no longer wait."""
        self.obstacle = ""

    def set_place(self, rank: int, place: RankPlace | None) -> None:
        """A rank stands still at this place; None: it moves again."""
        self.places.pop(rank, None)
        if place is not None:
            self.places[rank] = place

    def start_generation(self) -> None:
        """A generation has formed: ranks that still wait, or stand still, report that again."""
        self.set_obstacle("")
        self.places.clear()


@dataclass(slots=True)
class GroupRecord:
    """The data of one job's group. `generation` is the number of the newest that has formed, as far as is known."""

    job_uid: str
    rules: GroupRules = GroupRules()
    situation: Situation = StartingGroup()
    generation: int = 0
    members: Members = field(default_factory=Members)
    next_generation: NextGeneration = field(default_factory=NextGeneration)
    failures: Failures = field(default_factory=Failures)
    signs: SignsOfLife = field(default_factory=SignsOfLife)
    restored_service: RestoredService = field(default_factory=RestoredService)
    reports: ScriptReports = field(default_factory=ScriptReports)
    usage: UsageReports = field(default_factory=UsageReports)
    notices: Notices = field(default_factory=Notices)
    history: TrainingHistory = field(default_factory=TrainingHistory)

    @classmethod
    def restored(cls, job_uid: str, status: JobStatus) -> Self:
        """The group as a restarted service knows it; its agents fill in the rest when they next call."""
        newest = status.generations[-1:]
        members = {w.uid for w in status.workers if w.cause is None and any(is_member(w, g) for g in newest)}
        stays = (known.stays for known in reversed(status.generations) if known.stays is not None)
        return cls(
            job_uid=job_uid,
            situation=RestoredGroup() if status.generation else StartingGroup(),
            generation=status.generation,
            restored_service=RestoredService(remembered=members, stored=status.generation),
            failures=Failures(count=status.failures_since_commit or 0),
            reports=ScriptReports(stays=next(stays, False)),
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
        return self.failures.hangs > 1

    def is_member(self, uid: str) -> bool:
        """True for a member of the formed generation."""
        return self.world is not None and uid in self.members.ranked

    def may_restart(self, end: RanksEnd) -> bool:
        """May the ranks restart? A script that has made a step can be imported, so an error of its import is not
        permanent."""
        if end.permanent and self.history.has_stepped:
            end = replace(end, permanent=False)
        return self.rules.allow_restart(end, self.failures.count)

    def set_rules(self, rules: GroupRules) -> None:
        """Set how the group is run."""
        self.rules = rules

    def know_generation(self, generation: int) -> None:
        """A generation of this number has formed, here or in a service before this one."""
        self.generation = max(self.generation, generation)

    def excuse_failure(self) -> None:
        """A member has been lost. That explains the failure of its peers, which then does not count, and the next
        attempt needs no pause."""
        self.restored_service.explain_unseen()
        if self.failures.excuse() and isinstance(self.situation, FormingGroup):
            self.situation = replace(self.situation, not_before=0.0)

    def advance(self, event: GroupEvent, now: float, reason: str = "", world: GroupWorld | None = None) -> None:
        """Enter the state that `transition` gives, and fill in its data; nothing changes if the event is ignored."""
        after = transition(self.state, event)
        if after is self.state:
            return
        world = world or self.world
        if after is GroupState.FORMING:
            pause_s = self.rules.pause_after(self.failures.count) if event is GroupEvent.FAILURE_JUDGED else 0.0
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
            self.restored_service.forget_members()
            self.members.set_ranked(world.members)
