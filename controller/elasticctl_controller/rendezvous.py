"""The rendezvous service: who is in the training group, over HTTP.

One aiohttp application serves every job: `POST /v1/jobs/{namespace}/{name}/{verb}` with a JSON body and the job's
bearer token. `join`, `watch` and `finish` are long polls, answered within `POLL_S`; `leave`, `fail` and `report` answer
at once. The controller's thread says who is alive through `set_group`; the handlers run on the application's event loop.
All state is in `membership.Group`, under one lock; nothing is on disk, because agents fill a restarted service in again.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from aiohttp import web

from elasticctl.codec import from_json
from elasticctl.status import CheckpointStatus, Generation, JobStatus, Progress
from elasticctl_controller.membership import Group, Member, World

POLL_S = 20.0
MAX_BODY_BYTES = 256 * 1024
MAX_REPORTS = 256
MAX_TEXT = 512
MAX_METRICS = 64

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupView:
    """What the service knows of a job, for its status."""

    progress: Progress | None = None
    checkpoint: CheckpointStatus | None = None
    generations: tuple[Generation, ...] = ()


class _Refused(Exception):
    """A request that is answered with an HTTP error and changes nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class RendezvousService:
    """The service and the controller's handle on it; see the module's docstring.

    `token_for(job_uid)` gives a job's bearer token; `on_change(key)` is called from the event loop's thread when a
    job's view changed in a way its status should show.
    """

    def __init__(
        self,
        token_for: Callable[[str], str],
        on_change: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._token_for, self._on_change, self._clock = token_for, on_change, clock
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}
        self._changed: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._encoded: dict[str, tuple[int, str]] = {}

    def app(self) -> web.Application:
        """The aiohttp application; serve it on any socket."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/jobs/{namespace}/{name}/{verb}", self._handle)
        app.on_startup.append(self._started)
        return app

    async def _started(self, _: web.Application) -> None:
        self._loop = asyncio.get_running_loop()

    # The controller's side; thread-safe.

    def set_group(self, key: str, *, status: JobStatus, job_uid: str, alive: Mapping[str, str], minimum: int) -> None:
        """Say who is alive (uid -> worker name). `status` seeds a job that this service does not know yet."""
        with self._lock:
            group = self._groups.get(key)
            if group is None or group.job_uid != job_uid:
                group = self._groups[key] = Group.restored(job_uid, status)
            if group.alive == alive and group.min == minimum:
                return
            group.set_alive(alive, minimum, self._clock())
        self._wake(key)

    def lose(self, key: str, uid: str) -> None:
        """A worker has just ended: tell its group at once, ahead of the controller's next pass."""
        with self._lock:
            group = self._groups.get(key)
            if group is None or uid not in group.alive:
                return
            group.set_alive({u: n for u, n in group.alive.items() if u != uid}, group.min, self._clock())
        self._wake(key)

    def view(self, key: str) -> GroupView:
        """What is known of a job; empty for one that is not."""
        with self._lock:
            group = self._groups.get(key)
            if group is None:
                return GroupView()
            return GroupView(group.progress, group.checkpoint, tuple(group.records))

    def drop(self, key: str) -> None:
        """Forget a job; its agents are answered 410."""
        with self._lock:
            self._groups.pop(key, None)
            self._encoded.pop(key, None)
        self._wake(key)

    def _wake(self, key: str) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake_here, key)

    def _wake_here(self, key: str) -> None:
        event = self._changed.pop(key, None)
        if event is not None:
            event.set()

    # The agents' side; on the event loop.

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        verbs: dict[str, Callable[[str, Mapping[str, Any]], Awaitable[dict[str, Any] | str]]] = {
            "join": self._join,
            "watch": self._watch,
            "finish": self._finish,
            "leave": self._leave,
            "fail": self._fail,
            "report": self._report,
        }
        try:
            verb = verbs.get(request.match_info["verb"])
            if verb is None:
                raise _Refused(404, "unknown verb")
            key = f"{request.match_info['namespace']}/{request.match_info['name']}"
            self._authorise(key, request.headers.get("Authorization", ""))
            answer = await verb(key, await _body(request))
        except _Refused as error:
            return web.json_response({"error": str(error)}, status=error.status)
        if isinstance(answer, str):
            return web.Response(text=answer, content_type="application/json")
        return web.json_response(answer)

    def _authorise(self, key: str, header: str) -> None:
        with self._lock:
            group = self._groups.get(key)
            uid = group.job_uid if group else None
        if uid is None:
            # The same answer for a job that is over and one that never was; a restarting service knows its jobs soon.
            raise _Refused(410, f"no running job {key}")
        if not hmac.compare_digest(header.encode(), f"Bearer {self._token_for(uid)}".encode()):
            raise _Refused(401, f"wrong token for job {key}")

    async def _join(self, key: str, body: Mapping[str, Any]) -> dict[str, Any] | str:
        member, generation = _member(body), _int(body, "generation", 0, 1 << 53)
        with self._lock:
            group = self._group(key)
            if member.uid not in group.alive:
                raise _Refused(409, f"worker {member.name} is not one of the live workers of {key}")
            group.join(member, generation, self._clock())
        self._wake_here(key)

        def world(group: Group) -> World | None:
            if member.uid not in group.alive:
                raise _Refused(409, f"worker {member.name} is no longer one of the live workers of {key}")
            found = group.world
            return found if found and member.uid in group.order and found.generation > generation else None

        formed = await self._poll(key, world)
        if formed is None:
            return {"state": "waiting"}
        self._on_change(key)
        return self._encode(key, formed)

    def _encode(self, key: str, world: World) -> str:
        """The world as JSON, encoded once a generation: every member gets the same."""
        cached = self._encoded.get(key)
        if cached is None or cached[0] != world.generation:
            members = [asdict(member) for member in world.members]
            text = json.dumps({"state": "formed", "generation": world.generation, "members": members})
            cached = self._encoded[key] = (world.generation, text)
        return cached[1]

    async def _watch(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = _text(body, "uid"), _int(body, "generation", 0, 1 << 53)
        members = body.get("members")
        if not isinstance(members, list) or len(members) > 10_000:
            raise _Refused(400, "members: a list is expected")
        world = World(generation, tuple(_member(item) for item in members))
        if uid not in {member.uid for member in world.members}:
            raise _Refused(400, "members: the caller is not among them")
        with self._lock:
            group = self._group(key)
            if uid in group.alive:
                group.adopt(world)

        def stale(group: Group) -> str | None:
            if uid not in group.alive:
                return "removed"
            if group.world is None:
                return group.reason
            return None if group.world.generation == generation and uid in group.order else "another generation"

        reason = await self._poll(key, stale)
        return {"state": "current"} if reason is None else {"state": "stale", "reason": reason}

    async def _finish(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = _text(body, "uid"), _int(body, "generation", 0, 1 << 53)
        with self._lock:
            self._group(key).finish(uid)
        self._wake_here(key)

        def done(group: Group) -> str | None:
            if group.world is None or group.world.generation != generation:
                return "done"  # the others went on without us: our ranks have nothing left to do
            return "done" if group.finish(uid) else None

        return {"state": await self._poll(key, done) or "waiting"}

    async def _leave(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._lock:
            group = self._group(key)
            uid = _text(body, "uid")
            name = group.alive.get(uid, "a worker")
            group.leave(uid, f"{name} leaves: {_text(body, 'reason')}", self._clock())
        self._wake_here(key)
        return {}

    async def _fail(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        uid, generation = _text(body, "uid"), _int(body, "generation", 0, 1 << 53)
        with self._lock:
            group = self._group(key)
            blamed = group.fail(
                uid, group.alive.get(uid, uid), generation, of_peers=body.get("of_peers") is True, now=self._clock()
            )
        self._wake_here(key)
        return {"verdict": "exit" if blamed else "rejoin"}

    async def _report(self, key: str, body: Mapping[str, Any]) -> dict[str, Any]:
        messages = body.get("messages")
        if not isinstance(messages, list) or len(messages) > MAX_REPORTS:
            raise _Refused(400, f"messages: a list of at most {MAX_REPORTS} is expected")
        now, changed = self._clock(), False
        with self._lock:
            group = self._group(key)
            for message in messages:
                if isinstance(message, Mapping):
                    changed |= _note(group, message, now)
        if changed:
            self._on_change(key)
        return {}

    def _group(self, key: str) -> Group:
        group = self._groups.get(key)
        if group is None:
            raise _Refused(410, f"no running job {key}")
        return group

    async def _poll(self, key: str, ready: Callable[[Group], T | None]) -> T | None:
        """Wait until `ready` has an answer, at most `POLL_S`; settle the group when one of its deadlines passes."""
        deadline = time.monotonic() + POLL_S
        while True:
            changed = self._changed.setdefault(key, asyncio.Event())
            with self._lock:
                group = self._group(key)
                before = group.world
                settle_s = group.settle(self._clock())
                answer = ready(group)
                moved = group.world is not before
            if moved:
                self._wake_here(key)
            left_s = deadline - time.monotonic()
            if answer is not None or left_s <= 0:
                return answer
            try:
                await asyncio.wait_for(changed.wait(), min(left_s, settle_s if settle_s is not None else POLL_S))
            except TimeoutError:
                continue


def _note(group: Group, message: Mapping[str, Any], now: float) -> bool:
    """Take over one report of a rank; True when the job's status should show it. Garbage is passed over."""
    kind, generation, step = message.get("kind"), message.get("generation"), message.get("step")
    if not isinstance(generation, int) or not isinstance(step, int) or not 0 <= step < 1 << 53:
        return False
    if kind == "progress":
        group.note_step(generation, _progress(message), now)
    elif kind == "resumed":
        group.note_resumed(generation, step)
    elif kind == "committed":
        size, duration = message.get("size_bytes"), message.get("duration_s")
        group.note_commit(
            step,
            str(message.get("url", ""))[:MAX_TEXT],
            size if isinstance(size, int) else 0,
            float(duration) if isinstance(duration, int | float) else 0.0,
            now,
        )
    else:
        return False
    return True


def _progress(message: Mapping[str, Any]) -> Progress:
    metrics = message.get("metrics")
    numbers = metrics if isinstance(metrics, Mapping) else {}
    finite = {
        str(name)[:64]: float(value)
        for name, value in list(numbers.items())[:MAX_METRICS]
        if isinstance(value, int | float) and math.isfinite(value)
    }
    camel = {"totalSteps": message.get("total_steps"), "totalEpochs": message.get("total_epochs")}
    rate = {"samplesPerS": message.get("samples_per_s")}
    plain = {"step": message.get("step"), "epoch": message.get("epoch"), "metrics": finite}
    return from_json(Progress, {**plain, **camel, **rate})


async def _body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise _Refused(400, "the body is not JSON") from error
    if not isinstance(body, Mapping):
        raise _Refused(400, "the body is not a JSON object")
    return body


def _text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise _Refused(400, f"{name}: text of 1 to {MAX_TEXT} characters is expected")
    return value


def _int(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise _Refused(400, f"{name}: an integer of {low} to {high - 1} is expected")
    return value


def _member(body: object) -> Member:
    if not isinstance(body, Mapping):
        raise _Refused(400, "a member is an object")
    return Member(
        uid=_text(body, "uid"),
        name=_text(body, "name"),
        host=_text(body, "host"),
        port=_int(body, "port", 1, 65536),
        slots=_int(body, "slots", 1, 4096),
    )
