"""The launcher's questions to the rendezvous service, and what it reports when it leaves.

Some answers take long: the service waits for the ends of all ranks in a generation before it judges them, and one rank
may spend an hour on an export after a job's last step. Each question is therefore asked from its own thread, which
retries while the service is away. The caller can handle SIGTERM while it waits for the answer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import Enum
from typing import Any

from elasticctl_launcher.failure import WorkerFailure
from elasticctl_launcher.launcher_states import LauncherEvent
from elasticctl_launcher.service.client import (
    Poll,
    RetryPauses,
    ServiceAway,
    ServiceClient,
    ServiceError,
    ServiceRefused,
)
from elasticctl_launcher.spot_notice import SpotNotice
from elasticctl_launcher.system import start_thread
from elasticctl_protocol.failures import FailureVerdict
from elasticctl_protocol.requests import (
    WIRE,
    FailAnswer,
    FailRequest,
    FailureReport,
    FinishAnswer,
    FinishRequest,
    FinishState,
    GroupVerdict,
    LeaveRequest,
    NoticeAnswer,
    NoticeRequest,
    Polled,
)

LEAST_POLL_S = 0.5
"""The shortest time between two requests of one question, in case the service answers immediately with no result."""
REPORT_TIMEOUT_S = 2.0
"""How long a worker that leaves waits for its report to arrive. The service also finds out by itself."""
MOST_COUNTED = 8
"""How many failures of this worker are kept; the service has long stored the earlier ones."""
MAX_REASON = 200

log = logging.getLogger(__name__)


class Instruction(Enum):
    """What the service wants this worker to do; the values are the events that follow."""

    REJOIN = LauncherEvent.REJOIN_ORDERED
    EXIT = LauncherEvent.EXIT_ORDERED
    DONE = LauncherEvent.GROUP_FINISHED


class Question:
    """A request, repeated with a new `request()` until its answer has an instruction.

    A refusal counts as `if_refused`. `on_answer(question)` is called once, from a thread, when `instruction` is set.
    `is_excused`: another member was lost or is to blame. `error` is the service's description of the failure, or empty.
    """

    def __init__(
        self, request: Callable[[], Polled], if_refused: Instruction, on_answer: Callable[[Question], None]
    ) -> None:
        self._request, self._if_refused, self._on_answer = request, if_refused, on_answer
        self.instruction: Instruction | None = None
        self.is_excused, self.error = False, ""
        self._withdrawn = threading.Event()

    def ask(self, poll: Poll) -> Question:
        """Start to ask; return immediately."""
        start_thread(self._run, poll, name="question")
        return self

    def withdraw(self) -> None:
        """Stop asking; ignore the answer to an outstanding request."""
        self._withdrawn.set()

    def _run(self, poll: Poll) -> None:
        backoff = RetryPauses()
        while not self._withdrawn.is_set():
            asked, request = time.monotonic(), self._request()
            try:
                instruction = self._read(request, poll(request))
            except ServiceAway:
                self._withdrawn.wait(backoff.next_s())
                continue
            except ServiceRefused as error:
                log.warning("%s: %s", request.verb, error)
                instruction = self._if_refused
            backoff.reset()
            if instruction is not None and not self._withdrawn.is_set():
                self.instruction = instruction
                self._on_answer(self)
                return
            self._withdrawn.wait(max(0.0, asked + LEAST_POLL_S - time.monotonic()))

    def _read(self, request: Polled, answer: Mapping[str, Any]) -> Instruction | None:
        """The instruction; None while the service waits for other members' ends."""
        if isinstance(request, FinishRequest):
            state = WIRE.decode(FinishAnswer, answer).state
            return {FinishState.DONE: Instruction.DONE, FinishState.REJOIN: Instruction.REJOIN}.get(state)
        found = WIRE.decode(FailAnswer, answer)
        self.is_excused, self.error = found.excused, found.error or ""
        return {GroupVerdict.EXIT: Instruction.EXIT, GroupVerdict.REJOIN: Instruction.REJOIN}.get(found.verdict)


