"""Who is in the training group of a job: a state machine without a clock, a thread or a socket.

A group that has *formed* trains as generation N. Otherwise its workers join generation N+1, which forms as soon as
every worker has joined that is alive and was in the last generation. It never waits for a worker that is still
starting, except before the first generation, where forming early would only mean forming twice. A group of automatic
size weighs what it costs to take newcomers in against what it gains; a group whose size somebody asked for takes them
in as they come.

A change that is known beforehand (a newcomer, a removal, a spot notice) makes the group *drain*: its ranks agree on a
step, commit it and stop, so that no step is lost. Draining has a deadline.

`transition` decides every pair of state and event; docs/state-machines.md shows the table. `Group` turns what agents
and the controller say into events, and holds the data of each state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import GroupGeneration, JobStatus, ProgressStatus
from elasticctl_controller.core.growth import decide_growth, measure_growth
from elasticctl_controller.core.history import TrainingHistory
from elasticctl_controller.core.workers import is_member

FIRST_SETTLE_S = 30.0
"""How long the first generation waits for workers that are alive but have not joined, once the minimum has joined."""
NEWCOMER_SETTLE_S = 2.0
"""How long a newcomer waits for others that are starting, so that they cost the group one re-forming, not several."""
FIRST_STEP_S = 20.0
"""How long newcomers leave a new generation alone that has not taken its first step: training comes first."""
REJOIN_S = 10.0
"""How long the others wait for a member that is alive but has not joined again."""
ADOPT_S = 45.0
"""How long newcomers wait for a restarted service to hear from a group that may still be training: a launcher whose
connection died silently asks again after 40 s."""
DRAIN_S = 10.0
"""How long members have to commit the step at which they agreed to stop, before the group re-forms without it."""
UNEXPLAINED_LIMIT = 3
"""Re-formings in a row without a step, a loss or a worker's own error, before the first worker to fail is blamed."""


class GroupState(Enum):
    """Where the group of a job stands."""

    STARTING = "starting"  # no generation has formed yet
    RESTORED = "restored"  # the service was restarted; the last generation may still be training
    FORMING = "forming"  # the last generation has ended; its members join the next
    TRAINING = "training"  # a generation has formed
    DRAINING = "draining"  # a generation has formed, and is about to stop at a commit


class GroupEvent(Enum):
    """What can happen to the group."""

    WORKER_JOINED = "worker joined"
    MEMBER_REJOINED = "member joined again"
    GROUP_REPORTED = "running group reported"
    MEMBER_LOST = "member lost"
    MEMBER_LEFT = "member left"
    MEMBER_FAILED = "member failed"
    MEMBER_FINISHED = "member finished"
    REMOVAL_ANNOUNCED = "removal announced"
    NEWCOMERS_DUE = "newcomers due"
    DRAIN_EXPIRED = "drain deadline passed"
    QUORUM_REACHED = "quorum reached"


class ImpossibleGroupEvent(Exception):
    """The event cannot happen in that state: a programming error."""


def transition(state: GroupState, event: GroupEvent) -> GroupState:
    """Return the state after `event`; the same state where the event is ignored. Raises ImpossibleGroupEvent."""
    after = _TRANSITIONS[event].get(state)
    if after is None:
        raise ImpossibleGroupEvent(f"{event.value} while {state.value}")
    return after


_STARTING, _RESTORED, _FORMING, _TRAINING, _DRAINING = GroupState
_UNCHANGED = {state: state for state in GroupState}
_TRANSITIONS: Mapping[GroupEvent, Mapping[GroupState, GroupState]] = {
    GroupEvent.WORKER_JOINED: _UNCHANGED,
    GroupEvent.MEMBER_REJOINED: dict.fromkeys(GroupState, _FORMING),
    GroupEvent.GROUP_REPORTED: _UNCHANGED | {_STARTING: _TRAINING, _RESTORED: _TRAINING},
    GroupEvent.MEMBER_LOST: _UNCHANGED | {_TRAINING: _FORMING, _DRAINING: _FORMING},
    GroupEvent.MEMBER_LEFT: _UNCHANGED | {_TRAINING: _FORMING, _DRAINING: _FORMING},
    GroupEvent.MEMBER_FAILED: _UNCHANGED | {_TRAINING: _FORMING, _DRAINING: _FORMING},
    GroupEvent.MEMBER_FINISHED: _UNCHANGED,
    GroupEvent.REMOVAL_ANNOUNCED: _UNCHANGED | {_TRAINING: _DRAINING},
    GroupEvent.NEWCOMERS_DUE: {_TRAINING: _DRAINING},
    GroupEvent.DRAIN_EXPIRED: {_DRAINING: _FORMING},
    GroupEvent.QUORUM_REACHED: {_STARTING: _TRAINING, _RESTORED: _TRAINING, _FORMING: _TRAINING},
}


