"""When requests are retried: within the limits, with jitter, and after the pause that a server requests."""

from __future__ import annotations

import email.utils
import random
import time
from collections.abc import Callable, Mapping

import pytest

from elasticctl_store.errors import StorageError
from elasticctl_store.storage import gcs_responses, outages, s3_responses
from elasticctl_store.storage.http import ConnectionPool, HttpRequest, HttpResponse, RetryingClient, Verdict, WireError
from elasticctl_store.storage.outages import Patience, Waiter


class Script(ConnectionPool):
    """Returns or raises the given answers in order, repeating the last one."""

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


class Clock:
    """A fake clock; `pauses` are the pauses so far."""

    def __init__(self) -> None:
        self.now_s, self.pauses = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.now_s

    def pass_on(self, seconds: float) -> None:
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.pass_on(seconds)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(outages, "time", clock)
    return clock


def call(script: Script, patience: Patience = Patience(), dialect: Plain | None = None) -> tuple[int, bool]:  # noqa: B008
    """Make a call; return its status and whether it is unsure."""
    caller = RetryingClient(script, dialect or Plain(), Waiter("s3://b", patience))
    reply = caller.call(HttpRequest("PUT", "/k"), "write k")
    return reply.answer.status, reply.unsure


@pytest.mark.parametrize(
    ("before", "unsure"), [(said(503), True), (said(429), False), (LOST, True), (UNREACHED, False)], ids=str
)
def test_a_request_that_may_have_been_carried_out_is_remembered(
    before: HttpResponse | WireError, unsure: bool, clock: Clock
) -> None:
    assert call(Script(before, said(200))) == (200, unsure)
    assert len(clock.pauses) == 1


def test_a_final_answer_is_not_retried(clock: Clock) -> None:
    script = Script(said(404))
    assert call(script) == (404, False)
    assert (script.sent, clock.pauses) == (1, [])


@pytest.mark.parametrize("judge", [s3_responses.judge, gcs_responses.judge], ids=["s3", "gs"])
def test_temporary_errors_of_services_and_proxies_are_retried(judge: Callable[[HttpResponse], Verdict]) -> None:
    for status in (429, 500, 503, 520, 522, 529, 530, 599):
        assert judge(said(status)) is Verdict.TEMPORARY, status
    for status in (200, 400, 403, 404, 412, 501, 505, 507):
        assert judge(said(status)) is Verdict.FINAL, status


def test_pauses_grow_up_to_a_limit_and_are_random() -> None:
    patience = Patience(first_pause_s=0.5, longest_pause_s=4.0)
    assert [patience.pause_s(tries, 1.0) for tries in range(1, 6)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert patience.pause_s(3, 0.0) == 0.0
    assert patience.pause_s(3, 0.5) == 1.0


def test_the_number_of_tries_can_be_limited() -> None:
    script = Script(LOST)
    with pytest.raises(StorageError, match=r"cannot write k: reset; tried 5 times in \d s"):
        call(script, Patience(tries=5))
    assert script.sent == 5


def test_the_pause_that_a_server_requests_is_kept(clock: Clock) -> None:
    later = email.utils.formatdate(time.time() + 7200, usegmt=True)
    for asked, at_least in (("7", 7.0), (later, 3600.0), ("soon", 0.0)):  # the tolerance is for a slow machine
        call(Script(said(503, **{"retry-after": asked}), said(200)), Patience(total_s=30_000.0))
        assert at_least <= clock.pauses[-1] <= 2 * at_least + 10


def test_a_requested_pause_beyond_the_time_limit_is_not_waited_for() -> None:
    script = Script(said(503, **{"retry-after": "1000"}))
    with pytest.raises(StorageError, match=r"503; tried once"):
        call(script, Patience(total_s=300.0))


class Slow(Script):
    """Every try takes as long as an upload of many GB."""

    def __init__(self, clock: Clock, *answers: HttpResponse | WireError) -> None:
        super().__init__(*answers)
        self.clock = clock

    def exchange(self, request: HttpRequest) -> HttpResponse:
        self.clock.pass_on(200.0)
        return super().exchange(request)


def test_the_time_limit_counts_from_the_first_failure(clock: Clock) -> None:
    assert call(Slow(clock, LOST, said(200)), Patience(total_s=150.0))[0] == 200


def test_the_time_limit_includes_slow_tries(clock: Clock) -> None:
    script = Slow(clock, LOST)
    with pytest.raises(StorageError, match=r"tried 3 times in 40\d s"):
        call(script, Patience(total_s=300.0))
    assert script.sent == 3


class Outage(Script):
    """A service that is away until `until_s`, and then returns `answer`."""

    def __init__(self, clock: Clock, until_s: float, away: HttpResponse | WireError, answer: HttpResponse) -> None:
        super().__init__(answer)
        self.clock, self.until_s, self.away = clock, until_s, away

    def exchange(self, request: HttpRequest) -> HttpResponse:
        if self.clock.now_s < self.until_s:
            self.answers.insert(0, self.away)
        return super().exchange(request)


@pytest.mark.parametrize("away", [said(503, **{"retry-after": "3600"}), LOST], ids=["busy", "reset"])
def test_a_request_outlasts_an_outage_of_a_day(
    away: HttpResponse | WireError, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    over_s = clock.now_s + 24 * 3600
    assert call(Outage(clock, over_s, away, said(404)))[0] == 404
    assert over_s <= clock.now_s <= over_s + Patience().longest_pause_s
    first, *rarely, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("storage s3://b: ")
    assert first.endswith("; trying again until it answers")
    assert len(rarely) < 60
    assert all(said.endswith("; still trying") for said in rarely)
    assert last.endswith(": over after 24h00m")


def test_waits_report_their_reason_at_any_time(clock: Clock) -> None:
    waiter = Waiter("s3://b")
    assert waiter.waits.reason() == ""
    with waiter.request("write k") as tries, waiter.request("write l") as later:
        tries.failed("503 SlowDown")
        clock.pass_on(240)
        later.failed("reset")
        assert waiter.waits.reason() == "storage s3://b: 503 SlowDown for 4m"
    assert waiter.waits.reason() == ""


def test_short_failures_are_not_logged(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert call(Script(said(503), said(503), said(200)))[0] == 200
    assert caplog.records == []


def test_credentials_are_renewed_once() -> None:
    dialect = Plain()
    assert call(Script(said(401), said(200)), dialect=dialect) == (200, False)
    assert call(Script(said(401)), dialect=dialect) == (401, False)
    assert dialect.renewed == 2


def test_credentials_that_expire_again_in_a_long_outage_are_renewed_again() -> None:
    assert call(Script(said(401), said(503), said(401), said(200)))[0] == 200


def test_an_unavailable_source_of_credentials_is_retried(clock: Clock) -> None:
    class Away(Plain):
        def renew(self) -> None:
            super().renew()
            if clock.now_s < 4600:
                raise WireError("no token for now", sent=False)

    assert call(Script(said(401), said(200)), dialect=Away())[0] == 200
    assert clock.now_s >= 4600


def test_a_final_error_is_not_retried() -> None:
    script = Script(WireError("its certificate is not trusted", sent=False, final=True))
    with pytest.raises(StorageError, match="cannot write k: its certificate is not trusted"):
        call(script)
    assert script.sent == 1


def test_retries_do_not_use_the_scripts_random_numbers() -> None:
    """A run that has waited for a storage computes the same as any other."""
    before = random.getstate()
    with Waiter("s3://bucket").request("ask") as tries:
        tries.failed("it does not answer")
    assert random.getstate() == before
