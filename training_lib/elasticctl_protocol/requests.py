"""The requests of launchers to the rendezvous service, and its answers.

A request is `POST /v1/jobs/NAMESPACE/JOB/VERB` with the job's bearer token. An answer is a JSON object; one that is
refused has another status than 200, and a `Refusal` as its body. Times are seconds from now, because clocks differ.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar, cast

from elasticctl_protocol.codec import NULL, Codec, written_as
from elasticctl_protocol.failures import RankEnd

MAX_TEXT = 512
MAX_SLOTS = 4096
MAX_GENERATION = 1 << 53
MAX_PORT = 65_535

WIRE = Codec()
"""The JSON of requests, answers and reports."""
_LIMITS = "limits"


def _text() -> Any:
    """A field that must be text of 1 to `MAX_TEXT` characters."""
    return field(default="", metadata={_LIMITS: (1, MAX_TEXT)})


def _whole(lowest: int, highest: int) -> Any:
    """A field that must be a whole number within these limits."""
    return field(default=lowest - 1, metadata={_LIMITS: (lowest, highest)})


def _flag() -> Any:
    """A field that is written only if it is True."""
    return field(default=False, metadata=written_as(lambda value: value or None, lambda value: value is True))


def _seconds_or_null(default: float | None) -> Any:
    """A field with a number of seconds, for which null means that there is no limit (`math.inf`)."""
    return field(
        default=default,
        metadata=written_as(lambda value: NULL if value == math.inf else value, _decode_seconds),
    )


def _decode_seconds(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) <= sys.float_info.max:
        return math.inf
    return float(value)


@functools.cache
def _limits_of(cls: Any) -> tuple[tuple[str, tuple[int, int]], ...]:
    return tuple((each.name, each.metadata[_LIMITS]) for each in fields(cls) if _LIMITS in each.metadata)


def problem_of(message: object) -> str:
    """Return why a message is not valid; empty if it is. Only fields with limits are checked."""
    for name, (lowest, highest) in _limits_of(cast(Hashable, type(message))):
        value = getattr(message, name)
        if isinstance(value, str) and not lowest <= len(value) <= highest:
            return f"{name}: expected text of {lowest} to {highest} characters"
        if isinstance(value, int) and not lowest <= value <= highest:
            return f"{name}: expected an integer from {lowest} to {highest}"
    return ""


class Doing(StrEnum):
    """What a launcher can be doing."""

    PREPARING = "preparing"
    """Unpacks the workspace, warms spares."""
    WAITING = "waiting"
    """Has joined and waits for the group to form, or for the service's verdict."""
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"
    STOPPING = "stopping"
    EXPORTING = "exporting"
    """The ranks have reported their last step, and still run."""
    FINISHING = "finishing"
    """All ranks have exited with 0; waits for those of the peers."""
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A worker calls, and has been `doing` something for `since_s` seconds."""

    verb: ClassVar = "heartbeat"
    uid: str = _text()
    generation: int = 0
    doing: Doing | None = None
    since_s: float | None = None


# Joining a generation.


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as its launcher introduced it: the address of its store, and how many ranks (`slots`) it runs."""

    uid: str = _text()
    name: str = _text()
    host: str = _text()
    port: int = _whole(1, MAX_PORT)
    slots: int = _whole(1, MAX_SLOTS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """How the ranks of a worker ended in a generation, `ended_s_ago` seconds ago.

    `of_peers`: the error is one that a lost peer causes. `permanent`: another try cannot help. `stopping`: the rank
    ended while it was being stopped, but not because of that.
    """

    generation: int = -1
    of_peers: bool = False
    permanent: bool = False
    stopping: bool = False
    ended_s_ago: float = 0.0
    failure: RankEnd = RankEnd()


def _decode_failures(value: object) -> tuple[FailureReport, ...] | None:
    """The reports in a list, or the only one, which older launchers sent without a list."""
    reports = value if isinstance(value, list) else [value]
    return tuple(WIRE.decode(FailureReport, each) for each in reports if isinstance(each, Mapping))


def _failures(default: tuple[FailureReport, ...] | None) -> Any:
    """Failures after which this worker restarted: a service that was restarted before it stored them does not know
    them."""
    return field(default=default, metadata=written_as(WIRE.encode, _decode_failures))


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """A worker is ready for a generation after `generation`, the last it was in (0: none).

    `prepared`: its ranks have been started already, or need not be before the group waits for them. `stays`: its ranks
    stay in their processes. `serves_commands`: it has no ranks. The service answers after `within_s` seconds at
    the latest.
    """

    verb: ClassVar = "join"
    uid: str = _text()
    name: str = _text()
    host: str = _text()
    slots: int = _whole(1, MAX_SLOTS - 1)
    port: int = _whole(1, MAX_PORT)
    generation: int = _whole(0, MAX_GENERATION - 1)
    prepared: bool = True
    stays: bool = False
    serves_commands: bool = _flag()
    within_s: float | None = None
    failed: tuple[FailureReport, ...] = _failures(())
    doing: Doing | None = None
    since_s: float | None = None

    @property
    def member(self) -> Member:
        """The worker that joins."""
        return Member(self.uid, self.name, self.host, self.port, self.slots)


class JoinState(StrEnum):
    """What became of a request to join."""

    WAITING = "waiting"
    FORMED = "formed"
    PREPARE = "prepare"
    """The group trains, and the worker has to start its ranks before it joins."""
    OVER = "over"


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """The answer in the states that need no more words; the others have a class of their own."""

    state: JoinState = JoinState.WAITING


@dataclass(frozen=True, slots=True)
class PrepareAnswer:
    """`ranks` is the number of ranks on the other workers, and `examples` what they call their model with, if known."""

    state: JoinState = JoinState.PREPARE
    ranks: int = 0
    examples: str = ""


@dataclass(frozen=True, slots=True)
class FormedAnswer:
    """A generation has formed; `members` are in order of group rank. The store of the first one serves it.

    `anew`: all ranks start from the beginning of the script, also those that could stay in their processes.
    """

    state: JoinState = JoinState.FORMED
    generation: int = 0
    members: tuple[Member, ...] = ()
    anew: bool = False


# While a generation runs.


def _decode_members(value: object) -> tuple[Member, ...]:
    """The members in a list, without any check; none for anything else, so that its sender is not among them."""
    return tuple(WIRE.decode(Member, each) for each in value) if isinstance(value, list) else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchRequest:
    """Wait until this generation is over or has to drain. `draining`: it drains already.

    The other fields are sent once, to a restarted service that does not know the generation.
    """

    verb: ClassVar = "watch"
    uid: str = _text()
    generation: int = _whole(0, MAX_GENERATION - 1)
    draining: bool = False
    members: tuple[Member, ...] | None = field(default=None, metadata=written_as(WIRE.encode, _decode_members))
    stays: bool | None = None
    serves_commands: bool | None = None
    failed: tuple[FailureReport, ...] | None = _failures(None)
    doing: Doing | None = None
    since_s: float | None = None


class WatchState(StrEnum):
    """What has become of a generation."""

    CURRENT = "current"
    UNKNOWN = "unknown"
    """The service was restarted: send the members."""
    DRAIN = "drain"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class WatchAnswer:
    """`leave`: the worker has to drain because it has to leave itself."""

    state: WatchState = WatchState.STALE
    reason: str = ""
    leave: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeRequest:
    """A worker has to leave: immediately, or it asks how long it `stays`.

    `in_s` is the time left according to its cloud (`math.inf`: unknown); None after a signal, whose deadline the
    controller knows.
    """

    verb: ClassVar = "notice"
    uid: str = _text()
    reason: str = _text()
    stays: bool = _flag()
    in_s: float | None = _seconds_or_null(None)


@dataclass(frozen=True, slots=True)
class NoticeAnswer:
    """How many seconds a worker may stay (`math.inf`: until the service makes it leave), and in how many it is killed
    (`math.inf`: unknown)."""

    stay_s: float = _seconds_or_null(0.0)
    left_s: float = _seconds_or_null(math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """A worker leaves the group."""

    verb: ClassVar = "leave"
    uid: str = _text()
    reason: str = _text()


# The end of a generation.


@dataclass(frozen=True, slots=True, kw_only=True)
class FailRequest(FailureReport):
    """Ranks of this worker have failed: what shall it do?"""

    verb: ClassVar = "fail"
    uid: str = _text()
    generation: int = _whole(0, MAX_GENERATION - 1)
    failed: tuple[FailureReport, ...] = _failures(())
    doing: Doing | None = None
    since_s: float | None = None

    @classmethod
    def of(cls, uid: str, report: FailureReport, failed: tuple[FailureReport, ...] = ()) -> FailRequest:
        """The request of the worker `uid` that reports this failure, and earlier ones."""
        known = {each.name: getattr(report, each.name) for each in fields(FailureReport)}
        return cls(uid=uid, failed=failed, **known)


class GroupVerdict(StrEnum):
    """What a worker whose ranks failed shall do."""

    PENDING = "pending"
    """The ends of other members' ranks are waited for."""
    REJOIN = "rejoin"
    EXIT = "exit"


@dataclass(frozen=True, slots=True)
class FailAnswer:
    """`excused`: another member was lost or is to blame. `error`: the service's description of the failure."""

    verdict: GroupVerdict = GroupVerdict.EXIT
    excused: bool = _flag()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishRequest:
    """All ranks of this worker have exited with 0.

    `for_all`: the other members have no ranks, so they are done as well. `terminated`: some ranks have exited because
    of a SIGTERM from outside.
    """

    verb: ClassVar = "finish"
    uid: str = _text()
    generation: int = _whole(0, MAX_GENERATION - 1)
    for_all: bool = _flag()
    terminated: bool = _flag()
    doing: Doing | None = None
    since_s: float | None = None


class FinishState(StrEnum):
    """What a worker whose ranks have finished shall do."""

    WAITING = "waiting"
    REJOIN = "rejoin"
    """A member was lost that had not finished, so the work is repeated."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class FinishAnswer:
    """See `FinishState`."""

    state: FinishState = FinishState.WAITING


# Reports, and refusals.


@dataclass(frozen=True, slots=True)
class ReportRequest:
    """What ranks and the launcher itself report: see `reports`."""

    verb: ClassVar = "report"
    messages: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReportAnswer:
    """How many seconds the launcher should leave between two of these requests."""

    every_s: float | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request was refused."""

    error: str = ""


Polled = JoinRequest | WatchRequest | FailRequest | FinishRequest
"""The requests whose answer may take long. Such a request is also a sign of life."""
