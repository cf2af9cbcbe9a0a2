"""The verbs of the rendezvous service: one method for each, from the body of a launcher's request to the answer."""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from elasticctl_controller.core.group.group_states import GroupState, GroupWorld, Member
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.rendezvous.groups import Groups
from elasticctl_controller.rendezvous.request_bodies import Bodies
from elasticctl_controller.rendezvous.requests import (
    MAX_GENERATION,
    Caller,
    Refused,
    newest_generation,
    note_report,
    note_sign,
    read_end,
    read_int,
    read_member,
    read_seconds,
    read_text,
    read_world,
    recall_failures,
)

SEEN_S = 1.0
"""How long a launcher that got SIGTERM waits to hear its pod's deadline: if somebody deletes the pod, the controller
sees that at about the same time. If nobody does, as when a node shuts down, the worker leaves at once."""
MAX_REPORTS = 256
REPORTS_PER_S = 200.0
"""How many reports of progress all workers of a job together are asked to send: every report says the same."""

Verb = Callable[[Caller, Mapping[str, Any]], Awaitable[dict[str, Any] | str]]


class Handlers:
    """Answers requests about `groups`, on the event loop. Large bodies are parsed by `request_bodies`."""

    def __init__(self, groups: Groups, bodies: Bodies) -> None:
        self._groups, self.bodies = groups, bodies
        self._encoded: dict[str, tuple[GroupWorld, str]] = {}
        self._verbs: dict[str, Verb] = {
            "join": self._join,
            "watch": self._watch,
            "finish": self._finish,
            "notice": self._notice,
            "leave": self._leave,
            "fail": self._fail,
            "heartbeat": self._heartbeat,
            "report": self._report,
        }

    def find(self, name: str) -> Verb | None:
        """The verb of that name. It returns a JSON object, or the text of one, and may raise Refused."""
        return self._verbs.get(name)

    def forget(self, key: str) -> None:
        """Forget a job."""
        self._encoded.pop(key, None)

    async def _join(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any] | str:
        member, generation = read_member(body), read_int(body, "generation", 0, MAX_GENERATION)
        unprepared = body.get("prepared") is False
        with self._groups.changing(caller) as (group, now):
            if group.state is GroupState.OVER:
                return {"state": "over"}
            if member.uid not in group.members.alive:
                raise Refused(409, f"worker {member.name} is not one of the live workers of {caller.key}")
            recall_failures(group, body, member.uid, generation, now)
            if unprepared and group.has_to_prepare(member, generation, now):
                return _prepare(group, member)
            serves_commands = body.get("serves_commands") is True
            group.join(member, generation, now, stay=body.get("stays") is True, serves_commands=serves_commands)
            note_sign(group, body, now)

        def world(group: Group) -> GroupWorld | str | None:
            if group.state is GroupState.OVER:
                return "over"
            if member.uid not in group.members.alive:
                raise Refused(409, f"worker {member.name} is no longer one of the live workers of {caller.key}")
            if unprepared and group.has_to_prepare(member, generation, self._groups.clock()):
                return "prepare"  # it has turned out that the ranks of the others stay
            found = group.world
            return found if found and group.is_member(member.uid) and found.generation > generation else None

        formed = await self._groups.poll(caller, world, read_seconds(body, "within_s"))
        if formed == "prepare":
            self._groups.settle(caller.key, moved=True)
            with self._groups.lock:
                return _prepare(self._groups.of(caller), member)
        if not isinstance(formed, GroupWorld):
            return {"state": formed or "waiting"}
        self._groups.note_change(caller.key)
        return self._encode(caller.key, formed)

    def _encode(self, key: str, world: GroupWorld) -> str:
        """The generation as JSON, encoded once because every member gets the same text."""
        cached = self._encoded.get(key)
        if cached is None or cached[0] is not world:
            members = [
                {"uid": each.uid, "name": each.name, "host": each.host, "port": each.port, "slots": each.slots}
                for each in world.members
            ]
            found = {"state": "formed", "generation": world.generation, "members": members, "anew": world.anew}
            text = json.dumps(found)
            cached = self._encoded[key] = (world, text)
        return cached[1]

    async def _watch(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = read_text(body, "uid"), read_int(body, "generation", 0, MAX_GENERATION)
        world = await self.bodies.work(lambda: read_world(body, uid, generation)) if "members" in body else None
        with self._groups.changing(caller) as (group, now):
            is_news = note_sign(group, body, now)
            if uid in group.members.alive and group.adopts(generation):
                if world is None:
                    return {"state": "unknown", "reason": "the service was restarted: send the members"}
                serves_commands = body.get("serves_commands") is True
                group.adopt(world, now, stay=body.get("stays") is True, serves_commands=serves_commands)
                recall_failures(group, body, uid, generation, now)
                is_news = True
        if is_news:
            self._groups.note_change(caller.key)

        draining = body.get("draining") is True
        answer = await self._groups.poll(caller, lambda group: _watch_answer(group, uid, generation, draining=draining))
        return answer or {"state": "current", "reason": ""}

    async def _finish(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = read_text(body, "uid"), read_int(body, "generation", 0, MAX_GENERATION)
        with self._groups.changing(caller) as (group, now):
            note_sign(group, body, now)
            for_all, terminated = body.get("for_all") is True, body.get("terminated") is True
            group.finish(uid, generation, now, for_all=for_all, terminated=terminated)

        def state_of(group: Group) -> str | None:
            if group.state is GroupState.OVER:
                return "done"
            if group.adopts(generation):
                return None  # its peers have not called yet
            if group.world is None or group.world.generation != generation:
                return "rejoin"  # a member was lost that had not finished: the work is repeated
            # A restarted service did not know the generation yet, so this has to be reported once more.
            return "waiting" if uid in group.members.ranked and uid not in group.members.finished else None

        return {"state": await self._groups.poll(caller, state_of) or "waiting"}

    async def _notice(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        """A worker has to leave: at once, or it asks how long it may stay.

        If it got a signal, the controller knows the deadline. If it heard from its cloud, the launcher sends the time
        left as `in_s` (None: unknown).
        """
        uid, reason = read_text(body, "uid"), read_text(body, "reason")
        if body.get("stays") is not True:
            with self._groups.changing(caller) as (group, now):
                group.stop_member(uid, f"{group.members.alive.get(uid, 'a worker')} has to stop: {reason}", now)
            return {}
        if "in_s" in body:
            in_s = read_seconds(body, "in_s")
            with self._groups.changing(caller) as (group, now):
                group.add_notice(uid, LeaveNotice(reason, None if in_s is None else now + in_s), now)
            self._groups.note_change(caller.key)
        else:
            await self._groups.poll(
                caller, lambda group: uid in group.members.leaving | group.notices.given.keys() or None, SEEN_S
            )
        with self._groups.lock:
            group, now = self._groups.of(caller), self._groups.clock()
            stay_s, notice = group.stay_s(uid, now), group.notices.of(uid)
        left_s = None if notice is None or notice.deadline is None else max(0.0, notice.deadline - now)
        return {"stay_s": None if stay_s == math.inf else stay_s, "left_s": left_s}

    async def _leave(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, reason = read_text(body, "uid"), read_text(body, "reason")
        with self._groups.changing(caller) as (group, now):
            group.leave(uid, f"{group.members.alive.get(uid, 'a worker')} leaves: {reason}", now)
        return {}

    async def _fail(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = read_text(body, "uid"), read_int(body, "generation", 0, MAX_GENERATION)
        with self._groups.changing(caller) as (group, now):
            note_sign(group, body, now)
            recall_failures(group, body, uid, generation, now)
            group.fail(read_end(body, uid, group.members.alive.get(uid, uid), now), generation, now)

        def answer(group: Group) -> dict[str, Any] | None:
            verdict = group.verdict(uid, generation)
            excused = verdict == "rejoin" and group.is_excused(uid, generation)
            found = {"error": group.failures.error_of(uid, generation)} if verdict == "exit" else {}
            return {"verdict": verdict, **({"excused": True} if excused else {}), **found} if verdict else None

        return await self._groups.poll(caller, answer) or {"verdict": "pending"}

    async def _heartbeat(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        read_text(body, "uid")
        with self._groups.lock:
            group = self._groups.of(caller)
            is_new = note_sign(group, body, self._groups.clock())
        if is_new:
            self._groups.settle(caller.key)  # newcomers may be waiting for it
            self._groups.note_change(caller.key)
        return {}

    async def _report(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or len(messages) > MAX_REPORTS:
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
                if isinstance(message, Mapping):
                    changed |= note_report(group, message, now)
        if changed:
            if not settled or group.signs.unreachable or group.reports.places:
                self._groups.settle(
                    caller.key, moved=group.reports.stays and not stayed
                )  # newcomers wait for a first step; ranks that stand still, for a lost one
            self._groups.note_change(caller.key)
        return {"every_s": every_s}


def _prepare(group: Group, member: Member) -> dict[str, Any]:
    """The answer for an agent that has to start its ranks before it joins."""
    return {"state": "prepare", "ranks": group.ranks_of_others(member), "examples": group.reports.examples}


def _watch_answer(group: Group, uid: str, generation: int, *, draining: bool) -> dict[str, Any] | None:
    """The answer for a member of that generation; None while there is nothing new. `draining`: it drains already."""
    if uid not in group.members.alive:
        return {"state": "stale", "reason": "removed"}
    if group.state is GroupState.OVER:
        return {"state": "stale", "reason": "the job is done"} if group.reports.serves_commands else None
    if group.world is None:
        return {"state": "stale", "reason": group.reason}
    if group.world.generation != generation or not group.is_member(uid):
        return {"state": "stale", "reason": "another generation"}
    if group.drain is None or draining:
        return None
    return {"state": "drain", "reason": group.drain.reason, "leave": uid in group.notices.departing}
