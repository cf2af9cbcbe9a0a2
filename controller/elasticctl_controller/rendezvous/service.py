"""The rendezvous service: membership of the training groups, over HTTP.

One aiohttp application serves every job: `POST /v1/jobs/{namespace}/{name}/{verb}` with a JSON body and the job's
bearer token. `join`, `watch`, `finish` and `fail` are long polls, answered within `POLL_S`; the other verbs are
answered at once. Every request is a sign of life; `heartbeat` is nothing else, for launchers without a poll under way.
While a poll is under way, the kernel asks the worker's host for a sign of life (`listening`). The controller's thread
sets who is alive through `set_group`; the handlers run on the application's event loop.

Every pod of a cluster reaches the port. `listening` closes connections that show no valid token in time; of a request
without one, only the head is looked at. Requests with one take turns (`turns`), so that each job has its share of the
service's time.

All state is in `membership.Group`, under one lock. Whatever may change a group goes through `_settle`: it wakes the
group's polls only if the group has moved, and sets one timer for its next deadline. Nothing is on disk: agents report
their group to a restarted service again. Answers are fenced like writes: if two services form a group at the same time,
agents listen to one only.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import re
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

from aiohttp import web

from elasticctl.api.codec import from_json
from elasticctl.api.objects import as_mapping, as_text
from elasticctl.api.status import (
    Activity,
    CheckpointStatus,
    GroupGeneration,
    JobStatus,
    Phase,
    ProgressStatus,
    TokenStatus,
)
from elasticctl.api.usage import JobUsage
from elasticctl_controller.core.group.blame import GroupRules
from elasticctl_controller.core.group.group_states import GroupState, GroupWorld
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.group.tokens import EVERY_S, accepted_numbers, expired_numbers
from elasticctl_controller.core.notices import Leaving, Notice
from elasticctl_controller.rendezvous.activity import describe_activity
from elasticctl_controller.rendezvous.admission import most_connections
from elasticctl_controller.rendezvous.bodies import MAX_BODY_BYTES, Bodies
from elasticctl_controller.rendezvous.listening import has_lost_host, watch_host
from elasticctl_controller.rendezvous.requests import (
    MAX_GENERATION,
    Caller,
    Limiter,
    Refused,
    note_report,
    note_sign,
    read_end,
    read_int,
    read_member,
    read_seconds,
    read_text,
    read_world,
    recall_failure,
)
from elasticctl_controller.rendezvous.turns import Turns

POLL_S = 20.0
SEEN_S = 1.0
"""How long a launcher that got SIGTERM waits to hear by when its pod has to end: the controller sees at about the same
time that somebody deletes it. Where nobody does, as when a node shuts down, it leaves at once."""
SHORTEST_WAIT_S = 0.01
"""Timers may fire a little early: a group that is asked too soon would be asked again and again."""
MAX_REPORTS = 256
REPORTS_PER_S = 200.0
"""How many reports of progress a job's workers are asked to send between them: all of them say the same."""
DEFAULT_RULES, STAYING = GroupRules(), Leaving()
_PATH = re.compile(r"/v1/jobs/([^/]+)/([^/]+)/[^/]*")
_TERMINAL = frozenset(phase.value for phase in Phase if phase.terminal)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupView:
    """What the service knows of a job, for its status.

    `silent`: the uids of workers that are alive but did not join again when the group re-formed. `growth`: why
    newcomers that are ready are not taken in yet. `activity`: what the group does. `usage`: what workers use of their
    machines. `notices`: what launchers say of workers that have to go and have not been told to yet, by uid.
    """

    progress: ProgressStatus | None = None
    checkpoint: CheckpointStatus | None = None
    generations: tuple[GroupGeneration, ...] = ()
    silent: frozenset[str] = frozenset()
    growth: str = ""
    activity: Activity | None = None
    usage: JobUsage | None = None
    notices: Mapping[str, Notice] = field(default_factory=dict)


