"""Validation of the requests to the rendezvous service, and of the reports of ranks.

Everything here comes from a worker, which runs the user's code: sizes and ranges are limited, and invalid input is
refused with a 4xx (`Refused`) or, within a batch of reports, skipped. A value that an API server cannot store (NaN, a
number beyond 64 bits, half a surrogate pair) would keep the job's status from ever being written again.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from elasticctl.api.codec import Timestamp, camel, from_json, to_rfc3339
from elasticctl.api.observed.ranks import RankPlace
from elasticctl.api.status import NOT_FINITE_VALUES, NotFiniteMetric, ProgressStatus, RankFailure
from elasticctl.api.usage import WorkerUsage
from elasticctl_controller.core.causes import parse_failure
from elasticctl_controller.core.group.failures import RanksEnd
from elasticctl_controller.core.group.group_states import GroupWorld, Member
from elasticctl_controller.core.group.membership import Group
from elasticctl_controller.core.history import COPIES, MAX_METRICS, MEMORY, STORAGE

MAX_TEXT = 512
MAX_MEMBERS = 10_000
MAX_SLOTS = 4096
MAX_RANKS = 100_000
MAX_GPUS = 32
MAX_FAILURES = 8
MAX_PLACE = 80
MAX_EXAMPLES = 8000
BURST, RATE_PER_S = 20_000.0, 10_000.0
MAX_GENERATION = MAX_STEP = 1 << 53
MAX_AGE_S = 366 * 86_400.0
"""The longest wait that a worker may report; longer ones are cut to this."""
ACTIVITIES = frozenset(
    {"preparing", "waiting", "starting", "running", "draining", "stopping", "exporting", "finishing", "hung"}
)
"""What a launcher may report to be doing."""


_CAMEL = {"exit_code": "exitCode", "last_lines": "lastLines"}
"""Requests use Python's style of names, termination messages Kubernetes' style."""


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

    It allows `BURST` requests at once and `RATE_PER_S` per second in the long run, several times what the 2,000 workers
    of the largest job need.
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

    def forget(self, job_uid: str) -> None:
        """Drop the bucket of a job that has ended."""
        self._buckets.pop(job_uid, None)


def parse_body(raw: bytes) -> Mapping[str, Any]:
    """The JSON object that a body is."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON") from error
    if not isinstance(body, Mapping):
        raise Refused(400, "the body is not a JSON object")
    return body


def read_text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= MAX_TEXT:
        raise Refused(400, f"{name}: expected text of 1 to {MAX_TEXT} characters")
    return _clean(value)


