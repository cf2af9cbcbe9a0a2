"""The rendezvous service: membership of the training groups, over HTTP.

One aiohttp application serves every job: `POST /v1/jobs/{namespace}/{name}/{verb}` with a JSON body and the job's
bearer token. `join`, `watch`, `finish` and `fail` are long polls, answered within `POLL_S`; the other verbs are
answered immediately. Every request is a sign of life; `heartbeat` is only that, for launchers without a poll under way.
While a poll is under way, the kernel asks the worker's host for a sign of life (`sockets`). The controller's thread
sets the live workers through `set_group`; the handlers run on the application's event loop.

Every pod of a cluster can reach the port. `listener` closes connections that show no valid token in time, and reads
only the head of a request without one. Requests with a token take turns (`fair_scheduling`), so that each job has its
share of the service's time.

All state is in `membership.Group`; `groups` holds all groups under one lock, with their polls and timers. `admission`
finds the job of a request, and `handlers` answers it. Nothing is on disk: agents report their group again to a
restarted service. Answers are fenced like writes: if two services form a group at the same time, agents listen to only
one of them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web

from elasticctl.api.status import (
    JobStatus,
)
from elasticctl_controller.core.group.failures import GroupRules
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.group.worker_tokens import EVERY_S
from elasticctl_controller.core.interruption_notices import Leaving
from elasticctl_controller.core.observation import GroupView
from elasticctl_controller.rendezvous.activity import describe_activity
from elasticctl_controller.rendezvous.admission import Authorization, most_connections
from elasticctl_controller.rendezvous.fair_scheduling import Turns
from elasticctl_controller.rendezvous.groups import Groups
from elasticctl_controller.rendezvous.handlers import Handlers
from elasticctl_controller.rendezvous.listener import connection_of
from elasticctl_controller.rendezvous.requests import (
    MAX_BODY_BYTES,
    Bodies,
    Caller,
    Limiter,
    Refused,
    checked,
)
from elasticctl_controller.rendezvous.sockets import watch_host
from elasticctl_protocol.requests import WIRE, Refusal, WatchRequest

DEFAULT_RULES, STAYING = GroupRules(), Leaving()


def steady_clock() -> Callable[[], float]:
    """A monotonic clock in seconds since the epoch: changes of the system's clock must not move a group's deadlines."""
    offset_s = time.time() - time.monotonic()
    return lambda: offset_s + time.monotonic()


class RendezvousService:
    """The service, and the controller's handle on it.

    `token_for(job_uid, number)` returns a bearer token of a job, which gets another one every `token_every_s`.
    `on_change(key)` is called on the event loop's thread when a job's view has changed in a way that its status should
    show. `may_act` says whether this replica still leads: once it does not, every answer is 503, and agents ask again
    elsewhere. `find_job(key)` returns the manifest of a job for which the controller, having just started, has not
    called `set_group` yet: until then its agents get 503.
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
        self._may_act = may_act
        self.groups = Groups(on_change, clock or steady_clock())
        self.authorization = Authorization(self.groups, token_for, find_job)
        self.handlers = Handlers(self.groups, Bodies())
        self._limiter = Limiter()

    @property
    def turns(self) -> Turns:
        """Each job's share of the event loop."""
        return self.groups.turns

    def app(self) -> web.Application:
        """Return the aiohttp application; serve it on any socket."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_startup.append(self._on_startup)
        return app

    async def _on_startup(self, _: web.Application) -> None:
        self.groups.start()

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
        """Set the live workers (uid -> name), which of them are leaving, and how the group is run.

        `status` initializes the group of a job that this service does not know yet. A job that was deleted and created
        again under its name is another job, and the agents of the old one get 410.
        """
        with self.groups.lock:
            group = self.groups.by_key.get(key)
            replaced = group is not None and group.job_uid != job_uid
            if group is None or replaced:
                self._drop_group(key)
                self.groups.restarted.discard(key)
                group = self.groups.by_key[key] = Group.restored(job_uid, status)
            self.authorization.tokens[key] = status.token
            members, notices = group.members, group.notices
            known = (members.alive, members.minimum, members.leaving, notices.given, group.rules)
            stopping = leaving.stopping | notices.departing
            if known == (alive, minimum, stopping, leaving.notices, rules) and not replaced:
                return
            group.set_rules(rules)
            notices.give(leaving.notices)
            group.set_alive(alive, minimum, self.groups.clock(), leaving.stopping)
        self.groups.wake(key)

    def report_loss(self, key: str, uid: str) -> None:
        """A worker has just ended: update its group immediately, before the controller's next pass."""
        with self.groups.lock:
            group = self.groups.by_key.get(key)
            if group is None or uid not in group.members.alive:
                return
            others = {other: name for other, name in group.members.alive.items() if other != uid}
            group.set_alive(others, group.members.minimum, self.groups.clock(), group.members.leaving)
        self.groups.wake(key)

    def lose_contact(self, key: str, uid: str, *, hung_up: bool) -> None:
        """The host of a worker no longer answers, or its launcher has hung up; called on the event loop's thread."""
        with self.groups.lock:
            group = self.groups.by_key.get(key)
            if group is not None:
                group.lose_contact(uid, self.groups.clock(), hung_up=hung_up)
        self.groups.apply_due(key, moved=True)

    def view(self, key: str, job_uid: str) -> GroupView:
        """Return what is known about the job with this uid; empty for an unknown one."""
        with self.groups.lock:
            group = self.groups.by_key.get(key)
            if group is None or group.job_uid != job_uid:
                return GroupView()
            known, silent = group.history, frozenset(group.signs.silent)
            return GroupView(
                known.progress,
                known.checkpoint,
                tuple(known.generations),
                silent,
                group.next_generation.growth,
                describe_activity(group),
                group.usage.of_group(group.members.alive),
                dict(group.notices.reported),
            )

    def drop(self, key: str) -> None:
        """Drop a job; its agents get 410."""
        with self.groups.lock:
            self._drop_group(key)
            self.groups.restarted.discard(key)
        self.groups.wake(key)

    def start_over(self) -> None:
        """Start over like a service that has just been started, because agents could not report anything for a while.

        They get 503 until `set_group`, and do not count as silent for the time in which they could not be heard.
        """
        with self.groups.lock:
            keys = list(self.groups.by_key)
            self.groups.restarted |= set(keys)
            for key in keys:
                self._drop_group(key)
        for key in keys:
            self.groups.wake(key)

    def _drop_group(self, key: str) -> None:
        group = self.groups.by_key.pop(key, None)
        if group is not None:
            self._limiter.drop(group.job_uid)
        self.handlers.drop_job(key)
        self.authorization.tokens.pop(key, None)

    # The agents' side; on the event loop.

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            caller = self.authorization.identify(request.rel_url.raw_path, request.headers.get("Authorization", ""))
            answer = await self._answer(caller, request)
            if not self._may_act():
                raise _not_leading()
        except Refused as refusal:
            error = refusal if self._may_act() else _not_leading()
            response = web.json_response(WIRE.encode(Refusal(str(error))), status=error.status)
            if not error.keeps_open:
                response.force_close()
            return response
        return web.json_response(text=answer if isinstance(answer, str) else json.dumps(WIRE.encode(answer) or {}))

    async def _answer(self, caller: Caller, request: web.Request) -> Any:
        found = self.handlers.find(request.path.rpartition("/")[2])
        cls, verb = found or (Refusal, None)
        message = await self.handlers.bodies.read(request, caller, cls)
        self._limiter.check(caller, time.monotonic())
        if verb is None or request.method != "POST":
            raise Refused(404, "unknown verb")
        message = checked(message)
        watch_host(request.transport)
        connection = connection_of(request)
        if connection is not None:
            connection.identify(getattr(message, "uid", ""), watches=cls is WatchRequest)
        return await verb(caller, message)

    def authenticate(self, path: str, authorization: str) -> tuple[Caller, int]:
        """The job that a request belongs to, and how many connections it may have. Raises Refused."""
        if not self._may_act():
            raise _not_leading()
        caller = self.authorization.identify(path, authorization)
        with self.groups.lock:
            return caller, most_connections(len(self.groups.of(caller).members.alive))


def _not_leading() -> Refused:
    """The answer of a replica that does not lead. It must not refuse the worker, which the leader may know."""
    return Refused(503, "this replica no longer leads")
