"""Who is in the training group of a job: a state machine without a clock, a thread or a socket.

A group that has *formed* trains as generation N. Otherwise its workers join generation N+1, which forms as soon as
every worker has joined that is alive and was in the last generation, however long its ranks take to stop: only one that
gives no sign of life is left out. It never waits for a worker that is still starting, except before the first
generation and after the loss of all members, where forming early would only mean forming twice.

Newcomers are taken in at a step boundary, once the group has trained for as long as the re-forming takes to pay for
itself (`growth`). A change that is known beforehand (a newcomer, a removal, a spot notice) makes the group *drain*: its
ranks agree on a step, commit it and stop, so that no step is lost. Who has to go but has time left trains on until its
place is taken (`notices`).

Ranks that fail *break* the generation. How the other members' ranks end is waited for, and then it is judged who is to
blame (`blame`); the ranks are started again, within the job's budget, unless a lost member explains the failure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.observed.standstill import RankPlace
from elasticctl.api.observed.workers import is_member
from elasticctl.api.status import GroupGeneration, JobStatus, ProgressStatus
from elasticctl_controller.core.group.blame import GroupRules, Judgement, RanksEnd, first_to_blame, with_evidence
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
from elasticctl_controller.core.group.growth import decide_growth, measure_growth, payback_s, stopped_share
from elasticctl_controller.core.history import TrainingHistory
from elasticctl_controller.core.notices import Notice, Notices, Replacements, lead_s, who_leaves
from elasticctl_controller.core.usage import UsageReports

FIRST_SETTLE_S = 30.0
"""How long the first generation, and one after the loss of all members, waits for workers that are alive but have not
joined, once the minimum has joined."""
NEWCOMER_SETTLE_S = 2.0
"""How long a newcomer waits for others that are starting, so that they cost the group one re-forming, not several; and
how long a script that reports nothing is left alone first, doubled with each time that newcomers have stopped it."""
LONGEST_SETTLE_S = 600.0
MOST_STOPPED = 0.5
"""The share of a group's time that newcomers may have stopped it for, and be let in without waiting until it pays."""
SILENT_S = 10.0
"""A worker that has given no sign of life for this long is not waited for: launchers give one every 3 s."""
UNREACHABLE_S = 0.5
"""How long a worker whose host has stopped answering may take to call again. Launchers call again at once."""
STILL_S, STILL_FACTOR = 2.0, 2.0
"""No step for this long, and for so many times the longest that two reports of steps were apart: it stands still."""
SILENT_SHARE_PER_MIN = 0.1
"""The share of a group that may be deleted as silent within a minute; at least one worker."""
ADOPT_S = 45.0
"""How long newcomers wait for a restarted service to hear from a group that may still be training: a launcher whose
connection died silently asks again after 40 s."""
VICTIMS_S, CULPRIT_S, LAST_CALL_S = 10.0, 1.0, 2 * ADOPT_S
"""How long the ends of the other members' ranks are waited for: after broken connections, which somebody has caused
(four times as long with each such failure in a row), and after an error of one's own. If broken connections would end
the job, at least so long that a launcher whose report was lost has reported twice more."""
STARTED_S = 30.0
"""By then ranks that report nothing have started; those that do, with their first step."""
_JOINED = " joined"
"""The end of the reason of a generation that newcomers have caused."""
EXPORTING, FINISHING = "exporting", "finishing"
"""What a launcher says while ranks that have done the last step still run, and once they have exited with 0."""
_BEFORE_THE_LAST_STEP = ("preparing", "waiting", "starting", "running", "draining")


@dataclass(frozen=True, slots=True)
class Sign:
    """The newest sign of life of a worker, and what it said it was doing since when; in seconds since the epoch."""

    at: float
    doing: str = ""
    since: float = 0.0


