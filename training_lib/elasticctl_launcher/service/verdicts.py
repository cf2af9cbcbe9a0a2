"""How the service judges the failures of this worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticctl_launcher.failure import APPLICATION, COLLATERAL, WorkerFailure
from elasticctl_launcher.service.questions import DONE, EXCUSED, EXIT, REJOIN, Inquiries, Question
from elasticctl_launcher.states import LauncherEvent

_EVENTS: Mapping[str, LauncherEvent] = {
    REJOIN: LauncherEvent.TOLD_TO_REJOIN,
    EXCUSED: LauncherEvent.TOLD_TO_REJOIN,
    EXIT: LauncherEvent.TOLD_TO_EXIT,
    DONE: LauncherEvent.GROUP_FINISHED,
}

MOST_COUNTED = 8
"""Of the failures of this worker that are remembered: of more, the service has stored the earlier ones long ago."""

log = logging.getLogger(__name__)


class Verdicts:
    """The newest failure that was reported, and the newest answer. `is_excused`: another member explains it."""

    def __init__(self, service: Inquiries) -> None:
        self._service = service
        self._reported: WorkerFailure | None = None
        self._asked: Question | None = None
        self._counted: list[WorkerFailure] = []
        self._error = ""
        self.is_excused = False

    def ask(self, failure: WorkerFailure) -> Question:
        """Report a failure; the answer comes as soon as the service knows how the other members have ended."""
        log.warning("generation %d: %s", failure.generation, failure.describe())
        self._reported = failure
        self._asked = self._service.ask_for_verdict(lambda: {**failure.to_report(), "failed": self.counted()})
        return self._asked

    def forget(self) -> None:
        """Another answer is waited for."""
        self.is_excused, self._error = False, ""

    def take(self, question: Question) -> LauncherEvent:
        """The service has answered."""
        self.is_excused, self._error = question.answer == EXCUSED, question.error
        failure = self._reported
        if question is self._asked and question.answer == REJOIN and failure and failure.verdict != COLLATERAL:
            self._counted = [*self._counted, failure][-MOST_COUNTED:]
        return _EVENTS[question.answer]

    def has_reported(self, failure: WorkerFailure) -> bool:
        """Is it the newest that was reported?"""
        return failure is self._reported

    def counted(self) -> list[dict[str, Any]]:
        """The reports of failures of this worker's own after which it was told to start again, and not excused.

        A service that was restarted before it could store them would not know.
        """
        return [failure.to_report() for failure in self._counted]

    def blamed(self, failure: WorkerFailure) -> WorkerFailure:
        """The failure that this worker is to blame for, whatever it looked like from here."""
        return replace(failure, verdict=APPLICATION, error=self._error or failure.error)