@dataclass(frozen=True, slots=True)
class Member:
    """An agent as it introduced itself: the address of its store, and how many ranks (`slots`) it runs."""

    uid: str
    name: str
    host: str
    port: int
    slots: int


@dataclass(frozen=True, slots=True)
class GroupWorld:
    """A formed generation; `members` in order of group rank. The store of rank 0's agent serves it."""

    generation: int
    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class StartingGroup:
    """Data of the state STARTING."""

    state: ClassVar = GroupState.STARTING


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """`unheard`: the uids of the last generation's members that the restarted service has not heard from."""

    state: ClassVar = GroupState.RESTORED
    unheard: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class FormingGroup:
    """Since when (seconds since the epoch) there has been no formed generation, and why."""

    state: ClassVar = GroupState.FORMING
    since: float
    reason: str


@dataclass(frozen=True, slots=True)
class TrainingGroup:
    """The formed generation, and the uids of its members whose ranks have all succeeded."""

    state: ClassVar = GroupState.TRAINING
    world: GroupWorld
    finished: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class DrainingGroup:
    """A formed generation that is about to stop: why, and by when (seconds since the epoch)."""

    state: ClassVar = GroupState.DRAINING
    world: GroupWorld
    finished: frozenset[str]
    reason: str
    deadline: float


Situation = StartingGroup | RestoredGroup | FormingGroup | TrainingGroup | DrainingGroup


