"""How ranks end: what a launcher reports of it to the service, and writes as its last message.

The termination message is JSON in the style of Kubernetes, because it becomes part of the job's status. It outlives the
pod's processes, and writing it needs no service.
"""

from __future__ import annotations

import json
import signal
from dataclasses import dataclass, field
from enum import StrEnum

from elasticctl_protocol.codec import NULL, Codec, camel, written_as

GROUP_HANGS = "the group hangs"
"""How the error of a hang begins."""
OUT_OF_MEMORY = "out of memory"
"""The error of a rank that the kernel killed for lack of memory."""
EXIT_FAILED, EXIT_USAGE = 1, 2
"""The launcher's exit codes if no rank has one; otherwise it exits with the code of the rank that failed."""
KILLED_EXIT_CODE, TERMINATED_EXIT_CODE = 128 + signal.SIGKILL, 128 + signal.SIGTERM
"""The exit codes of a process that a signal ended, in the shell's form. A launcher that got SIGTERM uses the second."""
MAX_MESSAGE_BYTES = 4096
"""Kubernetes' limit for a termination message."""

_TERMINATION = Codec(camel, keeps_empty=False)


class FailureVerdict(StrEnum):
    """The kind of a failure, as far as the launcher knows."""

    APPLICATION = "application"
    COLLATERAL = "collateral"
    """The loss of a peer explains it."""
    KILLED = "killed"
    STUCK = "stuck"
    """The rank was stopped from outside (SIGSTOP) and held up the group."""
    PREEMPTED = "preempted"
    """The worker had to leave."""


def _whole_or_null() -> int | None:
    """A field with a whole number, or null."""
    default: int | None = field(
        default=None,
        metadata=written_as(
            lambda value: NULL if value is None else value, lambda value: value if type(value) is int else None
        ),
    )
    return default


@dataclass(frozen=True, slots=True)
class RankEnd:
    """How a rank ended, in the report of a failure; `exit_code` is null if it has not ended, but lost its peers."""

    rank: int | None = _whole_or_null()
    exit_code: int | None = _whole_or_null()
    signal: str = ""
    error: str = ""
    last_lines: tuple[str, ...] = ()
    verdict: FailureVerdict = FailureVerdict.APPLICATION


@dataclass(frozen=True, slots=True)
class TerminationMessage:
    """Why a worker ended with an error; `at` is RFC 3339, and `permanent` is set if another try cannot help."""

    verdict: FailureVerdict | None = None
    worker: str | None = None
    rank: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    error: str | None = None
    last_lines: tuple[str, ...] = ()
    generation: int = 0
    at: str | None = None
    permanent: bool | None = None

    def to_text(self) -> str:
        """Return the message as JSON."""
        return json.dumps(_TERMINATION.encode(self))

    @classmethod
    def from_text(cls, text: str) -> TerminationMessage | None:
        """Read a message; None for any other text."""
        try:
            found = _TERMINATION.decode(cls, json.loads(text))
        except (ValueError, RecursionError):
            return None
        return None if found.verdict is None else found
