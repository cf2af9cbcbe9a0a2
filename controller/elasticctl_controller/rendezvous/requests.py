"""Requests to the rendezvous service: how large and how slow they may be, and whether they are valid.

Everything here comes from a worker, which runs the user's code: sizes and ranges are limited, and invalid input is
refused with a 4xx (`Refused`). A value that an API server cannot store (NaN, a number beyond 64 bits, half a surrogate
pair) would keep the job's status from ever being written again.

A small body is read and parsed immediately. Each job may send one large body at a time, and large bodies are parsed in
a thread, one after the other: thousands of members take a tenth of a second.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import TypeGuard, TypeVar
from weakref import WeakValueDictionary

from aiohttp import web

from elasticctl.api.codec import Timestamp
from elasticctl.api.status import RankFailure
from elasticctl_controller.core.causes import clean_failure
from elasticctl_controller.core.group.failures import RanksEnd
from elasticctl_controller.core.group.group_states import GroupWorld
from elasticctl_controller.core.group.membership import Group
from elasticctl_protocol.requests import WIRE, FailureReport, Heartbeat, Polled, WatchRequest, problem_of

MAX_BODY_BYTES = 2 * 1024 * 1024
"""A `watch` may list its whole generation: some 100 bytes per member."""
BODY_S = 10.0
"""How long a body may take to arrive; a launcher that is cut off tries again."""
SMALL_BYTES = 32 * 1024
_DRAINED_BYTES = 2 * MAX_BODY_BYTES

MAX_MEMBERS = 10_000
MAX_FAILURES = 8
BURST, RATE_PER_S = 20_000.0, 10_000.0
MAX_STEP = 1 << 53
MAX_AGE_S = 366 * 86_400.0
"""The longest wait that a worker may report; longer ones are cut to this."""

T = TypeVar("T")


class Refused(Exception):
    """The request is answered with an HTTP error and changes nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def keeps_open(self) -> bool:
        """True if the request was read to its end and came from a worker, so that the connection can be used again."""
        return self.status in (400, 409, 429)


@dataclass(frozen=True, slots=True)
class Caller:
    """The job whose agent is calling: its key, and its uid, because another job may take the name at any moment."""

    key: str
    job_uid: str


class Limiter:
    """A token bucket for each job: a runaway script must not block the service for other jobs.

    It allows bursts of `BURST` requests and `RATE_PER_S` per second in the long run, several times what the 2,000
    workers of the largest job need.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}  # by job uid

    def check(self, caller: Caller, now_s: float) -> None:
        """Take a token of the job; raises Refused (429) if there is none. `now_s` is from a monotonic clock."""
        tokens, at = self._buckets.get(caller.job_uid, (BURST, now_s))
        tokens = min(BURST, tokens + (now_s - at) * RATE_PER_S)
        if tokens < 1:
            raise Refused(429, f"too many requests for job {caller.key}")
        self._buckets[caller.job_uid] = (tokens - 1, now_s)

    def drop(self, job_uid: str) -> None:
        """Drop the bucket of a job that has ended."""
        self._buckets.pop(job_uid, None)


def parse_body(cls: type[T], raw: bytes) -> T:
    """The message of this class that a body is. Raises Refused if it is not a JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON") from error
    if not isinstance(body, Mapping):
        raise Refused(400, "the body is not a JSON object")
    return WIRE.decode(cls, body)


def checked(message: T) -> T:
    """The message, with texts that can be stored. Raises Refused if a field is missing or out of range."""
    problem = problem_of(message)
    if problem:
        raise Refused(400, problem)
    texts = {each.name: getattr(message, each.name) for each in fields(message)}  # type: ignore[arg-type]
    odd = {name: clean(text) for name, text in texts.items() if isinstance(text, str) and not text.isascii()}
    return replace(message, **odd) if odd else message  # type: ignore[type-var]


def read_world(request: WatchRequest) -> GroupWorld:
    """The generation that the caller reports to be in."""
    members = request.members or ()
    if len(members) > MAX_MEMBERS:
        raise Refused(400, f"members: expected a list of at most {MAX_MEMBERS}")
    world = GroupWorld(request.generation, tuple(checked(member) for member in members))
    if all(member.uid != request.uid for member in world.members):
        raise Refused(400, "members: the caller is not among them")
    return world


