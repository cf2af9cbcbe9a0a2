"""Why a worker ended with an error, as the launcher reports it to the controller.

It reports the failure to the rendezvous service, and writes it as the pod's termination message.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from elasticctl_launcher.hangs.watch_ranks import Hang
from elasticctl_launcher.rank_processes import Rank
from elasticctl_launcher.ranks.failure_evidence import find_final_exception, is_wrong_use, last_error_line, shown_lines
from elasticctl_protocol import variables
from elasticctl_protocol.failures import (
    EXIT_FAILED,
    GROUP_HANGS,
    MAX_MESSAGE_BYTES,
    OUT_OF_MEMORY,
    TERMINATED_EXIT_CODE,
    FailureVerdict,
    RankEnd,
    TerminationMessage,
)
from elasticctl_protocol.requests import FailureReport

TERMINATED = "it got SIGTERM, not from its launcher, and ended with exit code 0"
TERMINATION_LOG = "/dev/termination-log"
MAX_LINES, MAX_LINE, MAX_ERROR = 20, 400, 500
"""How many of the last lines of output a failure includes, and how many characters of each and of its error."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How a worker failed.

    `verdict` is the launcher's guess until the service has decided. `exit_code` is the launcher's own, from 1 to 255,
    so that a failure never looks like a success. `permanent`: another try cannot help. `stopping`: the rank ended while
    it was being stopped, but not because of that. `stays`: no rank has ended, and the worker may continue in its
    processes. `ended_at` is a time of `time.monotonic`.

    Raises ValueError for an exit code outside of 1 to 255.
    """

    verdict: FailureVerdict
    worker: str
    generation: int
    exit_code: int
    rank: int | None = None
    signal: str = ""
    error: str = ""
    last_lines: tuple[str, ...] = ()
    permanent: bool = False
    stopping: bool = False
    stays: bool = False
    ended_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not 1 <= self.exit_code <= 255:
            raise ValueError(f"exit code {self.exit_code} of a failure: expected 1 to 255")

    @classmethod
    def of_rank(cls, worker: str, generation: int, rank: Rank, error_file: str = "") -> WorkerFailure:
        """The failure of a rank that ended with an exit code other than 0.

        `error_file` is the file that torch's `@record` writes, if the script uses it.
        """
        code = rank.code if rank.code is not None else 1
        lines = tuple(rank.last_lines)
        final = find_final_exception(lines)
        error = _read_error_file(error_file) or (final.line if final else last_error_line(lines))
        if code == -signal.SIGKILL:
            verdict = FailureVerdict.KILLED
            error = OUT_OF_MEMORY if rank.exhausted_memory else ""  # its last line is unrelated
        elif code in (1, -signal.SIGABRT) and final is not None and final.is_of_peers:
            verdict = FailureVerdict.COLLATERAL
        else:
            verdict = FailureVerdict.APPLICATION
        return cls(
            verdict=verdict,
            worker=worker,
            generation=generation,
            exit_code=128 - code if code < 0 else code,
            rank=rank.rank,
            signal=_signal_name(-code) if code < 0 else "",
            error=error,
            last_lines=shown_lines(lines, MAX_LINES),
            permanent=(code == 1 and final is not None and final.is_permanent) or is_wrong_use(code, lines),
            stopping=not rank.ended_unasked,
            ended_at=time.monotonic() if rank.ended_at is None else rank.ended_at,
        )

    @classmethod
    def of_stopped(cls, worker: str, generation: int, ranks: Sequence[Rank]) -> WorkerFailure | None:
        """The failure of the first of the stopped `ranks` that ended by itself; None if none did.

        A rank may respond to SIGTERM with any exit code. A rank that ended after SIGTERM therefore counts only if it
        ended because of an exception, or a signal that the launcher did not send.
        """
        failed = (cls.of_rank(worker, generation, rank) for rank in ranks if _ended_by_itself(rank))
        return min(failed, key=lambda failure: failure.verdict is FailureVerdict.COLLATERAL, default=None)

    @classmethod
    def of_terminated(cls, worker: str, generation: int, rank: Rank) -> WorkerFailure:
        """A rank got SIGTERM, but not from its launcher, and ended with exit code 0 while others still ran."""
        ended_at = time.monotonic() if rank.ended_at is None else rank.ended_at
        return cls(
            FailureVerdict.APPLICATION,
            worker,
            generation,
            TERMINATED_EXIT_CODE,
            rank.rank,
            "SIGTERM",
            TERMINATED,
            _last_of(rank),
            ended_at=ended_at,
        )

    @classmethod
    def of_sigterm(cls, worker: str, generation: int, why: str = "") -> WorkerFailure:
        """The launcher got SIGTERM, or a notice that its machine will be reclaimed (`why`)."""
        return cls(FailureVerdict.PREEMPTED, worker, generation, TERMINATED_EXIT_CODE, signal="SIGTERM", error=why)

    @classmethod
    def of_lost_peers(cls, worker: str, generation: int, why: str) -> WorkerFailure:
        """A rank that stays in its process has lost its connection to other ranks; `why` is the error."""
        return cls(FailureVerdict.COLLATERAL, worker, generation, 1, error=why, stays=True)

    @classmethod
    def of_suspended(cls, worker: str, generation: int, rank: Rank) -> WorkerFailure:
        """A rank is alive, but it was stopped from outside and holds up the group."""
        error = f"rank {rank.rank} was stopped (SIGSTOP) and held up the group"
        return cls(FailureVerdict.STUCK, worker, generation, EXIT_FAILED, rank.rank, "SIGSTOP", error, _last_of(rank))

    @classmethod
    def of_hang(cls, worker: str, generation: int, hang: Hang) -> WorkerFailure:
        """Nothing in the group moves. Names the rank that the others wait for, if it is on this worker."""
        verdict = FailureVerdict.COLLATERAL if hang.of_peers else FailureVerdict.APPLICATION
        return cls(verdict, worker, generation, EXIT_FAILED, hang.culprit, "", hang.describe(), hang.stack)

    def explains_more_than(self, other: WorkerFailure) -> bool:
        """True if this end has a cause of its own, and `other` may be a consequence of another end."""
        return self.verdict is not FailureVerdict.COLLATERAL and other.verdict is FailureVerdict.COLLATERAL

    def describe(self) -> str:
        """Return one line: the signal or exit code, and the error."""
        how = f"killed by {self.signal}" if self.signal else f"exit code {self.exit_code}"
        how = "a peer was lost" if self.stays else "" if self.error.startswith(GROUP_HANGS) else how
        return ": ".join(filter(None, (how, self.error)))

    def to_report(self) -> FailureReport:
        """Return the report of the failure to the service."""
        end = RankEnd(
            rank=self.rank,
            exit_code=None if self.stays else self.exit_code,
            signal=self.signal,
            error=self.error[:MAX_ERROR],
            last_lines=self._short_lines(),
            verdict=self.verdict,
        )
        return FailureReport(
            generation=self.generation,
            of_peers=self.verdict is FailureVerdict.COLLATERAL,
            permanent=self.permanent,
            stopping=self.stopping,
            ended_s_ago=round(max(0.0, time.monotonic() - self.ended_at), 3),
            failure=end,
        )

    def _short_lines(self) -> tuple[str, ...]:
        return tuple(line[:MAX_LINE] for line in self.last_lines)

    def to_message(self) -> str:
        """Return JSON of at most `MAX_MESSAGE_BYTES`: drop the oldest lines, then shorten the error, until it fits."""
        message = TerminationMessage(
            verdict=self.verdict,
            worker=self.worker or None,
            rank=self.rank,
            exit_code=self.exit_code,
            signal=self.signal or None,
            error=self.error[:MAX_ERROR] or None,
            last_lines=self._short_lines(),
            generation=self.generation,
            at=datetime.now(UTC).isoformat(),
            permanent=self.permanent or None,
        )
        while len(text := message.to_text()) > MAX_MESSAGE_BYTES and (message.last_lines or message.error):
            if message.last_lines:
                message = replace(message, last_lines=message.last_lines[1:])
            else:
                error = message.error or ""
                message = replace(message, error=error[: len(error) // 2] or None)
        return text

    def write(self, path: str = "") -> None:
        """Write the message to `path`, $ELASTICCTL_TERMINATION_LOG or Kubernetes' default path, if that exists.

        If it cannot be written, for example because the disk is full, the exit code is all that the controller learns.
        """
        target = Path(path or os.environ.get(variables.TERMINATION_LOG, TERMINATION_LOG))
        with contextlib.suppress(OSError):
            if target.parent.is_dir() and (target.exists() or str(target) != TERMINATION_LOG):
                target.write_text(self.to_message())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _read_error_file(path: str) -> str:
    """The message in torch's error file; empty if the script wrote none."""
    try:
        message = json.loads(Path(path).read_bytes())["message"]
        return str(message["message"] if isinstance(message, dict) else message)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _last_of(rank: Rank) -> tuple[str, ...]:
    return tuple(rank.last_lines)[-MAX_LINES:]


def _ended_by_itself(rank: Rank) -> bool:
    if rank.code in (None, 0):
        return False
    if rank.ended_unasked:
        return True
    if rank.code == TERMINATED_EXIT_CODE or -(rank.code or 0) in rank.signals:
        return False
    return (rank.code or 0) < 0 or find_final_exception(tuple(rank.last_lines)) is not None