class Inquiries:
    """The questions of the worker `uid`. `poll` makes long polls; `on_answer` is called from a thread."""

    def __init__(self, client: ServiceClient, poll: Poll, uid: str, on_answer: Callable[[Question], None]) -> None:
        self._client, self._poll, self._uid, self._on_answer = client, poll, uid, on_answer

    def ask_for_verdict(
        self,
        report: Callable[[], FailureReport],
        failed: Callable[[], tuple[FailureReport, ...]] = tuple,
    ) -> Question:
        """Report that ranks have failed, and earlier failures; the instruction is REJOIN or EXIT."""
        return Question(lambda: FailRequest.of(self._uid, report(), failed()), Instruction.EXIT, self._on_answer).ask(
            self._poll
        )

    def wait_for_peers(self, generation: int, *, for_all: bool = False, terminated: bool = False) -> Question:
        """Report that all ranks here have exited with 0; the instruction is DONE once all members' have, or REJOIN.

        `for_all` and `terminated` are as in `FinishRequest`.
        """
        request = FinishRequest(uid=self._uid, generation=generation, for_all=for_all, terminated=terminated)
        return Question(lambda: request, Instruction.DONE, self._on_answer).ask(self._poll)

    def ask_to_stay(self, reason: str, notice: SpotNotice | None) -> NoticeAnswer:
        """Ask how long this worker, which has to leave, may stay.

        `notice` is the cloud's notice, or None if the cluster knows the reason. If the service is away or too old for
        the question, the worker may not stay.
        """
        left_s = None if notice is None else notice.left_s()
        in_s = math.inf if left_s is None and notice is not None else left_s
        request = NoticeRequest(uid=self._uid, reason=_reason(reason), stays=True, in_s=in_s)
        try:
            return self._client.send(request, NoticeAnswer, REPORT_TIMEOUT_S)
        except ServiceError as error:
            log.warning("notice: %s", error)
            return NoticeAnswer()

    def report_notice(self, reason: str) -> None:
        """Report that this worker has to leave now, so that the others drain, too."""
        self._report(NoticeRequest(uid=self._uid, reason=_reason(reason)))

    def report_leaving(self, reason: str) -> None:
        """Report that this worker leaves the group."""
        self._report(LeaveRequest(uid=self._uid, reason=_reason(reason)))

    def _report(self, request: NoticeRequest | LeaveRequest) -> None:
        """Send a report. If that fails, the service finds out by itself."""
        try:
            self._client.send(request, type(request), REPORT_TIMEOUT_S)
        except ServiceError as error:
            log.warning("%s: %s", request.verb, error)


def _reason(text: str) -> str:
    return text[:MAX_REASON] or "no reason given"


class Verdicts:
    """The newest reported failure, and the newest answer. `is_excused`: another member's end explains the failure."""

    def __init__(self, service: Inquiries) -> None:
        self._service = service
        self._reported: WorkerFailure | None = None
        self._asked: Question | None = None
        self._counted: list[WorkerFailure] = []
        self._error = ""
        self.is_excused = False

    def report_failure(self, failure: WorkerFailure) -> Question:
        """Report a failure. The answer comes once the service knows how the other members' ranks have ended."""
        log.warning("generation %d: %s", failure.generation, failure.describe())
        self._reported = failure
        self._asked = self._service.ask_for_verdict(failure.to_report, self.counted_failures)
        return self._asked

    def reset_answer(self) -> None:
        """Reset the last answer, before the wait for another one."""
        self.is_excused, self._error = False, ""

    def store_answer(self, question: Question) -> LauncherEvent:
        """Store the service's answer; return the event that it causes."""
        if question.instruction is None:
            raise RuntimeError("the service has not answered")
        self.is_excused, self._error = question.is_excused, question.error
        failure, restarts = self._reported, question.instruction is Instruction.REJOIN and not question.is_excused
        if question is self._asked and restarts and failure and failure.verdict is not FailureVerdict.COLLATERAL:
            self._counted = [*self._counted, failure][-MOST_COUNTED:]
        return question.instruction.value

    def has_reported(self, failure: WorkerFailure) -> bool:
        """True if this is the newest failure that was reported."""
        return failure is self._reported

    def counted_failures(self) -> tuple[FailureReport, ...]:
        """Return reports of this worker's own failures that the service counted before it had the worker restart.

        A service that was restarted before it could store them does not know them.
        """
        return tuple(failure.to_report() for failure in self._counted)

    def blamed(self, failure: WorkerFailure) -> WorkerFailure:
        """Return `failure` as the one that this worker is to blame for, with the service's error if it has sent one."""
        return replace(failure, verdict=FailureVerdict.APPLICATION, error=self._error or failure.error)
