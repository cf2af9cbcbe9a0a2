"""The service's verdicts on the failures of this worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticctl_launcher.failure import APPLICATION, COLLATERAL, WorkerFailure
from elasticctl_launcher.launcher_states import LauncherEvent
from elasticctl_launcher.service.agent_requests import DONE, EXCUSED, EXIT, REJOIN, Inquiries, Question

_EVENTS: Mapping[str, LauncherEvent] = {
    REJOIN: LauncherEvent.TOLD_TO_REJOIN,
    EXCUSED: LauncherEvent.TOLD_TO_REJOIN,
    EXIT: LauncherEvent.TOLD_TO_EXIT,
    DONE: LauncherEvent.GROUP_FINISHED,
}

MOST_COUNTED = 8
"""How many failures of this worker are kept; the service has long stored the earlier ones."""

log = logging.getLogger(__name__)


class Verdicts:
    """The newest reported failure, and the newest answer. `is_excused`: another member's end explains the failure."""

    def __init__(self, service: Inquiries) -> None:
        self._service = service
        self._reported: WorkerFailure | None = None
        self._asked: Question | None = None
        self._counted: list[WorkerFailure] = []
        self._error = ""
        self.is_excused = False

    def ask(self, failure: WorkerFailure) -> Question:
        """Report a failure. The answer comes once the service knows how the other members' ranks have ended."""
        log.warning("generation %d: %s", failure.generation, failure.describe())
        self._reported = failure
        self._asked = self._service.ask_for_verdict(lambda: {**failure.to_report(), "failed": self.counted_failures()})
        return self._asked

    def forget(self) -> None:
        """Reset the last answer, before the wait for another one."""
        self.is_excused, self._error = False, ""

    def take(self, question: Question) -> LauncherEvent:
        """Store the service's answer; return the event that it causes."""
        self.is_excused, self._error = question.answer == EXCUSED, question.error
        failure = self._reported
        if question is self._asked and question.answer == REJOIN and failure and failure.verdict != COLLATERAL:
            self._counted = [*self._counted, failure][-MOST_COUNTED:]
        return _EVENTS[question.answer]

    def has_reported(self, failure: WorkerFailure) -> bool:
        """True if this is the newest failure that was reported."""
        return failure is self._reported

    def counted_failures(self) -> list[dict[str, Any]]:
        """Return reports of this worker's own failures that the service counted before it told the worker to restart.

        A service that was restarted before it could store them does not know them.
        """
        return [failure.to_report() for failure in self._counted]

    def blamed(self, failure: WorkerFailure) -> WorkerFailure:
        """Return `failure` as the one that this worker is to blame for, with the service's error if it has sent one."""
        return replace(failure, verdict=APPLICATION, error=self._error or failure.error)
