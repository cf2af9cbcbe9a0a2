"""The service's answers to reported failures, and what follows from them."""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

from elasticctl_launcher.failure import WorkerFailure
from elasticctl_launcher.launcher_states import LauncherEvent
from elasticctl_launcher.service.client import ServiceClient
from elasticctl_launcher.service.questions import Inquiries, Instruction, Question, Verdicts
from elasticctl_protocol.failures import FailureVerdict
from elasticctl_protocol.requests import FailRequest, FinishRequest, Polled

LOST_PEERS = WorkerFailure.of_lost_peers("w0", 3, "connection reset")
OWN = WorkerFailure(FailureVerdict.APPLICATION, "w0", 3, 1, error="ValueError: the bug")


class Service:
    """Gives one answer to every question."""

    def __init__(self, **answer: Any) -> None:
        self.answer, self.asked = answer, list[FailRequest]()
        self.answered: queue.Queue[Question] = queue.Queue()
        inquiries = Inquiries(
            ServiceClient("127.0.0.1:1", "default", "job", ""), self._poll, "uid-0", self.answered.put
        )
        self.verdicts = Verdicts(inquiries)

    def judge(self, failure: WorkerFailure) -> LauncherEvent:
        question = self.verdicts.report_failure(failure)
        assert self.answered.get(timeout=60) is question
        return self.verdicts.store_answer(question)

    def _poll(self, request: Polled) -> dict[str, Any]:
        assert isinstance(request, FailRequest)
        self.asked.append(request)
        return self.answer


def test_a_failure_that_another_member_explains_does_not_count() -> None:
    service = Service(verdict="rejoin", excused=True)
    assert service.judge(OWN) is LauncherEvent.REJOIN_ORDERED
    assert service.asked[0].uid == "uid-0"
    assert service.verdicts.has_reported(OWN)
    assert service.verdicts.counted_failures() == ()


def test_own_failures_are_reported_again_with_the_next_one() -> None:
    service = Service(verdict="rejoin")
    for failure in (OWN, replace(OWN, generation=4), replace(LOST_PEERS, generation=5)):
        assert service.judge(failure) is LauncherEvent.REJOIN_ORDERED
    assert [[each.generation for each in request.failed] for request in service.asked] == [[], [3], [3, 4]]
    assert [each.generation for each in service.verdicts.counted_failures()] == [3, 4], (
        "nor one that a lost peer caused"
    )


def test_a_worker_whose_peers_have_not_finished_has_not_failed_again() -> None:
    service = Service(verdict="rejoin")
    service.judge(OWN)
    finish = Question(FinishRequest, Instruction.DONE, service.answered.put)
    finish.instruction = Instruction.REJOIN
    assert service.verdicts.store_answer(finish) is LauncherEvent.REJOIN_ORDERED
    assert len(service.verdicts.counted_failures()) == 1


def test_only_the_newest_failures_are_reported_again() -> None:
    service = Service(verdict="rejoin")
    for generation in range(1, 12):
        service.judge(replace(OWN, generation=generation))
    assert [each.generation for each in service.verdicts.counted_failures()] == list(range(4, 12))


def test_a_blamed_worker_fails_with_the_services_error() -> None:
    service = Service(verdict="exit", error="ran out of memory")
    assert service.judge(LOST_PEERS) is LauncherEvent.EXIT_ORDERED
    blamed = service.verdicts.blamed(LOST_PEERS)
    assert (blamed.verdict, blamed.error) == (FailureVerdict.APPLICATION, "ran out of memory")


def test_without_an_error_of_the_service_a_blamed_worker_fails_with_its_own() -> None:
    service = Service(verdict="exit")
    service.judge(LOST_PEERS)
    assert service.verdicts.blamed(LOST_PEERS).error == "connection reset"
