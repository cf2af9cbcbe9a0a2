"""How long a job may stand still: as long as its user has said, or else by what was measured on the job itself.

The reports of the training library delimit the phases of a generation. A script without the library has one phase only,
for which nothing is measured but how long it stood still before it continued.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from elasticctl_protocol.reports import FinishedReport, ProgressReport, ResumedReport

REPORT_S = 60.0
"""A standstill of this length is reported, but ends nothing."""
MEASURED_S = 600.0
"""The minimum for a phase that this job has completed before; torch's own limit for collectives of NCCL."""
UNMEASURED_S = 1800.0
"""The minimum for a phase that this job has never completed; torch's own limit for other collectives."""
FACTOR = 10.0
"""The limit is also at least this many times the longest duration of the phase."""


class RunPhase(Enum):
    """A part of a generation with a duration of its own."""

    STARTING = "from the start of the ranks to their first report"
    FIRST_STEP = "from there to the first step"
    STEP = "from one step to the next, saves included"
    ENDING = "what the script does after training"
    SILENT = "of a script that reports nothing"


@dataclass(frozen=True, slots=True)
class Allowance:
    """How many seconds the ranks may stand still until that is reported, and until the group restarts (None: never).

    `strict`: the group restarts only if the ranks are proved to stand still.
    """

    report_s: float
    end_s: float | None
    strict: bool


class TimeLimit:
    """The time limit of a job. `timeout_s` is the user's limit in seconds: 0 for no limit, None if there is none."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._longest_s: dict[RunPhase, float] = {}
        self._longest_standstill_s = 0.0
        self._since_s = 0.0
        self.phase = RunPhase.SILENT

    def start_generation(self, now_s: float) -> None:
        """Start a generation."""
        self.phase, self._since_s = RunPhase.STARTING if self._longest_s else RunPhase.SILENT, now_s

    def record_report(self, kind: str, now_s: float) -> None:
        """Record a report of the training library."""
        phase = RunPhase.STARTING if self.phase is RunPhase.SILENT else self.phase
        if kind == FinishedReport.kind:
            self.phase = RunPhase.ENDING
            return
        if kind == ResumedReport.kind and phase is RunPhase.ENDING:  # the script trains another model
            self.phase, self._since_s = RunPhase.FIRST_STEP, now_s
            return
        stepped = kind == ProgressReport.kind
        if phase is RunPhase.ENDING or (phase is not RunPhase.STARTING and not stepped):
            return  # for example, a commit in the middle of a step
        self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), now_s - self._since_s)
        self.phase, self._since_s = RunPhase.STEP if stepped else RunPhase.FIRST_STEP, now_s

    def record_standstill(self, still_s: float) -> None:
        """Record that the ranks stood still for `still_s` seconds and continued by themselves."""
        self._longest_standstill_s = max(self._longest_standstill_s, still_s)

    def allowance(self) -> Allowance:
        """Return the limits for the phase that the ranks are in."""
        ending = self.phase is RunPhase.ENDING
        if self._timeout_s is not None and not ending:
            report_s = min(REPORT_S, self._timeout_s / 2) or REPORT_S
            return Allowance(report_s, self._timeout_s or None, strict=False)
        floor_s = MEASURED_S if self.phase in self._longest_s else UNMEASURED_S
        end_s = max(floor_s, FACTOR * self._longest_s.get(self.phase, 0.0), FACTOR * self._longest_standstill_s)
        report_s = max(REPORT_S, 2 * self._longest_standstill_s)
        return Allowance(report_s, None if self._timeout_s == 0 else max(end_s, self._timeout_s or 0.0), strict=True)
