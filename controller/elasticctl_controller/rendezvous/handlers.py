"""The verbs of the rendezvous service: one method for each, from the body of a launcher's request to the answer."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from elasticctl_controller.core.group.group_states import GroupState, GroupWorld
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.rendezvous.groups import Groups
from elasticctl_controller.rendezvous.reports import newest_generation, note_report
from elasticctl_controller.rendezvous.requests import (
    Bodies,
    Caller,
    Refused,
    note_sign,
    read_end,
    read_world,
    recall_failures,
    seconds,
)
from elasticctl_protocol.requests import (
    WIRE,
    FailAnswer,
    FailRequest,
    FinishAnswer,
    FinishRequest,
    FinishState,
    FormedAnswer,
    GroupVerdict,
    Heartbeat,
    JoinAnswer,
    JoinRequest,
    JoinState,
    LeaveRequest,
    Member,
    NoticeAnswer,
    NoticeRequest,
    PrepareAnswer,
    ReportAnswer,
    ReportRequest,
    WatchAnswer,
    WatchRequest,
    WatchState,
)

SEEN_S = 1.0
"""How long a launcher that got SIGTERM waits for its pod's deadline: if the pod is being deleted, the controller sees
that at about the same time. If it is not, as when a node shuts down, the worker leaves immediately."""
MAX_REPORTS = 256
REPORTS_PER_S = 200.0
"""How many reports of progress all workers of a job together are asked to send: all reports have the same content."""

Verb = Callable[[Caller, Any], Awaitable[Any]]
"""Answers a request: with a message, the JSON text of one, or None, which is an empty object."""


class Handlers:
    """Answers requests about `groups`, on the event loop. Large bodies are parsed by `bodies`."""

    def __init__(self, groups: Groups, bodies: Bodies) -> None:
        self._groups, self.bodies = groups, bodies
        self._encoded: dict[str, tuple[GroupWorld, str]] = {}
        self._verbs: Mapping[str, tuple[type[Any], Verb]] = {
            JoinRequest.verb: (JoinRequest, self._join),
            WatchRequest.verb: (WatchRequest, self._watch),
            FinishRequest.verb: (FinishRequest, self._finish),
            NoticeRequest.verb: (NoticeRequest, self._notice),
            LeaveRequest.verb: (LeaveRequest, self._leave),
            FailRequest.verb: (FailRequest, self._fail),
            Heartbeat.verb: (Heartbeat, self._heartbeat),
            ReportRequest.verb: (ReportRequest, self._report),
        }

    def find(self, name: str) -> tuple[type[Any], Verb] | None:
        """The class of the requests with a verb, and the verb, which may raise Refused; None for an unknown one."""
        return self._verbs.get(name)

    def drop_job(self, key: str) -> None:
        """Drop what is stored of a job."""
        self._encoded.pop(key, None)

    async def _join(self, caller: Caller, request: JoinRequest) -> JoinAnswer | PrepareAnswer | str:
        member, generation = request.member, request.generation
        with self._groups.changing(caller) as (group, now):
            if group.state is GroupState.OVER:
                return JoinAnswer(JoinState.OVER)
            if member.uid not in group.members.alive:
                raise Refused(409, f"worker {member.name} is not one of the live workers of {caller.key}")
            recall_failures(group, request.failed, member.uid, generation, now)
            if not request.prepared and group.has_to_prepare(member, generation, now):
                return _prepare(group, member)
            group.join(member, generation, now, stay=request.stays, serves_commands=request.serves_commands)
            note_sign(group, request, now)

        def world(group: Group) -> GroupWorld | JoinState | None:
            if group.state is GroupState.OVER:
                return JoinState.OVER
            if member.uid not in group.members.alive:
                raise Refused(409, f"worker {member.name} is no longer one of the live workers of {caller.key}")
            if not request.prepared and group.has_to_prepare(member, generation, self._groups.clock()):
                return JoinState.PREPARE  # it has turned out that the ranks of the others stay
            found = group.world
            return found if found and group.is_member(member.uid) and found.generation > generation else None

        formed = await self._groups.poll(caller, world, seconds(request.within_s))
        if formed is JoinState.PREPARE:
            self._groups.apply_due(caller.key, moved=True)
            with self._groups.lock:
                return _prepare(self._groups.of(caller), member)
        if isinstance(formed, GroupWorld):
            self._groups.report_change(caller.key)
            return self._encode(caller.key, formed)
        return JoinAnswer(JoinState.OVER if formed is JoinState.OVER else JoinState.WAITING)

    def _encode(self, key: str, world: GroupWorld) -> str:
        """The generation as JSON, encoded once because every member gets the same text."""
        cached = self._encoded.get(key)
        if cached is None or cached[0] is not world:
            found = FormedAnswer(generation=world.generation, members=world.members, anew=world.from_start)
            cached = self._encoded[key] = (world, json.dumps(WIRE.encode(found)))
        return cached[1]

    async def _watch(self, caller: Caller, request: WatchRequest) -> WatchAnswer:
        uid, generation = request.uid, request.generation
        world = await self.bodies.work(lambda: read_world(request)) if request.members is not None else None
        with self._groups.changing(caller) as (group, now):
            is_news = note_sign(group, request, now)
            if uid in group.members.alive and group.adopts(generation):
                if world is None:
                    return WatchAnswer(WatchState.UNKNOWN, "the service was restarted: send the members")
                stays, serves_commands = request.stays is True, request.serves_commands is True
                group.adopt(world, now, stay=stays, serves_commands=serves_commands)
                recall_failures(group, request.failed or (), uid, generation, now)
                is_news = True
        if is_news:
            self._groups.report_change(caller.key)

        answer = await self._groups.poll(caller, lambda group: _watch_answer(group, request))
        return answer or WatchAnswer(WatchState.CURRENT)

    async def _finish(self, caller: Caller, request: FinishRequest) -> FinishAnswer:
        uid, generation = request.uid, request.generation
        with self._groups.changing(caller) as (group, now):
            note_sign(group, request, now)
            group.finish(uid, generation, now, for_all=request.for_all, terminated=request.terminated)

        def state_of(group: Group) -> FinishState | None:
            if group.state is GroupState.OVER:
                return FinishState.DONE
            if group.adopts(generation):
                return None  # its peers have not called yet
            if group.world is None or group.world.generation != generation:
                return FinishState.REJOIN
            # A restarted service did not know the generation yet, so this has to be reported once more.
            return FinishState.WAITING if uid in group.members.ranked and uid not in group.members.finished else None

        return FinishAnswer(await self._groups.poll(caller, state_of) or FinishState.WAITING)

    async def _notice(self, caller: Caller, request: NoticeRequest) -> NoticeAnswer | None:
        uid, reason = request.uid, request.reason
        if not request.stays:
            with self._groups.changing(caller) as (group, now):
                group.stop_member(uid, f"{group.members.alive.get(uid, 'a worker')} has to stop: {reason}", now)
            return None
        if request.in_s is not None:
            with self._groups.changing(caller) as (group, now):
                deadline = None if request.in_s == math.inf else now + (seconds(request.in_s) or 0.0)
                group.add_notice(uid, LeaveNotice(reason, deadline), now)
            self._groups.report_change(caller.key)
        else:
            await self._groups.poll(
                caller, lambda group: uid in group.members.leaving | group.notices.given.keys() or None, SEEN_S
            )
        with self._groups.lock:
            group, now = self._groups.of(caller), self._groups.clock()
            stay_s, notice = group.stay_s(uid, now), group.notices.of(uid)
        left_s = math.inf if notice is None or notice.deadline is None else max(0.0, notice.deadline - now)
        return NoticeAnswer(stay_s, left_s)

    async def _leave(self, caller: Caller, request: LeaveRequest) -> None:
        uid = request.uid
        with self._groups.changing(caller) as (group, now):
            group.leave(uid, f"{group.members.alive.get(uid, 'a worker')} leaves: {request.reason}", now)

    async def _fail(self, caller: Caller, request: FailRequest) -> FailAnswer:
        uid, generation = request.uid, request.generation
        with self._groups.changing(caller) as (group, now):
            note_sign(group, request, now)
            recall_failures(group, request.failed, uid, generation, now)
            group.fail(read_end(request, uid, group.members.alive.get(uid, uid), now), generation, now)

        def answer(group: Group) -> FailAnswer | None:
            match group.verdict(uid, generation):
                case GroupVerdict.EXIT:
                    return FailAnswer(GroupVerdict.EXIT, error=group.failures.error_of(uid, generation))
                case GroupVerdict.REJOIN:
                    return FailAnswer(GroupVerdict.REJOIN, excused=group.is_excused(uid, generation))
            return None

        return await self._groups.poll(caller, answer) or FailAnswer(GroupVerdict.PENDING)

    async def _heartbeat(self, caller: Caller, request: Heartbeat) -> None:
        with self._groups.lock:
            group = self._groups.of(caller)
            is_new = note_sign(group, request, self._groups.clock())
        if is_new:
            self._groups.apply_due(caller.key)  # newcomers may be waiting for it
            self._groups.report_change(caller.key)

    async def _report(self, caller: Caller, request: ReportRequest) -> ReportAnswer:
        messages = request.messages
        if messages is None or len(messages) > MAX_REPORTS:
            raise Refused(400, f"messages: expected a list of at most {MAX_REPORTS}")
        now, changed = self._groups.clock(), False
        with self._groups.turns.measure(caller.key), self._groups.lock:
            group = self._groups.of(caller)
            if group.adopts(newest_generation(messages)):
                raise Refused(429, "this service was restarted, and no worker has reported the running group yet")
            settled = group.history.newest is not None and group.history.newest.first_step_at is not None
            stayed = group.reports.stays
            every_s = len(group.members.ranked) / REPORTS_PER_S
            for message in messages:
                changed |= note_report(group, message, now)
        if changed:
            if not settled or group.signs.unreachable or group.reports.places:
                self._groups.apply_due(
                    caller.key, moved=group.reports.stays and not stayed
                )  # newcomers wait for a first step; ranks that stand still, for a lost one
            self._groups.report_change(caller.key)
        return ReportAnswer(every_s)


def _prepare(group: Group, member: Member) -> PrepareAnswer:
    """The answer for an agent that has to start its ranks before it joins."""
    return PrepareAnswer(ranks=group.ranks_of_others(member), examples=group.reports.examples)


def _watch_answer(group: Group, request: WatchRequest) -> WatchAnswer | None:
    """The answer for a member of that generation; None while there is nothing new."""
    uid = request.uid
    if uid not in group.members.alive:
        return WatchAnswer(reason="removed")
    if group.state is GroupState.OVER:
        return WatchAnswer(reason="the job is done") if group.reports.serves_commands else None
    if group.world is None:
        return WatchAnswer(reason=group.reason)
    if group.world.generation != request.generation or not group.is_member(uid):
        return WatchAnswer(reason="another generation")
    if group.drain is None or request.draining:
        return None
    return WatchAnswer(WatchState.DRAIN, group.drain.reason, leave=uid in group.notices.departing)