@dataclass(slots=True)
class Group:
    """The rendezvous of one job. Every method that can change it takes `now`, seconds since the epoch.

    `members` are those of the newest generation by uid, in order of rank; `joined` the workers that are ready for the
    next. `gone` have left though their pods still end; `silent` live but did not join again when the group re-formed.
    `growth` says why newcomers that are ready are not taken in yet.
    """

    job_uid: str
    automatic: bool = False
    alive: Mapping[str, str] = field(default_factory=dict)
    leaving: frozenset[str] = frozenset()
    minimum: int = 1
    situation: Situation = StartingGroup()
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    joined: dict[str, Member] = field(default_factory=dict)
    first_join_at: float | None = None
    gone: set[str] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    unexplained: int = 0
    blamed: str = ""
    growth: str = ""
    history: TrainingHistory = field(default_factory=TrainingHistory)

    @classmethod
    def restored(cls, job_uid: str, status: JobStatus) -> Group:
        """The group as a restarted service knows it: its agents fill in the rest when they next call."""
        newest = status.generations[-1:]
        unheard = (w.uid for w in status.workers if w.cause is None and any(is_member(w, g) for g in newest))
        return cls(
            job_uid=job_uid,
            situation=RestoredGroup(frozenset(unheard)) if status.generation else StartingGroup(),
            generation=status.generation,
            history=TrainingHistory(list(status.generations), checkpoint=status.checkpoint),
        )

    @property
    def state(self) -> GroupState:
        """Where the group stands."""
        return self.situation.state

    @property
    def world(self) -> GroupWorld | None:
        """The formed generation; None while there is none."""
        return self.situation.world if isinstance(self.situation, TrainingGroup | DrainingGroup) else None

    @property
    def drain(self) -> DrainingGroup | None:
        """Why the group drains, and until when; None while it does not."""
        return self.situation if isinstance(self.situation, DrainingGroup) else None

    @property
    def reason(self) -> str:
        """Why there is no formed generation."""
        return self.situation.reason if isinstance(self.situation, FormingGroup) else "start"

    @property
    def finished(self) -> frozenset[str]:
        """The uids of members of the formed generation whose ranks have all succeeded."""
        return self.situation.finished if isinstance(self.situation, TrainingGroup | DrainingGroup) else frozenset()

    def is_member(self, uid: str) -> bool:
        """True for a member of the formed generation."""
        return self.world is not None and uid in self.members

    def set_alive(
        self, alive: Mapping[str, str], minimum: int, now: float, leaving: frozenset[str] = frozenset()
    ) -> None:
        """Take over the controller's list of live workers (uid -> name); a member that is missing from it is lost.

        The workers in `leaving` have been told to stop: they are members until they are gone, but not of the next
        generation.
        """
        self.gone &= alive.keys()
        self.silent &= alive.keys()
        before, self.alive = self.alive, {uid: name for uid, name in alive.items() if uid not in self.gone}
        if any(uid in before and uid not in self.alive and self._explains(uid) for uid in self.members):
            self.unexplained = 0
        self.minimum, self.leaving = max(1, minimum), leaving
        for uid in [uid for uid in self.joined if uid not in self.alive or uid in leaving]:
            del self.joined[uid]
        self._check_for_losses(now)
        self.settle(now)

    def join(self, member: Member, generation: int, now: float) -> None:
        """An agent is ready for a generation after `generation`, the last it was in (0: none)."""
        if member.uid in self.leaving:
            return
        world = self.world
        if world is not None and member.uid in self.members:
            if generation < world.generation:
                return  # it does not know yet that it is in: the answer is the world
            reason = self.drain.reason if self.drain else f"{member.name} joins again"
            self._advance(GroupEvent.MEMBER_REJOINED, now, reason)
        elif world is None and generation:  # its group has ended, perhaps while this service was being restarted
            self._advance(GroupEvent.MEMBER_REJOINED, now, self.reason)
        else:
            self._advance(GroupEvent.WORKER_JOINED, now)
        self.generation = max(self.generation, generation)
        if not self.joined:
            self.first_join_at = now
        self.silent.discard(member.uid)
        self.joined[member.uid] = member
        self.settle(now)

    def adopts(self, generation: int) -> bool:
        """True for a restarted service that has not heard of the running generation yet."""
        known = transition(self.state, GroupEvent.GROUP_REPORTED) is self.state
        return not known and generation >= self.generation

    def adopt(self, world: GroupWorld, now: float) -> None:
        """A running agent reports its group to a restarted service: it keeps training undisturbed.

        A member may have been lost while there was no service; the others would wait for it in vain.
        """
        if not self.adopts(world.generation):
            return
        self._advance(GroupEvent.GROUP_REPORTED, now, world=world)
        self.generation = world.generation
        newest = self.history.newest
        if newest is None or newest.generation != world.generation:
            names = tuple(member.name for member in world.members)
            self.history.add(GroupGeneration(world.generation, names, "service restarted"))
        self._check_for_losses(now)

    def notice(self, uid: str, reason: str, now: float) -> None:
        """A member will have to stop soon: drain the group."""
        if uid in self.members and uid not in self.finished:
            self._advance(GroupEvent.REMOVAL_ANNOUNCED, now, reason)

    def leave(self, uid: str, reason: str, now: float) -> None:
        """An agent stops, or has to be left out; the others re-form."""
        self.joined.pop(uid, None)
        if uid in self.alive:
            self.gone.add(uid)
        self.alive = {other: name for other, name in self.alive.items() if other != uid}
        if uid in self.members and self._explains(uid):
            self.unexplained = 0
        if uid in self.members and uid not in self.finished:
            self._advance(GroupEvent.MEMBER_LEFT, now, self.drain.reason if self.drain else reason)
        self.settle(now)

    def finish(self, uid: str, now: float) -> bool:
        """An agent's ranks have all succeeded; True once that holds for every member that is still alive."""
        if uid in self.members:
            self._advance(GroupEvent.MEMBER_FINISHED, now)
            if isinstance(self.situation, TrainingGroup | DrainingGroup) and uid not in self.finished:
                self.situation = replace(self.situation, finished=self.finished | {uid})
        members = self.members if self.world is not None else ()
        return all(member in self.finished or member not in self.alive for member in members)

    def fail(self, uid: str, name: str, generation: int, *, of_peers: bool, now: float) -> bool:
        """Ranks of an agent failed; returns True when it is to blame, False when it should join again.

        `of_peers`: the error is one that the loss of a peer causes (a broken connection). The agent itself is blamed
        for it only when the group keeps failing like that although nobody was lost and no step was taken.
        """
        if self.world is None or generation != self.world.generation:
            return False  # its group has ended already, for another reason
        blamed = not of_peers
        if of_peers:
            self.unexplained += 1
            blamed = self.unexplained > UNEXPLAINED_LIMIT
        else:
            self.unexplained = 0
        self.blamed = uid if blamed else self.blamed
        self._advance(GroupEvent.MEMBER_FAILED, now, f"{name} failed" if blamed else f"{name} lost a connection")
        return blamed

    def settle(self, now: float) -> float | None:
        """End or form a generation if it is time; returns after how many seconds to call again (None: no need)."""
        if self.state is GroupState.TRAINING:
            return self._settle_newcomers(now)
        if self.drain is not None:
            if now < self.drain.deadline:
                return self.drain.deadline - now
            self._advance(GroupEvent.DRAIN_EXPIRED, now, self.drain.reason)
        if not self.joined or len(self.joined) < self.minimum:
            return None
        wait_s = self._wait_for_missing_s(now)
        if wait_s > 0:
            return wait_s
        self._form(now)
        return None

    def note_step(self, generation: int, progress: ProgressStatus, now: float) -> None:
        """A rank of that generation reports its progress."""
        if self.history.note_step(generation, progress, now):
            self.unexplained = 0

    def _advance(self, event: GroupEvent, now: float, reason: str = "", world: GroupWorld | None = None) -> None:
        """Go to the state that `transition` gives, and fill in its data; nothing changes where the event is ignored."""
        after = transition(self.state, event)
        if after is self.state:
            return
        if after is GroupState.FORMING:
            self.situation = FormingGroup(now, reason)
        elif after is GroupState.DRAINING and isinstance(self.situation, TrainingGroup):
            self.situation = DrainingGroup(self.situation.world, self.situation.finished, reason, now + DRAIN_S)
        elif after is GroupState.TRAINING and world is not None:
            self.situation = TrainingGroup(world)
            self.members = {member.uid: member for member in world.members}

    def _explains(self, uid: str) -> bool:
        """True if this member's end is what broke the others' connections, rather than a result of that."""
        return uid != self.blamed and uid not in self.finished

    def _check_for_losses(self, now: float) -> None:
        """End the generation if a member that has not finished is no longer alive."""
        lost = [m.name for uid, m in self.members.items() if uid not in self.alive and uid not in self.finished]
        if lost:
            self._advance(GroupEvent.MEMBER_LOST, now, f"lost {', '.join(lost)}")

    def _settle_newcomers(self, now: float) -> float | None:
        """Drain the group if newcomers are ready and it is time to take them in; returns when to ask again."""
        newcomers = [member.name for uid, member in self.joined.items() if uid not in self.members]
        before, self.growth = self.growth, ""
        if not newcomers or self.first_join_at is None:
            return None
        starting = [uid for uid in self.alive if uid not in self.joined and uid not in self.members]
        waits = [self.first_join_at + NEWCOMER_SETTLE_S - now] if starting and not self.automatic else []
        newest = self.history.newest
        if newest is not None and newest.first_step_at is None and newest.formed_at is not None:
            waits.append(newest.formed_at + FIRST_STEP_S - now)
        if max(waits, default=0.0) > 0:
            return max(waits)
        if self.automatic:
            measured = measure_growth(self.history.generations, self.history.rates, self.history.progress, now)
            verdict = decide_growth(
                replace(measured, ready=len(newcomers), coming=len(starting), ready_since=self.first_join_at), now
            )
            if not verdict.grow:
                self.growth = before or verdict.words  # the first words stay: the seconds left change all the time
                return None if verdict.again_at is None else max(0.0, verdict.again_at - now)
        self._advance(GroupEvent.NEWCOMERS_DUE, now, f"{', '.join(newcomers)} joined")
        return DRAIN_S

    def _wait_for_missing_s(self, now: float) -> float:
        """How much longer to wait for workers that are alive but have not joined; <= 0: not at all."""
        missing = (uid for uid in self.alive if uid not in self.joined and uid not in self.leaving)
        first = next(missing, None)  # in a large group almost every join ends here: build no list of all the others
        if first is None:
            return 0.0
        since = now if self.first_join_at is None else self.first_join_at
        if self.generation == 0:
            return since + FIRST_SETTLE_S - now
        if isinstance(self.situation, RestoredGroup):
            unheard = self.situation.unheard
            if any(uid in self.alive and uid not in self.joined and uid not in self.leaving for uid in unheard):
                return since + ADOPT_S - now  # only newcomers have called, and the last generation may be training
        if not self.members or first in self.members or any(uid in self.members for uid in missing):
            return (self.situation.since if isinstance(self.situation, FormingGroup) else since) + REJOIN_S - now
        return 0.0

    def _form(self, now: float) -> None:
        """Rank the members (survivors keep their order, newcomers follow by name) and start the generation.

        Members of the last generation that are alive but have not joined are `silent`: the controller replaces them.
        """
        self.silent |= self.members.keys() & self.alive.keys() - self.joined.keys() - self.leaving
        ranks = {uid: rank for rank, uid in enumerate(self.members)}
        members = sorted(self.joined.values(), key=lambda m: (ranks.get(m.uid, len(ranks)), len(m.name), m.name))
        opened_at = self.situation.since if isinstance(self.situation, FormingGroup) else self.first_join_at
        self.generation += 1
        self.history.add(
            GroupGeneration(
                generation=self.generation,
                workers=tuple(m.name for m in members),
                reason=self.reason,
                opened_at=Timestamp(now if opened_at is None else opened_at),
                formed_at=Timestamp(now),
            )
        )
        self._advance(GroupEvent.QUORUM_REACHED, now, world=GroupWorld(self.generation, tuple(members)))
        self.joined.clear()
        self.first_join_at = None
