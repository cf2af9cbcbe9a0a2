"""What becomes of a failure that was reported."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from typing import Any

import pytest

from elasticctl_launcher.failure import APPLICATION, WorkerFailure
from elasticctl_launcher.service.client import ServiceClient
from elasticctl_launcher.service.questions import Inquiries, Question
from elasticctl_launcher.service.verdicts import Verdicts
from elasticctl_launcher.states import LauncherEvent

LOST_PEERS = WorkerFailure.of_lost_peers("w0", 3, "connection reset")


class Service:
    """Gives one answer to every question."""

    def __init__(self, **answer: Any) -> None:
        self.answer, self.asked = answer, list[Mapping[str, Any]]()
        self.answered: queue.Queue[Question] = queue.Queue()
        inquiries = Inquiries(
            ServiceClient("127.0.0.1:1", "default", "job", ""), self._poll, "uid-0", self.answered.put
        )
        self.verdicts = Verdicts(inquiries)

    def judge(self, failure: WorkerFailure) -> LauncherEvent:
        question = self.verdicts.ask(failure)
        assert self.answered.get(timeout=60) is question
        return self.verdicts.take(question)

    def _poll(self, verb: str, body: Mapping[str, Any]) -> dict[str, Any]:
        assert verb == "fail"
        self.asked.append(body)
        return self.answer


def test_a_failure_that_another_member_explains_does_not_count() -> None:
    service = Service(verdict="rejoin", excused=True)
    assert service.judge(LOST_PEERS) is LauncherEvent.TOLD_TO_REJOIN
    assert service.asked[0]["uid"] == "uid-0"
    assert service.verdicts.has_reported(LOST_PEERS)
    assert service.verdicts.counted(LOST_PEERS) is None
    service.verdicts.forget()
    assert service.verdicts.counted(LOST_PEERS) == LOST_PEERS.to_report()


def test_a_failure_that_nobody_explains_counts() -> None:
    service = Service(verdict="rejoin")
    assert service.judge(LOST_PEERS) is LauncherEvent.TOLD_TO_REJOIN
    assert service.verdicts.counted(LOST_PEERS) == LOST_PEERS.to_report()


@pytest.mark.parametrize("other", [None, WorkerFailure.of_lost_peers("w0", 3, "connection reset")])
def test_a_failure_that_was_not_reported_does_not_count(other: WorkerFailure | None) -> None:
    service = Service(verdict="rejoin")
    service.judge(LOST_PEERS)
    assert service.verdicts.counted(other) is None


def test_a_worker_that_is_to_blame_fails_with_what_the_service_has_found() -> None:
    service = Service(verdict="exit", error="ran out of memory")
    assert service.judge(LOST_PEERS) is LauncherEvent.TOLD_TO_EXIT
    blamed = service.verdicts.blamed(LOST_PEERS)
    assert (blamed.verdict, blamed.error) == (APPLICATION, "ran out of memory")


def test_a_worker_that_is_to_blame_for_what_it_reported_fails_with_that() -> None:
    service = Service(verdict="exit")
    service.judge(LOST_PEERS)
    assert service.verdicts.blamed(LOST_PEERS).error == "connection reset"
