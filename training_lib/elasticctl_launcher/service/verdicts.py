"""How the service judges the failures of this worker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticctl_launcher.failure import APPLICATION, WorkerFailure
from elasticctl_launcher.service.questions import DONE, EXCUSED, EXIT, REJOIN, Inquiries, Question
from elasticctl_launcher.states import LauncherEvent

_EVENTS: Mapping[str, LauncherEvent] = {
    REJOIN: LauncherEvent.TOLD_TO_REJOIN,
    EXCUSED: LauncherEvent.TOLD_TO_REJOIN,
    EXIT: LauncherEvent.TOLD_TO_EXIT,
    DONE: LauncherEvent.GROUP_FINISHED,
}

log = logging.getLogger(__name__)


class Verdicts:
    """The newest failure that was reported, and the newest answer. `is_excused`: another member explains it."""

    def __init__(self, service: Inquiries) -> None:
        self._service = service
        self._reported: WorkerFailure | None = None
        self._error = ""
        self.is_excused = False

    def ask(self, failure: WorkerFailure) -> Question:
        """Report a failure; the answer comes as soon as the service knows how the other members have ended."""
        log.warning("generation %d: %s", failure.generation, failure.describe())
        self._reported = failure
        return self._service.ask_for_verdict(failure.to_report)

    def forget(self) -> None:
        """Another answer is waited for."""
        self.is_excused, self._error = False, ""

    def take(self, question: Question) -> LauncherEvent:
        """The service has answered."""
        self.is_excused, self._error = question.answer == EXCUSED, question.error
        return _EVENTS[question.answer]

    def has_reported(self, failure: WorkerFailure) -> bool:
        """Is it the newest that was reported?"""
        return failure is self._reported

    def counted(self, failure: WorkerFailure | None) -> dict[str, Any] | None:
        """The report of a failure that counts against the job; None if it was excused, or not reported."""
        if failure is None or not self.has_reported(failure) or self.is_excused:
            return None
        return failure.to_report()

    def blamed(self, failure: WorkerFailure) -> WorkerFailure:
        """The failure that this worker is to blame for, whatever it looked like from here."""
        return replace(failure, verdict=APPLICATION, error=self._error or failure.error)
