"""The members of a job's training group: a state machine without a clock, a thread or a socket.

A group that has *formed* trains as generation N. Otherwise its workers join generation N+1. That forms as soon as every
live member of the last generation has joined, however long its ranks take to stop; only a member that gives no sign of
life is left out (`silent_workers`). The group never waits for a worker that is still starting, except before the first
generation and after the loss of all members, when forming early would only mean forming twice (`generations`).

Newcomers are admitted at a step boundary, once the group has trained long enough for the re-forming to pay for itself
(`newcomers`). A change that is known in advance (a newcomer, a removal, a spot notice) makes the group *drain*: its
ranks agree on a step, commit it and stop, so that no step is lost. A worker with notice and time left keeps training
until it is replaced (`core.interruption_notices`).

Ranks that fail *break* the generation. The group waits for the ends of the other members' ranks, and then decides which
end is to blame (`failures`). The ranks restart within the job's budget, unless a lost member explains the failure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from elasticctl.api.status import GroupGeneration, ProgressStatus
from elasticctl.api.text import join_some
from elasticctl_controller.core.group.failures import excuse_failure, judge_failure, may_restart, unheard_beside
from elasticctl_controller.core.group.generations import leaving_lead_s, let_go, settle_generation, who_stops
from elasticctl_controller.core.group.group_record import GroupRecord, Sign
from elasticctl_controller.core.group.group_states import GroupEvent, GroupState, GroupWorld, Member, transition
from elasticctl_controller.core.group.root_cause import Judgement, RanksEnd, find_root_cause
from elasticctl_controller.core.group.silent_workers import HUNG_UP_S, UNREACHABLE_S, replace_overdue
from elasticctl_controller.core.interruption_notices import Notice

EXPORTING, FINISHING = "exporting", "finishing"
"""What a launcher reports while ranks still run after the last step, and once they have exited with 0."""
MAX_RECALLED = 20
"""How many generations workers may report failures of after the fact: a service that cannot store anything lets no more
than this begin."""
_BEFORE_THE_LAST_STEP = ("preparing", "waiting", "starting", "running", "draining")


@dataclass(slots=True)
class Group(GroupRecord):
    """The rendezvous of one job. Every method that can change it takes `now`, seconds since the epoch."""

    def set_alive(
        self, alive: Mapping[str, str], minimum: int, now: float, leaving: frozenset[str] = frozenset()
    ) -> None:
        """Set the live workers (uid -> name) that the controller sees; a member that is missing is lost.

        The workers in `leaving` stay members until they are gone, but will not be in the next generation. Those without
        a notice are the ones that the controller removes: they stop now, even if SIGTERM does not reach their
        launchers.
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
            excuse_failure(self)
        self._check_for_losses(now)
        self._let_go_removed(now)
        self.settle(now)

    def _let_go_removed(self, now: float) -> None:
        """Drain the group for the members that the controller removes."""
        going = self.leaving - self.notices.departing - self.notices.given.keys()
        removed = [uid for uid in self.members if uid in going and uid in self.alive and uid not in self.finished]
        if removed and self.state is GroupState.TRAINING:
            why = "it is removed" if len(removed) == 1 else "they are removed"
            let_go(self, removed, f"{who_stops(self, removed)}: {why}", now)

    def note_sign(self, uid: str, now: float, doing: str = "", for_s: float = 0.0) -> bool:
        """A worker has called, and has been `doing` something for `for_s` seconds; True if it does something new."""
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

    def lose_touch(self, uid: str, now: float, *, hung_up: bool = False) -> None:
        """A worker's host no longer answers: it is gone, or the network between it and this service is broken.

        With `hung_up`, its kernel has closed the connection: the launcher has ended, as all processes of a machine do
        when it shuts down or its runtime fails, or something between has broken the connection. If several hang up at
        once, that says nothing: it is the network. In any case the host answered until a moment ago, even if the
        worker's last call was earlier.
        """
        if uid not in self.alive or uid in self.unreachable:
            return
        self.note_sign(uid, now)
        grace_s = UNREACHABLE_S
        if hung_up:
            (other, at), self.hung_up, grace_s = self.hung_up, (uid, now), HUNG_UP_S
            if other != uid and now < at + HUNG_UP_S:
                self.unreachable.pop(other, None)
                return
        self.unreachable[uid] = now + grace_s
        self.settle(now)

    def join(
        self, member: Member, generation: int, now: float, *, stay: bool = False, serves_commands: bool = False
    ) -> None:
        """An agent is ready for a generation after `generation`, the last it was in (0: none).

        `stay`: its ranks stay in their processes. `serves_commands`: it has no ranks.
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
                judge_failure(self, now)
            reason = self.drain.reason if self.drain else f"{member.name} joins again"
            self.advance(GroupEvent.MEMBER_REJOINED, now, reason)
        elif world is None and generation:  # its group has ended, perhaps while this service was being restarted
            self.advance(GroupEvent.MEMBER_REJOINED, now, self.reason)
        else:
            self.advance(GroupEvent.WORKER_JOINED, now)
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
        """Should an agent that wants to join, and whose ranks do not run, start them first while the others train?"""
        known = itertools.chain(self.members, self.remembered)
        others = (uid for uid in known if uid != member.uid and uid in self.alive)
        if not self.stays or self.is_deadlocked or member.uid in self.leaving:
            return False
        if self.state is GroupState.OVER or not any(others):
            return False
        if self.world is not None and member.uid in self.members:
            if generation < self.world.generation:
                return False  # it does not know yet that it is in
            self.advance(GroupEvent.MEMBER_REJOINED, now, f"{member.name} starts again")
        self.note_sign(member.uid, now)
        self.joined.pop(member.uid, None)
        if not self._failed_by_itself(member.uid):
            self.preparing.add(member.uid)
        self.settle(now)
        return True

    def ranks_of_others(self, member: Member) -> int:
        """How many ranks the others have. Members that a restarted service has not heard from count like this one."""
        return sum(each.slots for each in self.members.values()) + len(self.remembered - {member.uid}) * member.slots

    def _failed_by_itself(self, uid: str) -> bool:
        """Is this member to blame for the last failure, with an error rather than a kill?

        The others wait for it, because a script that cannot run at this size must not seem to succeed at a smaller one.
        """
        return self.judged is not None and self.judged.end.uid == uid and not self.judged.end.failure.signal

    def adopts(self, generation: int) -> bool:
        """True for a restarted service that has not heard of the running generation yet."""
        known = transition(self.state, GroupEvent.GROUP_REPORTED) is self.state
        return not known and generation >= self.generation

    def adopt(self, world: GroupWorld, now: float, *, stay: bool = False, serves_commands: bool = False) -> None:
        """A running agent reports its group to a restarted service, so that it keeps training undisturbed.

        `stay` and `serves_commands` are as in `join`. If a member was lost while there was no service, the generation
        ends: the others would wait for that member in vain.
        """
        if not self.adopts(world.generation):
            return
        self.advance(GroupEvent.GROUP_REPORTED, now, world=world)
        self.begun = self.begun or world.generation
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
            let_go(self, (uid,), reason, now)

    def warn(self, uid: str, notice: Notice, now: float) -> None:
        """A launcher reports that its worker will have to leave: it does once it is replaced, or when its time is
        up."""
        if uid in self.alive:
            self.notices.told[uid] = notice
            self.settle(now)

    def stay_s(self, uid: str, now: float) -> float:
        """Seconds that a worker with notice may stay if it is not replaced earlier; 0: it leaves now."""
        notice = self.notices.of(uid)
        if self.state is not GroupState.TRAINING or notice is None or uid not in self.notices.held(self.members):
            return 0.0
        if uid in self.leaving and uid not in self.notices.given:
            return 0.0  # it is the controller that removes it
        return max(0.0, notice.leave_at(leaving_lead_s(self)) - now)

    def leave(self, uid: str, reason: str, now: float) -> None:
        """An agent stops, or must be left out; the others re-form."""
        self.joined.pop(uid, None)
        if uid in self.alive:
            self.gone.add(uid)
        self.alive = {other: name for other, name in self.alive.items() if other != uid}
        if uid in self.members and uid not in self.finished:
            excuse_failure(self)
            self.advance(GroupEvent.MEMBER_LEFT, now, self.drain.reason if self.drain else reason)
        self.settle(now)

    def finish(self, uid: str, generation: int, now: float, *, for_all: bool = False, terminated: bool = False) -> None:
        """All ranks of an agent have succeeded. The group is over once this holds for every member, or for one member
        that reports it `for_all`. `terminated`: somebody had sent them SIGTERM, which is to blame if others then fail.
        """
        self.advance(GroupEvent.MEMBER_FINISHED, now)
        known = set(self.members) if self.world is not None else set()
        if self.state is GroupState.RESTORED:
            known = set(self.remembered)
        if uid not in known or generation != self.generation:
            return
        self.finished |= known if for_all else {uid}
        self.terminated |= {uid} if terminated else set()
        if known <= self.finished:
            self.advance(GroupEvent.ALL_FINISHED, now)
        self.settle(now)

    def fail(self, end: RanksEnd, generation: int, now: float) -> None:
        """Ranks of an agent have failed in `generation`; `verdict` says what the agent should do then.

        An end that is reported after the judgement, perhaps because the rank was cleaning up, may still be found to be
        to blame.
        """
        self._note_unseen(generation)
        if self.world is not None and generation == self.world.generation and end.uid in self.members:
            self.ends[end.uid] = find_root_cause((self.ends.get(end.uid, end), end))
            self.advance(GroupEvent.MEMBER_FAILED, now)
            self.settle(now)
        elif self.judged is not None and self.judged.generation == generation:
            found = self.judged.end if self.judged.exits else find_root_cause((self.judged.end, end))
            self.judged = replace(self.judged, end=found, exits=self.judged.exits or not may_restart(self, found))
        elif self.world is None and generation == self.unseen and self._is_news(end, generation):
            self.recalled.add(generation)
            self.failures += 1  # it broke while there was no service; who else was lost then, nobody can tell
            self.judged = Judgement(generation, end, exits=not may_restart(self, end))

    def recall(self, end: RanksEnd, generation: int, now: float, *, newest: int = 0) -> None:
        """A worker that is in the generation `newest` by now reports that it failed in an earlier one.

        The failure counts if a service judged it that could not store it. That service let the worker join again, and
        so does this one.
        """
        self._note_unseen(max(generation, newest))
        if generation and generation == self.unseen:
            self.fail(end, generation, now)
            self.judged = None if self.judged is None else replace(self.judged, exits=False)
        elif max(1, self.stored) <= generation < (self.begun or math.inf) and self._is_news(end, generation):
            self.recalled.add(generation)
            self.failures += 1
            self.history.note_failure(generation, end.failure)

    def _is_news(self, end: RanksEnd, generation: int) -> bool:
        """Is this the first report of a live worker's own failure from before this service started?"""
        known = generation in self.recalled or self.history.has_failed(generation)
        known = known or len(self.recalled) >= MAX_RECALLED
        return not known and end.uid in self.alive and not (end.of_peers or unheard_beside(self, end))

    def _note_unseen(self, generation: int) -> None:
        """A member of this generation has called; the generation may have ended while there was no service."""
        if self.adopts(generation):
            self.unseen = max(self.unseen, generation)

    def verdict(self, uid: str, generation: int) -> str:
        """What an agent whose ranks failed should do: "exit" or "rejoin"; "" while that is undecided."""
        if self.state is GroupState.BREAKING and generation == self.generation:
            return ""
        judged = self.judged
        exits = judged is not None and judged.exits and (judged.generation, judged.end.uid) == (generation, uid)
        return "exit" if exits else "rejoin"

    def error_of(self, uid: str, generation: int) -> str:
        """The error of this member, if its failure is to blame for the end of `generation`; else empty."""
        judged = self.judged
        found = judged is not None and (judged.generation, judged.end.uid) == (generation, uid)
        return judged.end.failure.error if judged is not None and found else ""

    def is_excused(self, uid: str, generation: int) -> bool:
        """Was another member lost, or found to be to blame, when the newest generation, `generation`, broke?"""
        if generation != self.generation:
            return False
        if self.judged is not None:
            return self.judged.generation == generation and self.judged.end.uid != uid
        return any(other not in self.alive for other in self.members if other != uid and other not in self.finished)

    def settle(self, now: float) -> float | None:
        """End or form a generation if it is time; returns seconds until this should be called again (None: no need)."""
        waits = (settle_generation(self, now), replace_overdue(self, now))
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def note_step(self, generation: int, progress: ProgressStatus, now: float) -> None:
        """A rank of that generation reports its progress."""
        if self.history.note_step(generation, progress, now):
            self.hangs = 0

    def note_commit(
        self, generation: int, number: int, step: int, url: str, size_bytes: int, duration_s: float, now: float
    ) -> None:
        """A generation has committed a checkpoint; one of a newer step than any before refills the restart budget."""
        before = self.history.checkpoint.step
        self.history.note_commit(generation, number, step, url, size_bytes, duration_s, now)
        if before is None or step > before:
            self.failures = 0

    def _check_for_losses(self, now: float) -> None:
        """End the generation if a member that has not finished is no longer alive."""
        lost = [m.name for uid, m in self.members.items() if uid not in self.alive and uid not in self.finished]
        if lost:
            self.advance(GroupEvent.MEMBER_LOST, now, f"lost {join_some(lost, 'worker')}")
