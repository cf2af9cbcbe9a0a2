"""What has to be in order before jobs run well in a context, checked one by one; `elasticctl doctor` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckOutcome(StrEnum):
    """How a check went, from best to worst; `SKIPPED` means unknown."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, its outcome, what was found, and what to do about it (empty: nothing)."""

    name: str
    outcome: CheckOutcome
    says: str
    mend: str = ""