def steady_clock() -> Callable[[], float]:
    """A monotonic clock in seconds since the epoch: setting the system's clock must not move the group's deadlines."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


class RendezvousService:
    """The service, and the controller's handle on it.

    `token_for(job_uid, number)` returns a bearer token of a job, which gets another one every `token_every_s`.
    `on_change(key)` is called on the event loop's thread when a job's view has changed in a way that its status should
    show. `may_act` says whether this replica still leads: once it does not, every answer is 503, and agents ask again
    elsewhere. `find_job(key)` returns the manifest of a job for which the controller, having just started, has not
    called `set_group` yet: until then its agents get 503.

    `groups` are the groups by job key; the lock guards them.
    """

    def __init__(
        self,
        token_for: Callable[[str, int], str],
        on_change: Callable[[str], None],
        clock: Callable[[], float] | None = None,
        may_act: Callable[[], bool] = lambda: True,
        find_job: Callable[[str], Mapping[str, Any] | None] = lambda key: None,
        token_every_s: float = EVERY_S,
    ) -> None:
        self.token_every_s = token_every_s
        self._token_for, self._on_change, self._clock = token_for, on_change, clock or steady_clock()
        self._may_act, self._find_job = may_act, find_job
        self._tokens: dict[str, TokenStatus | None] = {}
        self._limiter = Limiter()
        self._lock = threading.Lock()
        self.groups: dict[str, Group] = {}
        self._begun_anew: set[str] = set()
        self._polls: dict[str, dict[asyncio.Future[None], None]] = {}
        self.turns, self._bodies = Turns(), Bodies()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._encoded: dict[str, tuple[GroupWorld, str]] = {}

    def app(self) -> web.Application:
        """Return the aiohttp application; serve it on any socket."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_startup.append(self._started)
        return app

    async def _started(self, _: web.Application) -> None:
        self._loop = asyncio.get_running_loop()

    # The controller's side; thread-safe.

    def set_group(
        self,
        key: str,
        *,
        status: JobStatus,
        job_uid: str,
        alive: Mapping[str, str],
        minimum: int,
        leaving: Leaving = STAYING,
        rules: GroupRules = DEFAULT_RULES,
    ) -> None:
        """Set who is alive (uid -> worker name), who of them is to leave, and how the group is run.

        `status` initialises the group of a job that this service does not know yet: one that was deleted and created
        again under its name is another job, and the agents of the old one get 410.
        """
        with self._lock:
            group = self.groups.get(key)
            replaced = group is not None and group.job_uid != job_uid
            if group is None or replaced:
                self._forget(key)
                self._begun_anew.discard(key)
                group = self.groups[key] = Group.restored(job_uid, status)
            self._tokens[key] = status.token
            known = (group.alive, group.minimum, group.leaving, group.notices.given, group.rules)
            told = leaving.told | group.notices.departing
            if known == (alive, minimum, told, leaving.notices, rules) and not replaced:
                return
            group.rules, group.notices.given = rules, leaving.notices
            group.set_alive(alive, minimum, self._clock(), leaving.told)
        self._wake(key)

    def report_loss(self, key: str, uid: str) -> None:
        """A worker has just ended: update its group at once, before the controller's next pass."""
        with self._lock:
            group = self.groups.get(key)
            if group is None or uid not in group.alive:
                return
            others = {other: name for other, name in group.alive.items() if other != uid}
            group.set_alive(others, group.minimum, self._clock(), group.leaving)
        self._wake(key)

    def lose_touch(self, key: str, uid: str) -> None:
        """The host of a worker no longer answers; called on the event loop's thread."""
        with self._lock:
            group = self.groups.get(key)
            if group is not None:
                group.lose_touch(uid, self._clock())
        self._settle(key, moved=True)

    def view(self, key: str, job_uid: str) -> GroupView:
        """Return what is known of the job with this uid; empty for an unknown one."""
        with self._lock:
            group = self.groups.get(key)
            if group is None or group.job_uid != job_uid:
                return GroupView()
            known, silent = group.history, frozenset(group.silent)
            return GroupView(
                known.progress,
                known.checkpoint,
                tuple(known.generations),
                silent,
                group.growth,
                describe_activity(group),
                group.usage.of_group(group.alive),
                dict(group.notices.told),
            )

    def drop(self, key: str) -> None:
        """Forget a job; its agents get 410."""
        with self._lock:
            self._forget(key)
            self._begun_anew.discard(key)
        self._wake(key)

    def begin_anew(self) -> None:
        """Know of the groups what a service that has just been started does: agents could not tell it anything.

        They get 503 until `set_group`, and are not taken for silent because nobody listened.
        """
        with self._lock:
            keys = list(self.groups)
            self._begun_anew |= set(keys)
            for key in keys:
                self._forget(key)
        for key in keys:
            self._wake(key)

    def _forget(self, key: str) -> None:
        group = self.groups.pop(key, None)
        if group is not None:
            self._limiter.forget(group.job_uid)
            self._bodies.forget(group.job_uid)
        self._encoded.pop(key, None)
        self._tokens.pop(key, None)

    def _wake(self, key: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, key, True)

    def _settle(self, key: str, moved: bool = False) -> None:
        """Let a group do what is due, wake its polls if it has moved, and come again at its next deadline."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        with self._lock:
            group = self.groups.get(key)
            before, silent = (group.situation, len(group.silent)) if group else (None, 0)
            wait_s = group.settle(self._clock()) if group else None
            is_news = group is not None and len(group.silent) > silent
        if is_news:
            self._on_change(key)
        if moved or (group is not None and group.situation is not before):
            for poll in self._polls.pop(key, ()):
                self.turns.queue(key, partial(_wake, poll))
            if group is None:
                self.turns.forget(key)
        if wait_s is not None and self._loop is not None:
            self._timers[key] = self._loop.call_later(max(wait_s, SHORTEST_WAIT_S), self._settle, key)

    @contextmanager
    def _changing(self, caller: Caller) -> Iterator[tuple[Group, float]]:
        """Hold a group, and the time, to change it; what follows from the change is done afterwards."""
        with self.turns.measured(caller.key):
            with self._lock:
                group = self._group(caller)
                before = group.situation
                try:
                    yield group, self._clock()
                finally:
                    moved = group.situation is not before
            self._settle(caller.key, moved)

    # The agents' side; on the event loop.

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            caller = self._authorise(request.rel_url.raw_path, request.headers.get("Authorization", ""))
            answer = await self._answer(caller, request)
            if not self._may_act():
                raise _away()
        except Refused as refusal:
            error = refusal if self._may_act() else _away()
            response = web.json_response({"error": str(error)}, status=error.status)
            if not error.keeps_open:
                response.force_close()
            return response
        return web.json_response(answer) if isinstance(answer, dict) else web.json_response(text=answer)

    async def _answer(self, caller: Caller, request: web.Request) -> dict[str, Any] | str:
        verbs: dict[str, Callable[[Caller, Mapping[str, Any]], Awaitable[dict[str, Any] | str]]] = {
            "join": self._join,
            "watch": self._watch,
            "finish": self._finish,
            "notice": self._notice,
            "leave": self._leave,
            "fail": self._fail,
            "heartbeat": self._heartbeat,
            "report": self._report,
        }
        body = await self._bodies.read(request, caller)
        self._limiter.check(caller, time.monotonic())
        verb = verbs.get(request.path.rpartition("/")[2])
        if verb is None or request.method != "POST":
            raise Refused(404, "unknown verb")
        watch_host(request.transport)
        try:
            return await verb(caller, body)
        except asyncio.CancelledError:
            if has_lost_host(request.content.exception()):
                self.lose_touch(caller.key, as_text(body.get("uid")))
            raise

    def recognise(self, path: str, authorization: str) -> tuple[Caller, int]:
        """The job that a request is of, and how many connections it may have. Raises Refused."""
        if not self._may_act():
            raise _away()
        caller = self._authorise(path, authorization)
        with self._lock:
            return caller, most_connections(len(self._group(caller).alive))

    def _authorise(self, path: str, authorization: str) -> Caller:
        """The job whose token it is."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise Refused(404, "there is nothing here")
        key = f"{unquote(found[1])}/{unquote(found[2])}"
        with self._lock:
            group = self.groups.get(key)
            found_running = (group.job_uid, self._tokens.get(key)) if group else None
        running = found_running or self._find_running(key)
        if running is None:
            raise Refused(410, f"no running job {key}")  # the same for a job that has ended and one that never existed
        uid, token = running
        self._check_token(key, uid, token, authorization)
        if group is None:
            raise Refused(503, f"job {key} has not been reconciled yet")
        return Caller(key, uid)

    def _check_token(self, key: str, uid: str, token: TokenStatus | None, authorization: str) -> None:
        """Raises Refused unless a token that is good now was shown."""
        # A header may contain any bytes; those that are not text arrive as surrogates.
        given, now = authorization.encode("utf-8", "surrogateescape"), self._clock()

        def is_one_of(numbers: Iterable[int]) -> bool:
            wanted = (f"Bearer {self._token_for(uid, number)}".encode() for number in numbers)
            return any(hmac.compare_digest(given, each) for each in wanted)

        if is_one_of(accepted_numbers(token, now)):
            return
        if is_one_of(expired_numbers(token, now)):
            raise Refused(503, f"this token of job {key} has expired: a newer one is on its way to its workers")
        raise Refused(401, f"wrong token for job {key}")

    def _find_running(self, key: str) -> tuple[str, TokenStatus | None] | None:
        """The uid and token of a job that exists and has not ended; all its workers ask at once after a restart."""
        manifest = self._find_job(key) or {}
        metadata, status = as_mapping(manifest.get("metadata")), as_mapping(manifest.get("status"))
        is_over = metadata.get("deletionTimestamp") is not None or status.get("phase") in _TERMINAL
        uid = as_text(metadata.get("uid"))
        if is_over or not uid:
            return None
        token = status.get("token")
        return uid, from_json(TokenStatus, token) if isinstance(token, Mapping) else None

    async def _join(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any] | str:
        member, generation = read_member(body), read_int(body, "generation", 0, MAX_GENERATION)
        unprepared = body.get("prepared") is False
        with self._changing(caller) as (group, now):
            if group.state is GroupState.OVER:
                return {"state": "over"}
            if member.uid not in group.alive:
                raise Refused(409, f"worker {member.name} is not one of the live workers of {caller.key}")
            if unprepared and group.has_to_prepare(member, generation, now):
                return {"state": "prepare", "ranks": group.ranks_of_others(member)}
            recall_failure(group, body, member, generation, now)
            serves_commands = body.get("serves_commands") is True
            group.join(member, generation, now, stay=body.get("stays") is True, serves_commands=serves_commands)
            note_sign(group, body, now)

        def world(group: Group) -> GroupWorld | str | None:
            if group.state is GroupState.OVER:
                return "over"
            if member.uid not in group.alive:
                raise Refused(409, f"worker {member.name} is no longer one of the live workers of {caller.key}")
            if unprepared and group.has_to_prepare(member, generation, self._clock()):
                return "prepare"  # it has turned out that the ranks of the others stay
            found = group.world
            return found if found and group.is_member(member.uid) and found.generation > generation else None

        formed = await self._poll(caller, world)
        if formed == "prepare":
            self._settle(caller.key, moved=True)
            with self._lock:
                return {"state": formed, "ranks": self._group(caller).ranks_of_others(member)}
        if not isinstance(formed, GroupWorld):
            return {"state": formed or "waiting"}
        self._on_change(caller.key)
        return self._encode(caller.key, formed)

    def _encode(self, key: str, world: GroupWorld) -> str:
        """The generation as JSON, encoded once, as every member gets the same. A rerun starts at 1 again."""
        cached = self._encoded.get(key)
        if cached is None or cached[0] is not world:
            members = [
                {"uid": each.uid, "name": each.name, "host": each.host, "port": each.port, "slots": each.slots}
                for each in world.members
            ]
            text = json.dumps({"state": "formed", "generation": world.generation, "members": members})
            cached = self._encoded[key] = (world, text)
        return cached[1]

    async def _watch(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = read_text(body, "uid"), read_int(body, "generation", 0, MAX_GENERATION)
        world = await self._bodies.work(lambda: read_world(body, uid, generation)) if "members" in body else None
        with self._changing(caller) as (group, now):
            is_news = note_sign(group, body, now)
            if uid in group.alive and group.adopts(generation):
                if world is None:
                    return {"state": "unknown", "reason": "the service was restarted: send the members"}
                serves_commands = body.get("serves_commands") is True
                group.adopt(world, now, stay=body.get("stays") is True, serves_commands=serves_commands)
                is_news = True
        if is_news:
            self._on_change(caller.key)

        draining = body.get("draining") is True
        answer = await self._poll(caller, lambda group: _watch_answer(group, uid, generation, draining=draining))
        return answer or {"state": "current", "reason": ""}

    async def _finish(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = read_text(body, "uid"), read_int(body, "generation", 0, MAX_GENERATION)
        with self._changing(caller) as (group, now):
            note_sign(group, body, now)
            group.finish(uid, generation, now, for_all=body.get("for_all") is True)

        def state_of(group: Group) -> str | None:
            if group.state is GroupState.OVER:
                return "done"
            if group.adopts(generation):
                return None  # its peers have not called yet
            if group.world is None or group.world.generation != generation:
                return "rejoin"  # somebody was lost who had not finished: it is done again
            # Told to a restarted service that did not know the generation yet: it is to be told once more.
            return "waiting" if uid in group.members and uid not in group.finished else None

        return {"state": await self._poll(caller, state_of) or "waiting"}

    async def _notice(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        """A worker has to go: at once, or it asks how long it may stay.

        Of a signal the controller knows by when; of its cloud's word the launcher says `in_s` (None: it has no time).
        """
        uid, reason = read_text(body, "uid"), read_text(body, "reason")
        if body.get("stays") is not True:
            with self._changing(caller) as (group, now):
                group.notice(uid, f"{group.alive.get(uid, 'a worker')} has to stop: {reason}", now)
            return {}
        if "in_s" in body:
            in_s = read_seconds(body, "in_s")
            with self._changing(caller) as (group, now):
                group.warn(uid, Notice(reason, None if in_s is None else now + in_s), now)
            self._on_change(caller.key)
        else:
            await self._poll(caller, lambda group: uid in group.leaving | group.notices.given.keys() or None, SEEN_S)
        with self._lock:
            group, now = self._group(caller), self._clock()
            stay_s, notice = group.stay_s(uid, now), group.notices.of(uid)
        left_s = None if notice is None or notice.deadline is None else max(0.0, notice.deadline - now)
        return {"stay_s": None if stay_s == math.inf else stay_s, "left_s": left_s}

    async def _leave(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, reason = read_text(body, "uid"), read_text(body, "reason")
        with self._changing(caller) as (group, now):
            group.leave(uid, f"{group.alive.get(uid, 'a worker')} leaves: {reason}", now)
        return {}

    async def _fail(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = read_text(body, "uid"), read_int(body, "generation", 0, MAX_GENERATION)
        with self._changing(caller) as (group, now):
            note_sign(group, body, now)
            group.fail(read_end(body, uid, group.alive.get(uid, uid), now), generation, now)

        def answer(group: Group) -> dict[str, Any] | None:
            verdict = group.verdict(uid, generation)
            excused = verdict == "rejoin" and group.is_excused(uid, generation)
            found = {"error": group.error_of(uid, generation)} if verdict == "exit" else {}
            return {"verdict": verdict, **({"excused": True} if excused else {}), **found} if verdict else None

        return await self._poll(caller, answer) or {"verdict": "pending"}

    async def _heartbeat(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        read_text(body, "uid")
        with self._lock:
            group = self._group(caller)
            is_new = note_sign(group, body, self._clock())
        if is_new:
            self._settle(caller.key)  # newcomers may be waiting for it
            self._on_change(caller.key)
        return {}

    async def _report(self, caller: Caller, body: Mapping[str, Any]) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or len(messages) > MAX_REPORTS:
            raise Refused(400, f"messages: expected a list of at most {MAX_REPORTS}")
        now, changed = self._clock(), False
        with self.turns.measured(caller.key), self._lock:
            group = self._group(caller)
            settled = group.history.newest is not None and group.history.newest.first_step_at is not None
            stayed = group.stays
            every_s = len(group.members) / REPORTS_PER_S
            for message in messages:
                if isinstance(message, Mapping):
                    changed |= note_report(group, message, now)
        if changed:
            if not settled or group.unreachable:
                self._settle(
                    caller.key, moved=group.stays and not stayed
                )  # newcomers wait for a first step; ranks that stand still, for a lost one
            self._on_change(caller.key)
        return {"every_s": every_s}

    def _group(self, caller: Caller) -> Group:
        """The caller's group: the job may have been deleted since it asked, and another one have taken its name."""
        group = self.groups.get(caller.key)
        if group is None and caller.key in self._begun_anew:
            raise Refused(503, f"job {caller.key} has not been reconciled yet")
        if group is None or group.job_uid != caller.job_uid:
            raise Refused(410, f"no running job {caller.key}")
        return group

    async def _poll(
        self, caller: Caller, ready: Callable[[Group], T | None], within_s: float | None = None
    ) -> T | None:
        """Wait at most `within_s` seconds, by default `POLL_S`, until `ready` has an answer."""
        deadline = time.monotonic() + (POLL_S if within_s is None else within_s)
        while True:
            with self._lock:
                answer = ready(self._group(caller))
            left_s = deadline - time.monotonic()
            if answer is not None or left_s <= 0:
                return answer
            waiting = self._polls.setdefault(caller.key, {})
            poll = asyncio.get_running_loop().create_future()
            waiting[poll] = None
            try:
                await asyncio.wait_for(poll, left_s)
            except TimeoutError:
                continue
            finally:
                waiting.pop(poll, None)


def _away() -> Refused:
    """A refusal of the worker would be wrong: the replica that leads now may know it."""
    return Refused(503, "this replica no longer leads")


def _watch_answer(group: Group, uid: str, generation: int, *, draining: bool) -> dict[str, Any] | None:
    """What a member of that generation is to know; None as long as there is nothing new. `draining`: it drains."""
    if uid not in group.alive:
        return {"state": "stale", "reason": "removed"}
    if group.state is GroupState.OVER:
        return {"state": "stale", "reason": "the job is done"} if group.serves_commands else None
    if group.world is None:
        return {"state": "stale", "reason": group.reason}
    if group.world.generation != generation or not group.is_member(uid):
        return {"state": "stale", "reason": "another generation"}
    if group.drain is None or draining:
        return None
    return {"state": "drain", "reason": group.drain.reason, "leave": uid in group.notices.departing}


def _wake(poll: asyncio.Future[None]) -> None:
    if not poll.done():
        poll.set_result(None)