@dataclass(slots=True)
class Group:
    """The rendezvous of one job. Every method that can change it takes `now`, seconds since the epoch.

    `members` are those of the newest generation by uid, in order of rank; `trained` those who have done its last
    step; `finished` those whose ranks have all succeeded in it; `ends` how the ranks of others ended; `joined` the
    workers that are ready for the next. `gone` have left though their pods still end; `overdue` have been left out
    of the newest generation, for they gave no `signs` of life, and `silent` are those of them that are to be
    replaced. This service knows the job since `known_at`; one that was restarted has yet to hear who the `members`
    are, and until then has `remembered`: the uids of those that are stored, and of those that have called.
    `failures` have been counted since the last checkpoint; `judged` is the last of them, until the next generation
    forms. `unseen` is a generation that may have ended while there was no service, `unexplained` one that broke,
    and all who told of it had lost a peer. `growth` says why newcomers that are ready are not taken in yet,
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
    def restored(cls, job_uid: str, status: JobStatus) -> Group:
        """The group as a restarted service knows it: its agents fill in the rest when they next call."""
        newest = status.generations[-1:]
        return cls(
            job_uid=job_uid,
            situation=RestoredGroup() if status.generation else StartingGroup(),
            remembered={w.uid for w in status.workers if w.cause is None and any(is_member(w, g) for g in newest)},
            generation=status.generation,
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

    def set_alive(
        self, alive: Mapping[str, str], minimum: int, now: float, leaving: frozenset[str] = frozenset()
    ) -> None:
        """Take over the controller's list of live workers (uid -> name); a member that is missing from it is lost.

        The workers in `leaving` have been told to stop: they are members until they are gone, but not of the next
        generation.
        """
        self.known_at = now if self.known_at is None else self.known_at
        for uids in (self.gone, self.silent, self.overdue, self.preparing, self.trained):
            uids.intersection_update(alive)
        self.notices.keep(alive.keys())
        self.usage.keep(alive.keys())
        for known in (self.signs, self.unreachable):
            for uid in known.keys() - alive.keys():
                del known[uid]
        before, self.alive = self.alive, {uid: name for uid, name in alive.items() if uid not in self.gone}
        self.minimum, self.leaving = max(1, minimum), leaving | self.notices.departing
        for uid in [uid for uid in self.joined if uid not in self.alive or uid in self.leaving]:
            del self.joined[uid]
        if any(uid in before and uid not in self.alive and uid not in self.finished for uid in self.members):
            self._excuse_failure()
        self._check_for_losses(now)
        self.settle(now)

    def note_sign(self, uid: str, now: float, doing: str = "", for_s: float = 0.0) -> bool:
        """A worker has called, which has been `doing` something for so long; True if that is something new."""
        if uid not in self.alive:
            return False
        self.unreachable.pop(uid, None)
        before = self.signs.get(uid)
        doing = doing or (before.doing if before else "")
        is_new = before is None or before.doing != doing
        self.signs[uid] = Sign(now, doing, now - for_s if is_new or before is None else before.since)
        if doing in (EXPORTING, FINISHING) and uid in self.members:
            self.trained.add(uid)  # it may hang or stop after that
        elif doing in _BEFORE_THE_LAST_STEP:
            self.trained.discard(uid)
        return is_new

    def lose_touch(self, uid: str, now: float) -> None:
        """A worker's host no longer answers: it is gone, or the network between it and this service is broken.

        It did until a moment ago, though its last call may be longer ago than that.
        """
        if uid in self.alive and uid not in self.unreachable:
            self.note_sign(uid, now)
            self.unreachable[uid] = now
            self.settle(now)

    def join(
        self, member: Member, generation: int, now: float, *, stay: bool = False, serves_commands: bool = False
    ) -> None:
        """An agent is ready for a generation after `generation`, the last it was in (0: none).

        `stay`: its ranks go on in their processes. `serves_commands`: it has none.
        """
        if member.uid in self.leaving or self.state is GroupState.OVER:
            return
        self.note_sign(member.uid, now)
        self._note_unseen(generation)
        self.stays |= stay
        self.serves_commands |= serves_commands
        if generation and not self.members:
            self.remembered.add(member.uid)
        world = self.world
        if world is not None and member.uid in self.members:
            if generation < world.generation:
                return  # it does not know yet that it is in: the answer is the world
            if any(not end.of_peers for end in self.ends.values()):
                self._judge(now)
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
        self.overdue.discard(member.uid)
        self.preparing.discard(member.uid)
        self.finished.discard(member.uid)
        self.joined[member.uid] = member
        self.settle(now)

    def has_to_prepare(self, member: Member, generation: int, now: float) -> bool:
        """An agent whose ranks do not run wants to join: is it to start them first, while the others train?"""
        known = itertools.chain(self.members, self.remembered)
        others = (uid for uid in known if uid != member.uid and uid in self.alive)
        if not self.stays or member.uid in self.leaving or self.state is GroupState.OVER or not any(others):
            return False
        if self.world is not None and member.uid in self.members:
            if generation < self.world.generation:
                return False  # it does not know yet that it is in
            self._advance(GroupEvent.MEMBER_REJOINED, now, f"{member.name} starts again")
        self.note_sign(member.uid, now)
        self.joined.pop(member.uid, None)
        if not self._failed_by_itself(member.uid):
            self.preparing.add(member.uid)
        self.settle(now)
        return True

    def ranks_of_others(self, member: Member) -> int:
        """How many ranks the others have; those that a restarted service has not heard of have as many as this one."""
        return sum(each.slots for each in self.members.values()) + len(self.remembered - {member.uid}) * member.slots

    def _failed_by_itself(self, uid: str) -> bool:
        """Is this the member to blame for the last failure, with an error and not a kill?

        The others wait for it: a script that cannot run at this size must not be seen to succeed at a smaller one.
        """
        return self.judged is not None and self.judged.end.uid == uid and not self.judged.end.failure.signal

    def adopts(self, generation: int) -> bool:
        """True for a restarted service that has not heard of the running generation yet."""
        known = transition(self.state, GroupEvent.GROUP_REPORTED) is self.state
        return not known and generation >= self.generation

    def adopt(self, world: GroupWorld, now: float, *, stay: bool = False, serves_commands: bool = False) -> None:
        """A running agent reports its group to a restarted service: it keeps training undisturbed.

        `stay` and `serves_commands` as in `join`. A member may have been lost while there was
        no service; the others would wait for it in vain.
        """
        if not self.adopts(world.generation):
            return
        self._advance(GroupEvent.GROUP_REPORTED, now, world=world)
        self.generation, self.obstacle, self.unsaved = world.generation, "", ""  # ranks that still wait say so again
        self.stays |= stay
        self.serves_commands |= serves_commands
        newest = self.history.newest
        if newest is None or newest.generation != world.generation:
            names = tuple(member.name for member in world.members)
            self.history.add(GroupGeneration(world.generation, names, "service restarted"))
        self._check_for_losses(now)

    def notice(self, uid: str, reason: str, now: float) -> None:
        """A member has to stop now: drain the group."""
        if uid in self.members and uid not in self.finished:
            self._let_go((uid,), reason, now)

    def warn(self, uid: str, notice: Notice, now: float) -> None:
        """A launcher says that its worker will have to go: it leaves when its place is taken, or in time."""
        if uid in self.alive:
            self.notices.told[uid] = notice
            self.settle(now)

    def stay_s(self, uid: str, now: float) -> float:
        """How long a worker that has to go may stay, if nobody takes its place before; 0: it leaves now."""
        notice = self.notices.of(uid)
        if self.state is not GroupState.TRAINING or notice is None or uid not in self.notices.held(self.members):
            return 0.0
        if uid in self.leaving and uid not in self.notices.given:
            return 0.0  # it is the controller that removes it
        return max(0.0, notice.leave_at(self._lead_s()) - now)

    def leave(self, uid: str, reason: str, now: float) -> None:
        """An agent stops, or has to be left out; the others re-form."""
        self.joined.pop(uid, None)
        if uid in self.alive:
            self.gone.add(uid)
        self.alive = {other: name for other, name in self.alive.items() if other != uid}
        if uid in self.members and uid not in self.finished:
            self._excuse_failure()
            self._advance(GroupEvent.MEMBER_LEFT, now, self.drain.reason if self.drain else reason)
        self.settle(now)

    def finish(self, uid: str, generation: int, now: float, *, for_all: bool = False) -> None:
        """All ranks of an agent have succeeded. Once that holds for every member, or for one that speaks `for_all`,
        the group is over.
        """
        self._advance(GroupEvent.MEMBER_FINISHED, now)
        known = set(self.members) if self.world is not None else set()
        if self.state is GroupState.RESTORED:
            known = set(self.remembered)
        if uid not in known or generation != self.generation:
            return
        self.finished |= known if for_all else {uid}
        if known <= self.finished:
            self._advance(GroupEvent.ALL_FINISHED, now)
        self.settle(now)

    def fail(self, end: RanksEnd, generation: int, now: float) -> None:
        """Ranks of an agent have failed in `generation`; `verdict` says what it is to do then.

        One who was slower to end than the judgement, perhaps because it was cleaning up, may turn out to be to blame.
        """
        self._note_unseen(generation)
        if self.world is not None and generation == self.world.generation and end.uid in self.members:
            self.ends[end.uid] = first_to_blame((self.ends.get(end.uid, end), end))
            self._advance(GroupEvent.MEMBER_FAILED, now)
            self.settle(now)
        elif self.judged is not None and self.judged.generation == generation:
            found = self.judged.end if self.judged.exits else first_to_blame((self.judged.end, end))
            self.judged = replace(self.judged, end=found, exits=self.judged.exits or not self._may_restart(found))
        elif (
            self.world is None
            and generation == self.unseen
            and end.uid in self.alive
            and not (end.of_peers or self._unheard_beside(end))
        ):
            self.failures += 1  # it broke while there was no service; who else was lost then, nobody can tell
            self.judged = Judgement(generation, end, exits=not self._may_restart(end))

    def recall(self, end: RanksEnd, generation: int, now: float) -> None:
        """A member that joins again says why: its failure counts if it was judged by a service that could not store it.

        That service has let it join again, so this one does too.
        """
        self._note_unseen(generation)
        if generation and generation == self.unseen:
            self.fail(end, generation, now)
            self.judged = None if self.judged is None else replace(self.judged, exits=False)

    def _note_unseen(self, generation: int) -> None:
        """A member of this generation calls; it may have ended while there was no service."""
        if self.adopts(generation):
            self.unseen = generation

    def verdict(self, uid: str, generation: int) -> str:
        """What an agent whose ranks failed is to do: "exit" or "rejoin"; "" while that is not decided."""
        if self.state is GroupState.BREAKING and generation == self.generation:
            return ""
        judged = self.judged
        exits = judged is not None and judged.exits and (judged.generation, judged.end.uid) == (generation, uid)
        return "exit" if exits else "rejoin"

    def error_of(self, uid: str, generation: int) -> str:
        """What was found about this member's failure, if that is to blame for the end of `generation`; else empty."""
        judged = self.judged
        found = judged is not None and (judged.generation, judged.end.uid) == (generation, uid)
        return judged.end.failure.error if judged is not None and found else ""

    def is_excused(self, uid: str, generation: int) -> bool:
        """Was somebody else lost, or found to be to blame, when `generation`, the newest, broke?"""
        if generation != self.generation:
            return False
        if self.judged is not None:
            return self.judged.generation == generation and self.judged.end.uid != uid
        return any(other not in self.alive for other in self.members if other != uid and other not in self.finished)

    def settle(self, now: float) -> float | None:
        """End or form a generation if it is time; returns after how many seconds to call again (None: no need)."""
        waits = (self._settle_generation(now), self._silence(now))
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def _settle_generation(self, now: float) -> float | None:
        if self.world is not None:
            again_s = self._settle_formed(now)
            if self.world is not None:
                return again_s
        if self.state is GroupState.OVER or not self.joined or self._awaits_exit():
            return None
        if len(self.joined) < self.minimum:
            return self._settle_silent(now)
        wait_s = self._wait_for_missing_s(now)
        if wait_s > 0:
            return wait_s
        self._form(now)
        return None

    def _settle_formed(self, now: float) -> float | None:
        """End the formed generation if it is time; returns when to ask again."""
        waits = [self._settle_unreachable(now)]
        if self.state is GroupState.TRAINING:
            waits.append(self._settle_notices(now))
        if self.state is GroupState.TRAINING:
            waits.append(self._settle_newcomers(now))
        elif isinstance(self.situation, BreakingGroup):
            wait_s = self._wait_for_ends_s(self.situation, now)
            if wait_s <= 0:
                self._judge(now)
            waits.append(wait_s)
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def note_step(self, generation: int, progress: ProgressStatus, now: float) -> None:
        """A rank of that generation reports its progress."""
        self.history.note_step(generation, progress, now)

    def note_commit(
        self, generation: int, number: int, step: int, url: str, size_bytes: int, duration_s: float, now: float
    ) -> None:
        """A generation has committed a checkpoint: one of a newer step than any before refills the restart budget."""
        before = self.history.checkpoint.step
        self.history.note_commit(generation, number, step, url, size_bytes, duration_s, now)
        if before is None or step > before:
            self.failures = 0

    def _advance(self, event: GroupEvent, now: float, reason: str = "", world: GroupWorld | None = None) -> None:
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

    def _check_for_losses(self, now: float) -> None:
        """End the generation if a member that has not finished is no longer alive."""
        lost = [m.name for uid, m in self.members.items() if uid not in self.alive and uid not in self.finished]
        if lost:
            self._advance(GroupEvent.MEMBER_LOST, now, f"lost {', '.join(lost)}")

    # Members that cannot be reached

    def _settle_unreachable(self, now: float) -> float | None:
        """End a generation that stands still while a member is unreachable; returns when to ask again.

        Either alone proves nothing: ranks that reach each other train on without this service, and steps may be long.
        """
        lost = {uid: since for uid, since in self.unreachable.items() if self._is_awaited(uid)}
        if not lost or all(uid in lost for uid in self.members if self._is_awaited(uid)):
            return None
        due = max(min(lost.values()) + UNREACHABLE_S, self._still_at())
        if due > now:
            return None if due == math.inf else due - now
        names = ", ".join(member.name for uid, member in self.members.items() if uid in lost)
        self._excuse_failure()
        self._advance(GroupEvent.MEMBER_LOST, now, f"cannot reach {names}")
        return None

    def _is_awaited(self, uid: str) -> bool:
        """Do the other members' ranks wait for those of this one?"""
        return uid in self.members and uid in self.alive and uid not in self.finished

    def _still_at(self) -> float:
        """From when on it is known that no step is made (seconds since the epoch); infinite: not yet."""
        if self.places:
            return 0.0
        if isinstance(self.situation, BreakingGroup) and all(end.of_peers for end in self.ends.values()):
            return 0.0
        known = self.history
        if known.stepped_at is None or self.obstacle or self.unsaved:
            return math.inf
        return known.stepped_at + max(STILL_S, STILL_FACTOR * known.longest_step_s)

    def _settle_silent(self, now: float) -> float | None:
        """Have silent members replaced without which the group is too small; returns when to ask again.

        One whose host may still answer is given the time in which a launcher gives up a poll whose answer was lost.
        """
        if not isinstance(self.situation, FormingGroup):
            return None
        waits = []
        for uid in self.members:
            if uid in self.alive and uid not in self.joined and uid not in self.leaving | self.preparing | self.overdue:
                left_s = self._silent_at(uid, self.situation.since) - now
                left_s += 0.0 if uid in self.unreachable else ADOPT_S - SILENT_S
                if left_s > 0:
                    waits.append(left_s)
                else:
                    self.overdue.add(uid)
        return min(waits, default=None)

    def _silent_at(self, uid: str, since: float) -> float:
        """From when on a worker is silent that is waited for since then, if it does not call before."""
        return max(since, self.signs[uid].at if uid in self.signs else since) + SILENT_S

    # Members that have to go

    def _let_go(self, uids: Collection[str], reason: str, now: float) -> None:
        self.notices.depart(uids)
        self.leaving |= self.notices.departing
        self._advance(GroupEvent.REMOVAL_ANNOUNCED, now, reason)

    def _settle_notices(self, now: float) -> float | None:
        """Drain the group once the places of members that have to go are taken, or their time is up; returns when to
        ask again.
        """
        held = self.notices.held(uid for uid in self.members if self._is_awaited(uid))
        if not held:
            return None
        others, started_at = Replacements(), self._started_at()
        if started_at <= now and not (self.obstacle or self.unsaved or self.trained):
            ready = sum(uid not in self.members for uid in self.joined) + self.notices.replaced
            known = self.joined.keys() | self.members.keys() | self.leaving
            others = Replacements(ready, any(uid not in known for uid in self.alive), self.first_join_at)
        leaving, again_at = who_leaves(held, others, self._lead_s(), now)
        if leaving:
            reasons = {held[uid].reason for uid in leaving}
            names = ", ".join(self.members[uid].name for uid in leaving)
            have = "has" if len(leaving) == 1 else "have"
            self._let_go(leaving, f"{names} {have} to stop: {'; '.join(sorted(reasons))}", now)
        again_at = min(again_at, started_at if started_at > now else math.inf)
        return None if again_at == math.inf else max(0.0, again_at - now)

    def _lead_s(self) -> float:
        return lead_s(self.history.longest_step_s, self.history.checkpoint.duration_s or 0.0)

    def _started_at(self) -> float:
        """When the ranks of this generation had started (seconds since the epoch), by their first step if they report
        any; infinite: not yet. Before that, stopping them gains nothing.
        """
        newest = self.history.newest
        if newest is None or newest.formed_at is None or newest.first_step_at is not None:
            return 0.0
        return math.inf if self.history.reports else newest.formed_at + STARTED_S

    # A broken generation

    def _wait_for_ends_s(self, broken: BreakingGroup, now: float) -> float:
        """How much longer to wait for the ends of the other members' ranks; <= 0: not at all."""
        if all(uid in self.ends or uid in self.finished or uid not in self.alive for uid in self.members):
            return 0.0
        end = first_to_blame(self.ends.values())
        patience_s = VICTIMS_S * 4.0 ** min(self.failures, 10) if end.of_peers else CULPRIT_S
        if end.of_peers and not broken.drain and not self.rules.allow_restart(end, self.failures + 1):
            patience_s = max(patience_s, LAST_CALL_S)
        return broken.since + patience_s - now

    def _judge(self, now: float) -> None:
        """Find who is to blame, and count the failure."""
        end = first_to_blame(self.ends.values())
        if end.of_peers and isinstance(self.situation, BreakingGroup) and self.situation.drain:
            self._advance(GroupEvent.MEMBER_LEFT, now, self.situation.drain)  # who has stopped for it has hung up
            return
        unheard = self._unheard_beside(end)
        if unheard:
            names = ", ".join(member.name for uid, member in self.members.items() if uid in unheard)
            self._advance(GroupEvent.MEMBER_LEFT, now, f"hung while nobody could hear {names}")
            return
        finished = [member.name for uid, member in self.members.items() if uid in self.finished]
        end = with_evidence(end, finished, self._places_beside(end.uid))
        explains = 0 if end.of_peers or self._has_begun() else self.unexplained
        self.failures += not explains
        self.judged = Judgement(self.generation, end, exits=not self._may_restart(end), explains=explains)
        self._advance(GroupEvent.FAILURE_JUDGED, now, f"{end.name} {'lost a connection' if end.of_peers else 'failed'}")

    def _places_beside(self, uid: str) -> dict[int, RankPlace]:
        """The places of ranks that do not move, without those of this member."""
        first = 0
        for member in self.members.values():
            if member.uid == uid:
                return {rank: at for rank, at in self.places.items() if not first <= rank < first + member.slots}
            first += member.slots
        return self.places

    def _unheard_beside(self, end: RanksEnd) -> set[str]:
        """If this is a hang: those of whom nothing was heard then, because no service ran.

        A machine that is cut off looks like a hang to its peers, so such a hang is nobody's failure.
        """
        others = {uid for uid in (*self.members, *self.remembered) if uid != end.uid and uid in self.alive}
        if not end.failure.is_hang or self.known_at is None:
            return set()
        return others - self.finished - (set() if end.at < self.known_at else self.signs.keys())

    def _has_begun(self) -> bool:
        """Have the ranks of the newest generation met?"""
        newest = self.history.newest
        return newest is not None and (newest.resumed_step is not None or newest.first_step_at is not None)

    def _may_restart(self, end: RanksEnd) -> bool:
        """A script that has made a step can be imported: where it cannot be now, something else is wrong."""
        if end.permanent and self.history.has_stepped:
            end = replace(end, permanent=False)
        return self.rules.allow_restart(end, self.failures)

    def _excuse_failure(self) -> None:
        """A member has been lost: that explains the failure of its peers, and it does not count."""
        self.unseen = 0
        if self.judged is not None and not self.judged.exits:
            self.failures = max(0, self.failures - (not self.judged.explains))
            self.judged = None
            if isinstance(self.situation, FormingGroup):
                self.situation = replace(self.situation, not_before=0.0)

    def _awaits_exit(self) -> bool:
        """True while the worker to blame ends, and the job with it: until the controller sends another in its place.

        It sends none where there are enough without it.
        """
        if self.judged is None or not self.judged.exits or any(uid not in self.members for uid in self.joined):
            return False
        stay = self.alive.keys() - self.leaving
        return self.judged.end.uid in self.alive or len(stay) < self.rules.desired or not stay <= self.members.keys()

    # The next generation

    def _settle_newcomers(self, now: float) -> float | None:
        """Drain the group if newcomers are ready and it is time to take them in; returns when to ask again."""
        newcomers = [member.name for uid, member in self.joined.items() if uid not in self.members]
        before, self.growth = self.growth, ""
        if not newcomers or self.first_join_at is None:
            return None
        if self.trained:
            self.growth = "training is done"
            return None
        if self.obstacle or self.unsaved:
            self.growth = "the storage does not answer, so what has not been saved would be lost"
            return None
        if self.notices.held(self.members):
            self.growth = "newcomers take the places of workers that have to go"
            return None
        starting = [uid for uid in self.alive if uid not in self.joined and uid not in self.members]
        waits = [self.first_join_at + NEWCOMER_SETTLE_S] if starting and not self.rules.automatic else []
        waits.append(self._pays_at(len(newcomers), bool(starting), now))
        if max(waits) > now:
            self.growth = before or "newcomers wait until the group has trained long enough for stopping it to pay"
            return None if max(waits) == math.inf else max(waits) - now
        if self.rules.automatic and not self.serves_commands:
            measured = measure_growth(self.history.generations, self.history.rates, self.history.progress, now)
            verdict = decide_growth(
                replace(measured, ready=len(newcomers), coming=len(starting), ready_since=self.first_join_at), now
            )
            if not verdict.grow:
                self.growth = before or verdict.words  # the first words stay: the seconds left change all the time
                return None if verdict.again_at is None else max(0.0, verdict.again_at - now)
        self._advance(GroupEvent.NEWCOMERS_DUE, now, f"{', '.join(newcomers)}{_JOINED}")
        return None

    def _pays_at(self, newcomers: int, more_to_come: bool, now: float) -> float:
        """From when on stopping the group for newcomers pays (seconds since the epoch); infinite: not before a step.

        If no more are to come, it is done at once, unless newcomers have stopped the group for much of its time.
        """
        newest = self.history.newest
        if newest is None or newest.formed_at is None or self.serves_commands:
            return 0.0
        if self.history.reports:
            if newest.first_step_at is None:
                return math.inf
            if not more_to_come and stopped_share(self.history.generations, _JOINED, now) <= MOST_STOPPED:
                return 0.0
            return newest.first_step_at + payback_s(self.history.generations, newcomers, self.history.rates)
        by_newcomers = (item.reason.endswith(_JOINED) for item in reversed(self.history.generations))
        in_a_row = sum(1 for _ in itertools.takewhile(bool, by_newcomers))
        return newest.formed_at + min(LONGEST_SETTLE_S, NEWCOMER_SETTLE_S * 2.0**in_a_row)

    def _wait_for_missing_s(self, now: float) -> float:
        """How much longer to wait for workers that are alive but have not joined; <= 0: not at all."""
        pause_s = self.situation.not_before - now if isinstance(self.situation, FormingGroup) else 0.0
        absent = self.leaving | self.preparing
        missing = (uid for uid in self.alive if uid not in self.joined and uid not in absent)
        first = next(missing, None)  # in a large group almost every join ends here: build no list of all the others
        if first is None:
            return pause_s
        joined_at = now if self.first_join_at is None else self.first_join_at
        if self.generation == 0 or (self.members and not any(uid in self.alive for uid in self.members)):
            return max(pause_s, joined_at + FIRST_SETTLE_S - now)
        if (
            self.state is GroupState.RESTORED
            and self.remembered & self.alive.keys() - self.joined.keys() - self.leaving
        ):
            return joined_at + ADOPT_S - now  # only newcomers have called, and the last generation may be training
        since = self.situation.since if isinstance(self.situation, FormingGroup) else joined_at
        for uid in itertools.chain((first,), missing):
            if uid in self.members or not self.members:
                silent_at = self._silent_at(uid, since)
                if uid in self.unreachable:
                    silent_at = min(silent_at, self.unreachable[uid] + UNREACHABLE_S)
                if silent_at > now:
                    return max(pause_s, silent_at - now)
        return pause_s

    def _form(self, now: float) -> None:
        """Rank the members (survivors keep their order, newcomers follow by name) and start the generation.

        Members of the last generation that are alive but have not joined are overdue.
        """
        overdue = self.members.keys() & self.alive.keys() - self.joined.keys() - self.leaving - self.preparing
        if overdue:
            self._excuse_failure()
        if self.judged is not None:
            self.history.note_failure(self.judged.explains or self.judged.generation, self.judged.end.failure)
        self.unexplained = self.judged.generation if self.judged is not None and self.judged.end.of_peers else 0
        ranks = {uid: rank for rank, uid in enumerate(self.members)}
        newcomers = sum(uid not in self.members for uid in self.joined)
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
        self.judged, self.unseen, self.first_join_at, self.obstacle, self.unsaved = None, 0, None, "", ""
        self.notices.note_formed(newcomers, self.members)
        self.places.clear()
        for left in (self.joined, self.ends, self.finished, self.trained):
            left.clear()
        self.overdue |= overdue

    def _silence(self, now: float) -> float | None:
        """Mark overdue workers to be replaced, few at a time: so many at once hints at a fault of the network.

        Returns when to ask again.
        """
        if not self.overdue - self.silent:
            return None
        self.silenced_at = [at for at in self.silenced_at if now - at < 60.0]
        room = max(1, int(SILENT_SHARE_PER_MIN * (len(self.members) + len(self.overdue)))) - len(self.silenced_at)
        waits = []
        for uid in sorted(self.overdue - self.silent):
            left_s = self._dead_at(uid) - now
            if left_s <= 0 and room > 0:
                room -= 1
                self.silent.add(uid)
                self.silenced_at.append(now)
            else:
                waits.append(left_s if left_s > 0 else self.silenced_at[0] + 60.0 - now)
        return min(waits, default=None)

    def _dead_at(self, uid: str) -> float:
        """From when on a worker counts as dead that gives no sign of life (seconds since the epoch).

        One of which a restarted service has not heard may be waiting for an answer of the one before.
        """
        sign = self.signs.get(uid)
        return (self.known_at or 0.0) + ADOPT_S if sign is None else sign.at + SILENT_S
