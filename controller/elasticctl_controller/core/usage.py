"""What workers use of their machines, as their launchers report it, and how often the job's status is updated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from elasticctl.api.usage import JobUsage, WorkerUsage

SHOW_EVERY_S = 9.0
"""Launchers measure every 10 s, so with many workers there is a new report at any moment."""


@dataclass(slots=True)
class UsageReports:
    """The newest measurement of each worker, by uid."""

    newest: dict[str, WorkerUsage] = field(default_factory=dict)
    shown_at: float = -SHOW_EVERY_S

    def note(self, uid: str, usage: WorkerUsage, now: float) -> bool:
        """Keep a worker's measurement; True if the job's status should be updated now."""
        is_due = uid not in self.newest or now >= self.shown_at + SHOW_EVERY_S
        self.newest[uid] = usage
        if is_due:
            self.shown_at = now
        return is_due

    def keep(self, uids: Collection[str]) -> None:
        """Forget the measurements of all other workers."""
        for uid in [uid for uid in self.newest if uid not in uids]:
            del self.newest[uid]

    def of_group(self, alive: Mapping[str, str]) -> JobUsage | None:
        """The usage of the live workers, in their order; None if there is no measurement of any."""
        found = [self.newest[uid] for uid in alive if uid in self.newest]
        return JobUsage.of(found) if found else None
