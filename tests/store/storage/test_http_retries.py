"""When requests are tried again: bounded, with jitter, and as the server asks."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable, Mapping

import pytest

from elasticctl_store.errors import StorageError
from elasticctl_store.storage import gcs_responses, http, s3_responses
from elasticctl_store.storage.http import Caller, Connections, HttpRequest, HttpResponse, Patience, Verdict, WireError


class Script(Connections):
    """Answers, or the lack of them, one after the other; the last one for ever."""

    def __init__(self, *answers: HttpResponse | WireError) -> None:
        self.answers, self.sent = list(answers), 0

    def exchange(self, request: HttpRequest) -> HttpResponse:
        self.sent += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, WireError):
            raise answer
        return answer


class Plain:
    """A dialect: 200 and 404 are final, 401 is stale credentials."""

    renewed = 0

    def sign(self, request: HttpRequest) -> Mapping[str, str]:
        return request.headers

    def renew(self) -> None:
        self.renewed += 1

    def judge(self, answer: HttpResponse) -> Verdict:
        return {200: Verdict.FINAL, 404: Verdict.FINAL, 401: Verdict.STALE_CREDENTIALS}.get(
            answer.status, Verdict.TEMPORARY
        )

    def reason(self, answer: HttpResponse) -> str:
        return str(answer.status)


def said(status: int, **headers: str) -> HttpResponse:
    return HttpResponse(status, headers, b"")


LOST = WireError("reset", sent=True)
UNREACHED = WireError("cannot connect", sent=False)


def call(script: Script) -> tuple[int, bool, list[float], int]:
    """Status, unsure, pauses and renewals of a call."""
    pauses: list[float] = []
    dialect = Plain()
    reply = Caller(script, dialect, Patience(tries=5), pauses.append).call(HttpRequest("PUT", "/k"), "write k")
    return reply.answer.status, reply.unsure, pauses, dialect.renewed


@pytest.mark.parametrize(
    ("before", "unsure"), [(said(503), True), (said(429), False), (LOST, True), (UNREACHED, False)], ids=str
)
def test_what_may_have_been_done_is_remembered(before: HttpResponse | WireError, unsure: bool) -> None:
    status, found, pauses, _ = call(Script(before, said(200)))
    assert (status, found, len(pauses)) == (200, unsure, 1)


def test_a_final_answer_is_taken_at_once() -> None:
    script = Script(said(404))
    assert call(script) == (404, False, [], 0)
    assert script.sent == 1


@pytest.mark.parametrize("judge", [s3_responses.judge, gcs_responses.judge], ids=["s3", "gs"])
def test_what_a_service_or_its_proxy_cannot_do_now_is_tried_again(judge: Callable[[HttpResponse], Verdict]) -> None:
    for status in (429, 500, 503, 520, 522, 529, 530, 599):
        assert judge(said(status)) is Verdict.TEMPORARY, status
    for status in (200, 400, 403, 404, 412, 501, 505, 507):
        assert judge(said(status)) is Verdict.FINAL, status


def test_pauses_grow_up_to_a_limit_and_are_drawn() -> None:
    patience = Patience(first_pause_s=0.5, longest_pause_s=4.0)
    assert [patience.pause_s(tries, 1.0) for tries in range(1, 6)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert patience.pause_s(3, 0.0) == 0.0
    assert patience.pause_s(3, 0.5) == 1.0


def test_the_number_of_tries_is_bounded() -> None:
    script = Script(LOST)
    with pytest.raises(StorageError, match=r"cannot write k: reset; tried 5 times in 0 s"):
        call(script)
    assert script.sent == 5


def test_what_a_server_asks_for_is_waited_for() -> None:
    later = email.utils.formatdate(time.time() + 100, usegmt=True)
    for asked, at_least in (("7", 7.0), (later, 90.0), ("soon", 0.0)):
        _, _, (pause_s,), _ = call(Script(said(503, **{"retry-after": asked}), said(200)))
        assert at_least <= pause_s <= at_least + 10


def test_more_patience_than_there_is_is_not_waited_for() -> None:
    script = Script(said(503, **{"retry-after": "1000"}))
    with pytest.raises(StorageError, match=r"503; tried once"):
        call(script)


class Clock:
    """Time that only what happens takes."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def pass_on(self, seconds: float) -> None:
        self.now_s += seconds


class Slow(Script):
    """Every try takes as long as an upload of many GB."""

    def __init__(self, clock: Clock, *answers: HttpResponse | WireError) -> None:
        super().__init__(*answers)
        self.clock = clock

    def exchange(self, request: HttpRequest) -> HttpResponse:
        self.clock.pass_on(200.0)
        return super().exchange(request)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(http, "time", clock)
    return clock


def test_patience_begins_with_the_first_failure(clock: Clock) -> None:
    caller = Caller(Slow(clock, LOST, said(200)), Plain(), Patience(total_s=150.0), clock.pass_on)
    assert caller.call(HttpRequest("PUT", "/k"), "write k").answer.status == 200


def test_patience_ends_however_slow_the_tries_are(clock: Clock) -> None:
    script = Slow(clock, LOST)
    with pytest.raises(StorageError, match=r"tried 3 times in 40\d s"):
        Caller(script, Plain(), Patience(total_s=300.0), clock.pass_on).call(HttpRequest("PUT", "/k"), "write k")
    assert script.sent == 3


def test_credentials_are_renewed_once() -> None:
    assert call(Script(said(401), said(200)))[::3] == (200, 1)
    assert call(Script(said(401)))[::3] == (401, 1)


def test_what_is_of_no_use_is_not_tried_again() -> None:
    script = Script(WireError("its certificate is not trusted", sent=False, final=True))
    with pytest.raises(StorageError, match="cannot write k: its certificate is not trusted"):
        call(script)
    assert script.sent == 1
