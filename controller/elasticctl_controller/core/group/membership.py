"""The members of a job's training group: a state machine without clock, threads or sockets.

A group that has *formed* trains as generation N. Otherwise its workers join generation N+1. That forms as soon as every
live member of the last generation has joined, however long its ranks take to stop; only a member that gives no sign of
life is left out (`signs_of_life`). The group never waits for a worker that is still starting, except before the first
generation and after the loss of all members, when forming early would only mean forming twice (`generations`).

Newcomers are admitted at a step boundary, once the group has trained long enough for the re-forming to pay for itself
(`newcomers`). A change that is known in advance (a newcomer, a removal, a spot notice) makes the group *drain*: its
ranks agree on a step, commit it and stop, so that no step is lost. A worker with notice and time left keeps training
until it is replaced (`core.interruption_notices`).

Ranks that fail *break* the generation. The group waits for the ends of the other members' ranks, and then decides which
end is to blame (`generations`). The ranks restart within the job's budget, unless a lost member explains the failure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticctl.api.status import GroupGeneration, ProgressStatus
from elasticctl.api.text import join_some
from elasticctl_controller.core.group.failures import Judgement, RanksEnd
from elasticctl_controller.core.group.generations import (
    end_or_form_generation,
    judge_failure,
    leaving_lead_s,
    let_go,
    unheard_members,
)
from elasticctl_controller.core.group.group_record import GroupRecord
from elasticctl_controller.core.group.group_states import GroupEvent, GroupState, GroupWorld, transition
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_protocol.requests import Doing, GroupVerdict, Member

MAX_RECALLED = 20
"""How many generations workers may report failures of after the fact: a service that cannot store anything lets no more
than this begin."""
_BEFORE_THE_LAST_STEP = (Doing.PREPARING, Doing.WAITING, Doing.STARTING, Doing.RUNNING, Doing.DRAINING)
_AFTER_THE_LAST_STEP = (Doing.EXPORTING, Doing.FINISHING)


@dataclass(slots=True)
class Group(GroupRecord):
    """The rendezvous of one job. Every method that can change it takes `now`, seconds since the epoch."""

    # What the controller reports.

    def set_alive(
        self, alive: Mapping[str, str], minimum: int, now: float, leaving: frozenset[str] = frozenset()
    ) -> None:
        """Set the live workers (uid -> name) that the controller sees; a member that is missing is lost.

        The workers in `leaving` stay members until they are gone, but will not be in the next generation. Those without
        a notice are the ones that the controller removes: they stop now, even if SIGTERM does not reach their
        launchers.
        """
        self.restored_service.set_known(now)
        self.notices.drop_absent(alive.keys())
        self.usage.drop_absent(alive.keys())
        self.signs.drop_absent(alive.keys())
        is_loss = self.members.set_alive(alive, minimum, leaving | self.notices.departing)
        self.next_generation.drop_absent(self.members)
        if is_loss:
            self.excuse_failure()
        self._end_if_member_lost(now)
        self._let_go_removed(now)
        self.act_if_due(now)

    def _end_if_member_lost(self, now: float) -> None:
        """End the generation if a member that has not finished is no longer alive."""
        lost = self.members.lost()
        if lost:
            self.advance(GroupEvent.MEMBER_LOST, now, f"lost {join_some(lost, 'worker')}")

    def _let_go_removed(self, now: float) -> None:
        """Drain the group for the members that the controller removes."""
        going = self.members.leaving - self.notices.departing - self.notices.given.keys()
        removed = [uid for uid in self.members.awaited() if uid in going]
        if removed and self.state is GroupState.TRAINING:
            why = "it is removed" if len(removed) == 1 else "they are removed"
            let_go(self, removed, f"{self.members.who_stops(removed)}: {why}", now)

    # Signs of life, and of their absence.

    def note_sign(self, uid: str, now: float, doing: str = "", for_s: float = 0.0) -> bool:
        """A worker has called, and has been `doing` something for `for_s` seconds; True if it does something new."""
        if uid not in self.members.alive:
            return False
        is_new = self.signs.add_sign(uid, now, doing, for_s)
        doing = self.signs.newest[uid].doing
        if doing in _AFTER_THE_LAST_STEP:
            self.members.mark_trained(uid, is_done=True)
        elif doing in _BEFORE_THE_LAST_STEP:
            self.members.mark_trained(uid, is_done=False)
        return is_new

    def lose_contact(self, uid: str, now: float, *, hung_up: bool = False) -> None:
        """A worker's host no longer answers: it is gone, or the network between it and this service is broken.

        With `hung_up`, its kernel has closed the connection: the launcher has ended, as all processes of a machine do
        when it shuts down or its runtime fails, or something between has broken the connection. In any case the host
        answered until a moment ago, even if the worker's last call was earlier.
        """
        if uid not in self.members.alive or uid in self.signs.unreachable:
            return
        self.note_sign(uid, now)
        if self.signs.lose_contact(uid, now, hung_up=hung_up):
            self.act_if_due(now)

    # Agents join, and report their group to a restarted service.

    def join(
        self, member: Member, generation: int, now: float, *, stay: bool = False, serves_commands: bool = False
    ) -> None:
        """An agent is ready for a generation after `generation`, the last it was in (0: none).

        `stay`: its ranks stay in their processes. `serves_commands`: it has no ranks.
        """
        if member.uid in self.members.leaving or self.state is GroupState.OVER:
            return
        self.note_sign(member.uid, now)
        self._suspect_unseen_end(generation)
        self.reports.introduce(stays=stay, serves_commands=serves_commands)
        if generation and not self.members.ranked:
            self.restored_service.remember(member.uid)
        world = self.world
        if world is not None and member.uid in self.members.ranked:
            if generation < world.generation:
                return  # it does not know yet that it is a member: the answer is the world
            if self.failures.has_culprit:
                judge_failure(self, now)
            reason = self.drain.reason if self.drain else f"{member.name} joins again"
            self.advance(GroupEvent.MEMBER_REJOINED, now, reason)
        elif world is None and generation:  # its group has ended, perhaps while this service was being restarted
            self.advance(GroupEvent.MEMBER_REJOINED, now, self.reason)
        else:
            self.advance(GroupEvent.WORKER_JOINED, now)
        self.know_generation(generation)
        self.signs.clear_overdue(member.uid)
        self.members.mark_unfinished(member.uid)
        self.next_generation.add_worker(member, now)
        self.act_if_due(now)

    def has_to_prepare(self, member: Member, generation: int, now: float) -> bool:
        """Should an agent that wants to join, and whose ranks do not run, start them first while the others train?"""
        if not self.reports.stays or self.is_deadlocked or member.uid in self.members.leaving:
            return False
        if self.state is GroupState.OVER or not self.restored_service.knows_others(self.members, member.uid):
            return False
        if self.world is not None and member.uid in self.members.ranked:
            if generation < self.world.generation:
                return False  # it does not know yet that it is a member
            self.advance(GroupEvent.MEMBER_REJOINED, now, f"{member.name} starts again")
        self.note_sign(member.uid, now)
        self.next_generation.remove_worker(member.uid)
        if not self.failures.is_blamed_without_kill(member.uid):
            self.next_generation.prepare(member.uid)
        self.act_if_due(now)
        return True

    def ranks_of_others(self, member: Member) -> int:
        """How many ranks the others have. Members that a restarted service has not heard from count like this one."""
        unheard = self.restored_service.remembered - {member.uid}
        return sum(each.slots for each in self.members.ranked.values()) + len(unheard) * member.slots

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
        self.restored_service.hear_of(world.generation)
        self.know_generation(world.generation)
        self.reports.set_obstacle("")  # ranks that still wait report that again
        self.reports.introduce(stays=stay, serves_commands=serves_commands)
        newest = self.history.newest
        if newest is None or newest.generation != world.generation:
            names = tuple(member.name for member in world.members)
            self.history.add_generation(GroupGeneration(world.generation, names, "service restarted"))
        self._end_if_member_lost(now)

    # Agents leave or finish.

    def stop_member(self, uid: str, reason: str, now: float) -> None:
        """A member has to stop now: drain the group."""
        if uid in self.members.ranked and uid not in self.members.finished:
            let_go(self, (uid,), reason, now)

    def add_notice(self, uid: str, notice: LeaveNotice, now: float) -> None:
        """A launcher reports that its worker will have to leave: it does once it is replaced, or when its time is
        up."""
        if uid in self.members.alive:
            self.notices.report(uid, notice)
            self.act_if_due(now)

    def stay_s(self, uid: str, now: float) -> float:
        """Seconds that a worker with notice may stay if it is not replaced earlier; 0: it leaves now."""
        notice = self.notices.of(uid)
        if self.state is not GroupState.TRAINING or notice is None or uid not in self.notices.held(self.members.ranked):
            return 0.0
        if uid in self.members.leaving and uid not in self.notices.given:
            return 0.0  # it is the controller that removes it
        return max(0.0, notice.leave_at(leaving_lead_s(self)) - now)

    def leave(self, uid: str, reason: str, now: float) -> None:
        """An agent stops, or must be left out; the others re-form."""
        self.next_generation.remove_worker(uid)
        self.members.mark_gone(uid)
        if uid in self.members.ranked and uid not in self.members.finished:
            self.excuse_failure()
            self.advance(GroupEvent.MEMBER_LEFT, now, self.drain.reason if self.drain else reason)
        self.act_if_due(now)

    def finish(self, uid: str, generation: int, now: float, *, for_all: bool = False, terminated: bool = False) -> None:
        """All ranks of an agent have succeeded. The group is over once this holds for every member, or for one member
        that reports it `for_all`. `terminated`: they had been sent SIGTERM, which is to blame if others then fail.
        """
        self.advance(GroupEvent.MEMBER_FINISHED, now)
        known = set(self.members.ranked) if self.world is not None else set()
        if self.state is GroupState.RESTORED:
            known = set(self.restored_service.remembered)
        if uid not in known or generation != self.generation:
            return
        self.members.mark_finished(known if for_all else {uid}, {uid} if terminated else ())
        if known <= self.members.finished:
            self.advance(GroupEvent.ALL_FINISHED, now)
        self.act_if_due(now)

    # Ranks fail.

    def fail(self, end: RanksEnd, generation: int, now: float) -> None:
        """Ranks of an agent have failed in `generation`; `verdict` says what the agent should do then.

        An end that is reported after the judgement, perhaps because the rank was cleaning up, may still be found to be
        to blame.
        """
        self._suspect_unseen_end(generation)
        judged = self.failures.judged
        if self.world is not None and generation == self.world.generation and end.uid in self.members.ranked:
            self.failures.add_end(end)
            self.advance(GroupEvent.MEMBER_FAILED, now)
            self.act_if_due(now)
        elif judged is not None and judged.generation == generation:
            found = self.failures.judged_with(end)
            self.failures.correct_judgement(found, may_restart=self.may_restart(found))
        elif (
            self.world is None and generation == self.restored_service.unseen and self._is_first_report(end, generation)
        ):
            # It broke while there was no service; who else was lost then is unknown.
            self.restored_service.count_failure_of(generation)
            self.failures.count_one()
            self.failures.judge(Judgement(generation, end, exits=not self.may_restart(end)))

    def recall(self, end: RanksEnd, generation: int, now: float, *, newest: int = 0) -> None:
        """A worker that is in the generation `newest` by now reports that it failed in an earlier one.

        The failure counts if a service judged it that could not store it. That service let the worker join again, and
        so does this one.
        """
        self._suspect_unseen_end(max(generation, newest))
        if generation and generation == self.restored_service.unseen:
            self.fail(end, generation, now)
            self.failures.let_rejoin()
        elif self.restored_service.may_have_missed(generation) and self._is_first_report(end, generation):
            self.restored_service.count_failure_of(generation)
            self.failures.count_one()
            self.history.note_failure(generation, end.failure)

    def _is_first_report(self, end: RanksEnd, generation: int) -> bool:
        """Is this the first report of a live worker's own failure from before this service started?"""
        recalled = self.restored_service.recalled
        known = generation in recalled or self.history.has_failed(generation) or len(recalled) >= MAX_RECALLED
        return not known and end.uid in self.members.alive and not (end.of_peers or unheard_members(self, end))

    def _suspect_unseen_end(self, generation: int) -> None:
        """A member of this generation has called; the generation may have ended while there was no service."""
        if self.adopts(generation):
            self.restored_service.suspect_end_of(generation)

    def verdict(self, uid: str, generation: int) -> GroupVerdict:
        """What an agent whose ranks failed should do."""
        if self.state is GroupState.BREAKING and generation == self.generation:
            return GroupVerdict.PENDING
        return GroupVerdict.EXIT if self.failures.exits(uid, generation) else GroupVerdict.REJOIN

    def is_excused(self, uid: str, generation: int) -> bool:
        """Was another member lost, or found to be to blame, when the newest generation, `generation`, broke?"""
        if generation != self.generation:
            return False
        members, judged = self.members, self.failures.judged
        if judged is not None:
            return judged.generation == generation and judged.end.uid != uid
        others = (other for other in members.ranked if other != uid and other not in members.finished)
        return any(other not in members.alive for other in others)

    # Time passes, and training makes progress.

    def act_if_due(self, now: float) -> float | None:
        """End or form a generation if it is time; returns seconds until this should be called again (None: no need)."""
        known_at = self.restored_service.known_at or 0.0
        waits = (
            end_or_form_generation(self, now),
            self.signs.replace_overdue(len(self.members.ranked), known_at, now),
        )
        return min((wait_s for wait_s in waits if wait_s is not None), default=None)

    def note_step(self, generation: int, progress: ProgressStatus, now: float) -> None:
        """A rank of that generation reports its progress."""
        if self.history.note_step(generation, progress, now):
            self.failures.clear_hangs()

    def note_commit(
        self, generation: int, number: int, step: int, url: str, size_bytes: int, duration_s: float, now: float
    ) -> None:
        """A generation has committed a checkpoint; one of a newer step than any before refills the restart budget."""
        before = self.history.checkpoint.step
        self.history.note_commit(generation, number, step, url, size_bytes, duration_s, now)
        if before is None or step > before:
            self.failures.refill_budget()
