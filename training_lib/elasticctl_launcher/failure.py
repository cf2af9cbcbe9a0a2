"""Why a worker ended with an error, and who looks to blame: the launcher leaves this behind for the controller.

The controller reads it as `elasticctl.api.status.RankFailure` from the pod's termination message, which outlives the
pod's processes and needs no service that is up at the time.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from elasticctl_launcher.rank_processes import Rank

APPLICATION, COLLATERAL, KILLED, STUCK = "application", "collateral", "killed", "stuck"
PREEMPTED = "preempted"
STUCK_EXIT_CODE = 1
TERMINATION_LOG = "/dev/termination-log"
MAX_MESSAGE_BYTES = 4096
"""Kubernetes' limit of a termination message."""

PEER_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "DistBackendError",
    "DistNetworkError",
    "DistStoreError",
    "ncclRemoteError",
    "ncclSystemError",
    "NCCL communicator was aborted",
    "recvBytes",
    "Timed out waiting",
    "gloo::",
    "/gloo/transport/",
)
"""What errors of torch, gloo and NCCL say when a peer was lost."""


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """How a worker failed.

    `verdict` is the launcher's guess until the service has decided. `exit_code` is the launcher's own, 1 to 255: a
    failure never looks like a success. Raises ValueError for any other.
    """

    verdict: str
    worker: str
    generation: int
    exit_code: int
    rank: int | None = None
    signal: str = ""
    error: str = ""
    last_lines: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.exit_code <= 255:
            raise ValueError(f"exit code {self.exit_code} of a failure: expected 1 to 255")

    @classmethod
    def of_rank(cls, worker: str, generation: int, rank: Rank, error_file: str = "") -> WorkerFailure:
        """A rank that ended with an exit code other than 0. torch's `@record`, if used, writes to `error_file`."""
        code = rank.code if rank.code is not None else 1
        lines = tuple(rank.last_lines)
        name = _signal_name(-code) if code < 0 else ""
        error = _read_error_file(error_file) or _last_error_line(lines)
        if code == -signal.SIGKILL:
            verdict, error = KILLED, ""  # its last line has nothing to do with it
        elif code in (1, -signal.SIGABRT) and any(sign in line for sign in PEER_SIGNS for line in lines):
            verdict = COLLATERAL
        else:
            verdict = APPLICATION
        return cls(verdict, worker, generation, 128 - code if code < 0 else code, rank.rank, name, error, lines)

    @classmethod
    def of_sigterm(cls, worker: str, generation: int, why: str = "") -> WorkerFailure:
        """The launcher got SIGTERM, or notice that its machine will be reclaimed (`why`)."""
        return cls(PREEMPTED, worker, generation, 128 + signal.SIGTERM, signal="SIGTERM", error=why)

    @classmethod
    def of_suspended(cls, worker: str, generation: int, rank: Rank) -> WorkerFailure:
        """A rank is alive, but was stopped from outside and holds up the group."""
        error = f"rank {rank.rank} was stopped (SIGSTOP) and held up the group"
        return cls(STUCK, worker, generation, STUCK_EXIT_CODE, rank.rank, "SIGSTOP", error, tuple(rank.last_lines))

    @classmethod
    def of_hang(cls, worker: str, generation: int, limit_s: float) -> WorkerFailure:
        """It is not known which rank holds up the group: all restart, as after the loss of a peer."""
        error = f"no step for {limit_s:g} s (--hang-timeout)"
        return cls(COLLATERAL, worker, generation, STUCK_EXIT_CODE, error=error)

    def describe(self) -> str:
        """One line: the signal or exit code, and the error."""
        how = f"killed by {self.signal}" if self.signal else f"exit code {self.exit_code}"
        return f"{how}: {self.error}" if self.error else how

    def to_message(self) -> str:
        """JSON of at most `MAX_MESSAGE_BYTES`: drops the oldest lines until it fits."""
        lines = list(self.last_lines)
        while True:
            data = {
                "verdict": self.verdict,
                "worker": self.worker,
                "rank": self.rank,
                "exitCode": self.exit_code,
                "signal": self.signal,
                "error": self.error[:500],
                "lastLines": [line[:400] for line in lines],
                "generation": self.generation,
                "at": datetime.now(UTC).isoformat(),
            }
            message = json.dumps({key: value for key, value in data.items() if value not in (None, "", [])})
            if len(message) <= MAX_MESSAGE_BYTES or not lines:
                return message
            del lines[0]

    def write(self, path: str = "") -> None:
        """Write the message to `path`, $ELASTICCTL_TERMINATION_LOG or Kubernetes' default path, if that exists."""
        target = Path(path or os.environ.get("ELASTICCTL_TERMINATION_LOG", TERMINATION_LOG))
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


def _last_error_line(lines: Sequence[str]) -> str:
    """The last line that names an exception, else the last that is not blank."""
    meaningful = [line.strip() for line in lines if line.strip()]
    raised = [line for line in meaningful if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]]
    return (raised or meaningful or [""])[-1]
