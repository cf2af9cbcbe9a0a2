"""The agent's questions to the rendezvous service, and what it reports when it leaves.

Some answers take long: the service waits for the ends of all ranks in a generation before it judges them, and one rank
may spend an hour on an export after a job's last step. Each question is therefore asked from its own thread, which
retries while the service is away. The caller can handle SIGTERM while it waits for the answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl_launcher.service.client import Backoff, Poll, ServiceAway, ServiceClient, ServiceError, ServiceRefused
from elasticctl_launcher.spot_notice import SpotNotice
from elasticctl_launcher.system import start_thread

REJOIN, EXIT, DONE = "rejoin", "exit", "done"
EXCUSED = "rejoin, excused"
"""REJOIN because another member was lost or is to blame."""
LEAST_POLL_S = 0.5
"""The shortest time between two requests of one question, in case the service answers at once with no result."""
TELL_TIMEOUT_S = 2.0
"""How long a worker that leaves waits for its report to arrive. The service also finds out by itself."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stay:
    """How many seconds a worker that has to leave may stay, and in how many it is killed.

    `stay_s` is None if it may stay until it is told to leave; `left_s` is None if the end is unknown.
    """

    stay_s: float | None = None
    left_s: float | None = None


class Question:
    """A request, repeated with a new `body()` until `read(answer)` is not empty.

    A refusal counts as the answer `if_refused`. `on_answer(question)` is called once, from a thread, when `answer` is
    set. `error` is then the service's description of the failure in question, or empty.
    """

    def __init__(
        self,
        verb: str,
        body: Callable[[], Mapping[str, Any]],
        read: Callable[[Mapping[str, Any]], str],
        if_refused: str,
        on_answer: Callable[[Question], None],
    ) -> None:
        self._verb, self._body, self._read, self._if_refused = verb, body, read, if_refused
        self._on_answer = on_answer
        self.answer = self.error = ""
        self._withdrawn = threading.Event()

    def ask(self, poll: Poll) -> Question:
        """Start to ask; return at once."""
        start_thread(self._run, poll, name=f"ask-{self._verb}")
        return self

    def withdraw(self) -> None:
        """Stop asking; ignore the answer to an outstanding request."""
        self._withdrawn.set()

    def _run(self, poll: Poll) -> None:
        backoff = Backoff()
        while not self._withdrawn.is_set():
            asked = time.monotonic()
            try:
                said = poll(self._verb, self._body())
                answer, error = self._read(said), said.get("error")
                self.error = error if isinstance(error, str) else ""
            except ServiceAway:
                self._withdrawn.wait(backoff.next_s())
                continue
            except ServiceRefused as error:
                log.warning("%s: %s", self._verb, error)
                answer = self._if_refused
            backoff.reset()
            if answer and not self._withdrawn.is_set():
                self.answer = answer
                self._on_answer(self)
                return
            self._withdrawn.wait(max(0.0, asked + LEAST_POLL_S - time.monotonic()))


class Inquiries:
    """The questions of the worker `uid`. `poll` makes long polls; `on_answer` is called from a thread."""

    def __init__(self, client: ServiceClient, poll: Poll, uid: str, on_answer: Callable[[Question], None]) -> None:
        self._client, self._poll, self._uid, self._on_answer = client, poll, uid, on_answer

    def ask_for_verdict(self, report: Callable[[], Mapping[str, Any]]) -> Question:
        """Report that ranks have failed, and ask for REJOIN (perhaps EXCUSED) or EXIT."""
        return Question("fail", lambda: {"uid": self._uid, **report()}, _read_verdict, EXIT, self._on_answer).ask(
            self._poll
        )

    def wait_for_peers(self, generation: int, *, for_all: bool = False, terminated: bool = False) -> Question:
        """Report that all ranks here have exited with 0; the answer is DONE once all members' have, or REJOIN.

        `for_all`: the other members have no ranks, so they are done as well. `terminated`: some ranks here have exited
        because of a SIGTERM from outside.
        """
        said = {"for_all": for_all, "terminated": terminated}
        body = {"uid": self._uid, "generation": generation, **{name: True for name, is_so in said.items() if is_so}}
        return Question("finish", lambda: body, _read_state, DONE, self._on_answer).ask(self._poll)

    def ask_to_stay(self, reason: str, notice: SpotNotice | None) -> Stay:
        """Ask how long this worker, which has to leave, may stay.

        `notice` is the cloud's notice, or None if the cluster knows the reason. If the service is away or too old for
        the question, the worker may not stay.
        """
        body = {"uid": self._uid, "reason": reason[:200] or "no reason given", "stays": True}
        told = {} if notice is None else {"in_s": notice.left_s()}
        try:
            answer = self._client.call("notice", body | told, TELL_TIMEOUT_S)
        except ServiceError as error:
            log.warning("notice: %s", error)
            return Stay(0.0)
        return Stay(_seconds(answer.get("stay_s", 0.0)), _seconds(answer.get("left_s")))

    def tell(self, verb: str, reason: str) -> None:
        """Send `notice` or `leave`. If that fails, the service finds out by itself."""
        try:
            self._client.call(verb, {"uid": self._uid, "reason": reason[:200] or "no reason given"}, TELL_TIMEOUT_S)
        except ServiceError as error:
            log.warning("%s: %s", verb, error)


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _read_verdict(answer: Mapping[str, Any]) -> str:
    """Empty while the service waits for other members' ends. An answer without a verdict counts as EXIT."""
    verdict = answer.get("verdict")
    rejoin = EXCUSED if answer.get("excused") is True else REJOIN
    return "" if verdict == "pending" else rejoin if verdict == "rejoin" else EXIT


def _read_state(answer: Mapping[str, Any]) -> str:
    state = answer.get("state")
    return state if state in (DONE, REJOIN) else ""
