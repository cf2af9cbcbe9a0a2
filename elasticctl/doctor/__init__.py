"""Checks that a context is ready to run jobs, which `elasticctl doctor` prints."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class CheckOutcome(StrEnum):
    """The result of a check, from best to worst; `SKIPPED` means unknown."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, its outcome, what was found, and how to fix it (empty: nothing to fix)."""

    name: str
    outcome: CheckOutcome
    says: str
    mend: str = ""