def read_int(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value < high:
        raise Refused(400, f"{name}: expected an integer from {low} to {high - 1}")
    return value


def read_seconds(body: Mapping[str, Any], name: str) -> float | None:
    """A time from now, in seconds; None if it is unknown."""
    value = _finite(body.get(name))
    return None if value is None else min(max(0.0, value), MAX_AGE_S)


def read_member(body: object) -> Member:
    if not isinstance(body, Mapping):
        raise Refused(400, "a member must be a JSON object")
    return Member(
        uid=read_text(body, "uid"),
        name=read_text(body, "name"),
        host=read_text(body, "host"),
        port=read_int(body, "port", 1, 65536),
        slots=read_int(body, "slots", 1, MAX_SLOTS),
    )


def read_world(body: Mapping[str, Any], uid: str, generation: int) -> GroupWorld:
    """The generation that the caller `uid` reports to be in."""
    members = body.get("members")
    if not isinstance(members, list) or len(members) > MAX_MEMBERS:
        raise Refused(400, f"members: expected a list of at most {MAX_MEMBERS}")
    world = GroupWorld(generation, tuple(read_member(item) for item in members))
    if all(member.uid != uid for member in world.members):
        raise Refused(400, "members: the caller is not among them")
    return world


def read_end(body: Mapping[str, Any], uid: str, name: str, now: float) -> RanksEnd:
    """How the ranks of the caller ended; `now` is in seconds since the epoch."""
    found = body.get("failure")
    told = {_CAMEL.get(name, name): value for name, value in found.items()} if isinstance(found, Mapping) else {}
    failure = parse_failure(json.dumps({"verdict": "application", **told}))
    ago_s = min(max(0.0, _finite(body.get("ended_s_ago")) or 0.0), MAX_AGE_S)
    return RanksEnd(
        uid=uid,
        name=name,
        at=now - ago_s,
        failure=replace(failure or RankFailure(), worker=name, at=Timestamp(now - ago_s)),
        of_peers=body.get("of_peers") is True,
        permanent=body.get("permanent") is True,
    )


def recall_failures(group: Group, body: Mapping[str, Any], uid: str, generation: int, now: float) -> None:
    """A worker of this generation may report earlier failures after which it was told to restart.

    An older launcher reports the last one only.
    """
    failed = body.get("failed")
    for told in failed[-MAX_FAILURES:] if isinstance(failed, list) else [failed]:
        if not isinstance(told, Mapping):
            continue
        of = _whole(told.get("generation"))
        if of is not None and of <= generation:
            group.recall(read_end(told, uid, group.members.alive.get(uid, uid), now), of, now, newest=generation)


def note_sign(group: Group, body: Mapping[str, Any], now: float) -> bool:
    """Record that a worker has called, and what it reports to be doing; True if that is something new."""
    doing, uid = body.get("doing"), body.get("uid")
    said = doing if isinstance(doing, str) and doing in ACTIVITIES else ""
    return group.note_sign(str(uid), now, said, min(max(0.0, _finite(body.get("since_s")) or 0.0), MAX_AGE_S))


def newest_generation(messages: list[Any]) -> int:
    """The newest generation that any of these reports is about; -1 if none is about a generation."""
    found = (_whole(message.get("generation")) for message in messages if isinstance(message, Mapping))
    return max((generation for generation in found if generation is not None), default=-1)


def note_report(group: Group, message: Mapping[str, Any], now: float) -> bool:
    """Record one report of a rank; True if the job's status should show it. Invalid reports are skipped."""
    kind, generation, step = message.get("kind"), _whole(message.get("generation")), _whole(message.get("step"))
    if kind in ("waiting", "unsaved"):
        reason = _clean(str(message.get("reason") or "")[:MAX_TEXT])
        group.reports.set_obstacle(*((reason, "") if kind == "waiting" else ("", reason)))
        return True
    if kind == "usage":
        return _note_usage(group, message, now)
    if generation is None or step is None:
        return False
    if kind == "hang":
        return _note_places(group, generation, message.get("ranks"))
    group.reports.clear_obstacle()
    if kind == "progress":
        group.note_step(generation, _progress(message), now)
    elif kind == "resumed":
        _note_resumed(group, generation, step, message)
    elif kind == "copied":
        lack = _clean(str(message.get("lack") or "")[:MAX_TEXT])
        group.history.note_copied(generation, _whole(message.get("every_steps")) or 0, lack)
    elif kind == "inputs":
        group.reports.set_examples(_examples(message.get("examples")))
        return False
    elif kind == "committed":
        return _note_commit(group, generation, step, message, now)
    else:
        return False
    return True


def _note_commit(group: Group, generation: int, step: int, message: Mapping[str, Any], now: float) -> bool:
    number = _whole(message.get("committed"))
    if number is None:
        return False
    url, size_bytes = _clean(str(message.get("url", ""))[:MAX_TEXT]), _whole(message.get("size_bytes")) or 0
    duration_s = _finite(message.get("duration_s")) or 0.0
    group.note_commit(generation, number, step, url, size_bytes, duration_s, now)
    return True


def _note_resumed(group: Group, generation: int, step: int, message: Mapping[str, Any]) -> None:
    source, stays = message.get("source"), message.get("stays")
    why_not = _clean(str(message.get("restarts_because") or "")[:MAX_TEXT])
    group.reports.set_stays(stays is True)
    known = isinstance(source, str) and source in (MEMORY, COPIES, STORAGE)
    group.history.note_resumed(
        generation,
        step,
        str(source) if known else "",
        stays if isinstance(stays, bool) else None,
        why_not,
        _clean(str(message.get("source_because") or "")[:MAX_TEXT]),
    )


def _examples(told: object) -> str:
    """The text of a JSON list that tells what ranks call their model with; newcomers find it in their environment."""
    if not isinstance(told, str) or len(told) > MAX_EXAMPLES:
        return ""
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        return ""
    return json.dumps(found) if isinstance(found, list) else ""


def _note_usage(group: Group, message: Mapping[str, Any], now: float) -> bool:
    """Record what a worker uses of its machine."""
    uid = str(message.get("uid"))
    if uid not in group.members.alive:
        return False
    gpus, times = message.get("gpus"), message.get("step_times")
    shares = times.items() if isinstance(times, Mapping) else ()
    columns = gpus.items() if isinstance(gpus, Mapping) else ()
    told = {camel(str(name)): value for name, value in message.items()} | {
        "worker": group.members.alive[uid],
        "at": to_rfc3339(now),
        "noGpus": _clean(str(message.get("no_gpus") or "")[:MAX_TEXT]),
        "stepTimes": {camel(str(name)): _share(value) for name, value in shares},
        "gpus": {camel(str(name)): column[:MAX_GPUS] for name, column in columns if isinstance(column, list)},
    }
    return group.usage.add_usage(uid, from_json(WorkerUsage, told), now)


def _share(value: object) -> float | None:
    """A part of a whole."""
    share = _finite(value)
    return None if share is None else min(1.0, max(0.0, share))


def _note_places(group: Group, generation: int, ranks: object) -> bool:
    """Record where ranks that do not move stand; a rank without a place moves again."""
    if generation != group.generation or not isinstance(ranks, list):
        return False
    for item in ranks[:MAX_SLOTS]:
        rank = _whole(item.get("rank")) if isinstance(item, Mapping) else None
        if rank is None or rank >= MAX_RANKS:
            continue
        where = _clean(str(item.get("where") or "")[:MAX_PLACE])
        group.reports.set_place(rank, RankPlace(where, item.get("waits") is True) if where else None)
    return True


def _progress(message: Mapping[str, Any]) -> ProgressStatus:
    metrics = message.get("metrics")
    numbers = metrics if isinstance(metrics, Mapping) else {}
    step = _whole(message.get("step"))
    told = {_clean(str(name)[:64]): value for name, value in list(numbers.items())[:MAX_METRICS]}
    finite = {name: _finite(value) for name, value in told.items()}
    lost = {name: _not_finite(value, step or 0) for name, value in told.items()}
    return ProgressStatus(
        step=step,
        total_steps=_whole(message.get("total_steps")),
        epoch=_whole(message.get("epoch")),
        total_epochs=_whole(message.get("total_epochs")),
        samples_per_s=_finite(message.get("samples_per_s")),
        metrics={name: value for name, value in finite.items() if value is not None},
        not_finite={name: item for name, item in lost.items() if item is not None},
    )


def _not_finite(value: object, step: int) -> NotFiniteMetric | None:
    """A metric that a rank reports as not finite, `{"value": "NaN", "since_step": 81}`; None for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return NotFiniteMetric("NaN" if math.isnan(value) else "inf" if value > 0 else "-inf", step)
    if not isinstance(value, Mapping) or value.get("value") not in NOT_FINITE_VALUES:
        return None
    since = _whole(value.get("since_step"))
    return NotFiniteMetric(str(value["value"]), step if since is None else min(since, step))


def _whole(value: object) -> int | None:
    """The value if it is a count that every JSON reader reads exactly; None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_STEP else None


def _finite(value: object) -> float | None:
    """The value if it is a number that JSON can represent; None for anything else, such as a huge integer."""
    if not isinstance(value, int | float) or not -sys.float_info.max <= value <= sys.float_info.max:
        return None
    return float(value)


def _clean(text: str) -> str:
    """Replace what UTF-8 cannot encode: lone surrogates, which undecodable bytes of a log become."""
    return text.encode("utf-8", "replace").decode("utf-8")
