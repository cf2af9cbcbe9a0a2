"""What the rendezvous service accepts: requests checked field by field, and the reports of ranks.

Everything here comes from a worker, which is the user's code: sizes and ranges are bounded, and garbage is refused with
a 4xx (`Refused`) or, within a batch of reports, passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from elasticctl.codec import from_json
from elasticctl.status import Progress
from elasticctl_controller.membership import Group, Member, World

MAX_TEXT = 512
MAX_METRICS = 64
MAX_MEMBERS = 10_000
BURST, RATE_PER_S = 20_000.0, 10_000.0
MAX_GENERATION = MAX_STEP = 1 << 53


class Refused(Exception):
    """A request that is answered with an HTTP error and changes nothing."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Limiter:
    """A token bucket per job: a script gone wild must not take the service from the other jobs.

    Lets `BURST` requests through at once and `RATE_PER_S` in the long run, which is several times what the 2,000
    workers of the largest job need.
    """

    def __init__(self) -> None:
        self._buckets: dict[str, tuple[float, float]] = {}

    def check(self, key: str, now_s: float) -> None:
        """Take one token of the job `key`; raises Refused (429) when there is none. `now_s` is of a monotonic clock."""
        tokens, at = self._buckets.get(key, (BURST, now_s))
        tokens = min(BURST, tokens + (now_s - at) * RATE_PER_S)
        if tokens < 1:
            raise Refused(429, f"too many requests for job {key}")
        self._buckets[key] = (tokens - 1, now_s)

    def forget(self, key: str) -> None:
        """Drop the bucket of a job that is over."""
        self._buckets.pop(key, None)


async def read_body(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON") from error
    if not isinstance(body, Mapping):
        raise Refused(400, "the body is not a JSON object")
    return body


def read_text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise Refused(400, f"{name}: text of 1 to {MAX_TEXT} characters is expected")
    return value


def read_int(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise Refused(400, f"{name}: an integer of {low} to {high - 1} is expected")
    return value


def read_member(body: object) -> Member:
    if not isinstance(body, Mapping):
        raise Refused(400, "a member is an object")
    return Member(
        uid=read_text(body, "uid"),
        name=read_text(body, "name"),
        host=read_text(body, "host"),
        port=read_int(body, "port", 1, 65536),
        slots=read_int(body, "slots", 1, 4096),
    )


def read_world(body: Mapping[str, Any], uid: str, generation: int) -> World:
    """The world that the caller `uid` says it is in."""
    members = body.get("members")
    if not isinstance(members, list) or len(members) > MAX_MEMBERS:
        raise Refused(400, f"members: a list of at most {MAX_MEMBERS} is expected")
    world = World(generation, tuple(read_member(item) for item in members))
    if all(member.uid != uid for member in world.members):
        raise Refused(400, "members: the caller is not among them")
    return world


def note_report(group: Group, message: Mapping[str, Any], now: float) -> bool:
    """Take over one report of a rank; True when the job's status should show it. Garbage is passed over."""
    kind, generation, step = message.get("kind"), message.get("generation"), message.get("step")
    if not isinstance(generation, int) or not isinstance(step, int) or not 0 <= step < MAX_STEP:
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
