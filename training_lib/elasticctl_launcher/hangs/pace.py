"""How long a job may stand still: measured on the job itself, unless its user has said so.

The phases of a generation are told apart by the reports of the training library. A script without it is in one phase
from its first moment to its last, of which nothing is measured but how long it stood still and then went on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

REPORT_S = 60.0
"""A standstill of this long is reported, which ends nothing."""
MEASURED_S = 600.0
"""A phase that this job has been through before is ended no sooner; torch's own limit for a collective of NCCL."""
UNMEASURED_S = 1800.0
"""The same for a phase that it has not been through; torch's own limit for other collectives."""
FACTOR = 10.0
"""... and no sooner than this many times the longest that it has taken."""


class Phase(Enum):
    """A part of a generation that has a duration of its own."""

    STARTING = "from the start of the ranks to their first report"
    FIRST_STEP = "from there to the first step"
    STEP = "from one step to the next, saves included"
    ENDING = "what the script does after training"
    SILENT = "of a script that reports nothing"


@dataclass(frozen=True, slots=True)
class Allowance:
    """For how long the ranks may stand still until that is reported, and until it is ended (None: never).

    `strict`: only what is proved to stand still is ended.
    """

    report_s: float
    end_s: float | None
    strict: bool


class Pace:
    """What is known of a job's pace. `timeout_s` is what its user has said: seconds, 0 for never, None for nothing."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._longest_s: dict[Phase, float] = {}
        self._longest_spell_s = 0.0
        self._since_s = 0.0
        self.phase = Phase.SILENT

    def begin(self, now_s: float) -> None:
        """A generation starts."""
        self.phase, self._since_s = Phase.STARTING if self._longest_s else Phase.SILENT, now_s

    def note_report(self, kind: str, now_s: float) -> None:
        """The training library has reported something."""
        phase = Phase.STARTING if self.phase is Phase.SILENT else self.phase
        if kind == "finished":
            self.phase = Phase.ENDING
            return
        if kind == "resumed" and phase is Phase.ENDING:  # it trains another model
            self.phase, self._since_s = Phase.FIRST_STEP, now_s
            return
        stepped = kind == "progress"
        if phase is Phase.ENDING or (phase is not Phase.STARTING and not stepped):
            return  # a commit, say, in the middle of a step
        self._longest_s[phase] = max(self._longest_s.get(phase, 0.0), now_s - self._since_s)
        self.phase, self._since_s = Phase.STEP if stepped else Phase.FIRST_STEP, now_s

    def note_spell(self, still_s: float) -> None:
        """The ranks stood still for `still_s` seconds, and went on by themselves."""
        self._longest_spell_s = max(self._longest_spell_s, still_s)

    def allowance(self) -> Allowance:
        """What holds in the phase that the ranks are in."""
        ending = self.phase is Phase.ENDING
        if self._timeout_s is not None and not ending:
            report_s = min(REPORT_S, self._timeout_s / 2) or REPORT_S
            return Allowance(report_s, self._timeout_s or None, strict=False)
        floor_s = MEASURED_S if self.phase in self._longest_s else UNMEASURED_S
        end_s = max(floor_s, FACTOR * self._longest_s.get(self.phase, 0.0), FACTOR * self._longest_spell_s)
        report_s = max(REPORT_S, 2 * self._longest_spell_s)
        return Allowance(report_s, None if self._timeout_s == 0 else max(end_s, self._timeout_s or 0.0), strict=True)