def seconds(value: float | None) -> float | None:
    """A time from now that a worker has sent, within limits; None if it is unknown."""
    return None if value is None else min(max(0.0, value), MAX_AGE_S)


def read_end(report: FailureReport, uid: str, name: str, now: float) -> RanksEnd:
    """How the ranks of the worker `uid` ended; `now` is in seconds since the epoch."""
    at, found = now - (seconds(report.ended_s_ago) or 0.0), report.failure
    failure = RankFailure(
        verdict=found.verdict,
        worker=name,
        rank=found.rank,
        exit_code=found.exit_code,
        signal=found.signal,
        error=found.error,
        last_lines=found.last_lines,
        at=Timestamp(at),
    )
    return RanksEnd(uid, name, at, clean_failure(failure), of_peers=report.of_peers, permanent=report.permanent)


def recall_failures(group: Group, failed: Iterable[FailureReport], uid: str, generation: int, now: float) -> None:
    """A worker of this generation may report earlier failures after which it restarted."""
    for report in tuple(failed)[-MAX_FAILURES:]:
        if is_whole(report.generation) and report.generation <= generation:
            end = read_end(report, uid, group.members.alive.get(uid, uid), now)
            group.recall(end, report.generation, now, newest=generation)


def note_sign(group: Group, request: Heartbeat | Polled, now: float) -> bool:
    """Record that a worker has called, and what it reports to be doing; True if that is something new."""
    return group.note_sign(request.uid, now, request.doing or "", seconds(request.since_s) or 0.0)


def is_whole(value: int | None) -> TypeGuard[int]:
    """True for a count that every JSON reader reads exactly."""
    return value is not None and 0 <= value < MAX_STEP


def clean(text: str) -> str:
    """Replace what UTF-8 cannot encode: lone surrogates, which undecodable bytes of a log become."""
    return text.encode("utf-8", "replace").decode("utf-8")


class Bodies:
    """Reads the bodies of requests from workers that have shown their token."""

    def __init__(self) -> None:
        self._large = WeakValueDictionary[str, asyncio.Lock]()  # by job uid, while a request holds it or waits for it
        self._worker = ThreadPoolExecutor(1, "bodies")

    async def read(self, request: web.Request, caller: Caller, cls: type[T]) -> T:
        """The message of this class in a request. Raises Refused, also if the body takes too long to arrive."""
        size = request.content_length
        if "Transfer-Encoding" in request.headers or size is None:
            raise Refused(411, "a body needs a Content-Length")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise Refused(415, "the body must not be encoded")
        if size > MAX_BODY_BYTES:
            await _drain(request)
            raise Refused(413, f"the body has more than {MAX_BODY_BYTES} bytes")
        if size <= SMALL_BYTES:
            return parse_body(cls, await _receive(request))
        async with self._large.setdefault(caller.job_uid, asyncio.Lock()):
            raw = await _receive(request)
            return await self.work(lambda: parse_body(cls, raw))

    async def work(self, work: Callable[[], T]) -> T:
        """Do slow work in a thread, apart from the event loop; returns, or raises, what it does."""
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


async def _receive(request: web.Request) -> bytes:
    try:
        return await asyncio.wait_for(request.read(), BODY_S)
    except TimeoutError as error:
        raise Refused(408, "the body did not arrive in time") from error
    except (ConnectionError, RuntimeError) as error:  # the worker has died: this answer is not read
        raise Refused(400, "the body is not whole") from error


async def _drain(request: web.Request) -> None:
    """Read part of a body that is too large, so that the sender gets to read the refusal."""

    async def drain() -> None:
        left = _DRAINED_BYTES
        while left > 0 and (chunk := await request.content.readany()):
            left -= len(chunk)

    try:
        await asyncio.wait_for(drain(), BODY_S)
    except (TimeoutError, ConnectionError, RuntimeError):
        return
