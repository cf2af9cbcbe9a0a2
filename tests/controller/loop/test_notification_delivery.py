"""Sending news: once, in order, gathered, tried again, never in the way, and no secret in a word of it."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from elasticctl_controller.core import notifications
from elasticctl_controller.loop import notification_delivery
from elasticctl_controller.loop.notification_delivery import Destination, Outbox, SendTimes
from elasticctl_controller.loop.webhooks import LOOKUPS, WebhookError, WebhookRules
from tests.support.controller.samples import NOW
from tests.support.waiting import wait_until
from tests.support.webhooks import Hook, serving

QUICK = SendTimes(gather_s=0.1, answer_s=600.0, first_pause_s=0.02, longest_pause_s=0.1)
HERE = WebhookRules(own_machine=True)
SLACK = Destination("default", "secret:slack")


class Office:
    """An outbox, and what it complains of; `urls` by reference."""

    def __init__(self, pace: SendTimes = QUICK) -> None:
        self.urls: dict[str, str] = {}
        self.trouble: list[tuple[str, str]] = []
        self.outbox = Outbox(self._url_of, lambda item, message: self.trouble.append((item.job, message)), pace, HERE)

    def _url_of(self, destination: Destination) -> str:
        if destination.reference not in self.urls:
            raise WebhookError(f"there is no {destination.reference}")
        return self.urls[destination.reference]

    def tell(self, text: str, destination: Destination = SLACK, job: str = "digits") -> None:
        item = notifications.Notification(
            notifications.NotificationKind.STARTED, destination.namespace, job, "uid", NOW, text
        )
        self.outbox.put(destination, item)


Offices = Callable[..., Office]


@pytest.fixture
def office() -> Iterator[Offices]:
    made: list[Office] = []

    def make(hook: Hook | None = None, pace: SendTimes = QUICK, *, started: bool = True) -> Office:
        one = Office(pace)
        if hook is not None:
            one.urls["secret:slack"] = hook.url
        made.append(one)
        if started:
            one.outbox.start()
        return one

    yield make
    for one in made:
        one.outbox.stop(600.0)
        assert not one.outbox._thread.is_alive()


def test_a_message_is_signed_with_the_key_after_the_url(office: Offices) -> None:
    with serving(Hook()) as hook:
        one = office(hook)
        one.urls["secret:slack"] = f"{hook.url}\nwhsec_a2V5\n"
        one.tell("starts")
        wait_until(lambda: hook.texts)
    assert [signature[:3] for signature in hook.signatures] == ["v1,"]


def test_trouble_that_cannot_be_told_ends_no_delivery(office: Offices, caplog: pytest.LogCaptureFixture) -> None:
    def broken(item: notifications.Notification, message: str) -> None:
        raise KeyError("a bug")

    with serving(Hook()) as hook:
        one = office()
        one.outbox._on_failure = broken
        one.tell("before there is a URL")
        wait_until(lambda: "the failure could not be recorded" in caplog.text)
        one.urls["secret:slack"] = hook.url
        one.tell("now")
        wait_until(lambda: hook.texts)


def test_news_is_delivered_in_order_and_gathered(office: Offices) -> None:
    with serving(Hook()) as hook:
        one = office(hook, started=False)
        for n in range(10):
            one.tell(f"change {n}")
        one.outbox.start()
        wait_until(lambda: len(hook.texts) == 10)
        assert len(hook.got) == 1, "a burst is one message"
        assert [line.rpartition(" ")[2] for line in hook.texts] == [str(n) for n in range(10)]
        one.tell("later")
        wait_until(lambda: len(hook.got) == 2)
        assert hook.calls[1] - hook.calls[0] >= QUICK.gather_s
        assert one.trouble == []


def test_a_server_that_fails_for_a_while_gets_everything_once(office: Offices) -> None:
    answers = {1: (500, {}), 2: (429, {"Retry-After": "0"}), 3: (503, {})}
    with serving(Hook(answer=lambda number: answers.get(number, (200, {})))) as hook:
        one = office(hook)
        one.tell("first")
        wait_until(lambda: len(hook.calls) >= 2)
        one.tell("second")
        wait_until(lambda: len(hook.texts) == 2)
        assert [line.rpartition(" ")[2] for line in hook.texts] == ["first", "second"]
        assert one.trouble == []


@pytest.mark.parametrize(
    ("status", "calls", "why"), [(500, 6, "it answered 500; tried 6 times"), (404, 1, "it answered 404")]
)
def test_a_server_that_goes_on_failing_is_given_up_and_said(
    office: Offices, status: int, calls: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Hook(answer=lambda number: (status, {}))) as hook:
        one = office(hook)
        one.tell("x")
        wait_until(lambda: one.trouble)
        assert one.trouble == [("digits", f"a notification was not delivered to secret:slack: {why}")]
        assert len(hook.calls) == calls
        assert "planted-secret" not in caplog.text


def test_a_redirect_is_not_followed(office: Offices) -> None:
    with serving(Hook()) as elsewhere:
        with serving(Hook(answer=lambda number: (307, {"Location": elsewhere.url}))) as hook:
            one = office(hook)
            one.tell("x")
            wait_until(lambda: one.trouble)
            assert "answered 307, and redirects are not followed" in one.trouble[0][1]
        assert elsewhere.calls == []


def test_nobody_there_and_nobody_answering_are_said_without_the_address(
    office: Offices, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notification_delivery, "TRIES", 2)
    with socket.socket() as closed, socket.socket() as silent:
        for end in (closed, silent):
            end.bind(("127.0.0.1", 0))
        silent.listen()
        for end, answer_s, said in (
            (closed, 600.0, "no connection (ClientConnectorError); tried 2 times"),
            (silent, 0.1, "no answer within 0.1 s; tried 2 times"),
        ):
            one = office(pace=SendTimes(gather_s=0.01, answer_s=answer_s, first_pause_s=0.01))
            one.urls["secret:slack"] = f"http://127.0.0.1:{end.getsockname()[1]}/planted-secret"
            one.tell("x")
            wait_until(lambda one=one: one.trouble)  # type: ignore[misc]
            assert one.trouble[0][1].endswith(said)
            assert "planted-secret" not in caplog.text + str(one.trouble)


def test_a_secret_that_is_missing_is_said_and_used_once_it_is_there(office: Offices) -> None:
    with serving(Hook()) as hook:
        one = office()
        one.tell("lost")
        wait_until(lambda: one.trouble)
        assert one.trouble[0][1] == "a notification was not delivered to secret:slack: there is no secret:slack"
        one.urls["secret:slack"] = hook.url
        one.tell("found")
        wait_until(lambda: hook.texts)
        assert hook.texts[0].endswith("found")


def test_a_slow_server_holds_up_nobody_else(office: Offices) -> None:
    with serving(Hook()) as slow, serving(Hook()) as quick:
        slow.open.clear()
        one = office(slow)
        one.urls["secret:other"] = quick.url
        one.tell("x")
        wait_until(lambda: slow.calls)
        one.tell("y", Destination("default", "secret:other"))
        wait_until(lambda: quick.got)
        assert not slow.got
        slow.open.set()
        wait_until(lambda: slow.got)


def test_of_more_news_than_can_be_kept_the_oldest_go_and_are_counted(office: Offices) -> None:
    blocked = threading.Event()
    with serving(Hook()) as hook:
        one = office(hook)
        url = one.urls["secret:slack"]
        one.outbox._value_of = lambda destination: (blocked.wait(), url)[1]  # type: ignore[assignment]
        one.tell("first")
        wait_until(lambda: not one.outbox._queues[SLACK].pending)
        for n in range(notification_delivery.MAX_PENDING + 50):
            one.tell(f"change {n}")
        assert len(one.outbox._queues[SLACK].pending) == notification_delivery.MAX_PENDING
        blocked.set()
        wait_until(lambda: len(hook.got) == 2)
        assert hook.got[1]["elasticctl"]["omitted"] == notification_delivery.MAX_PENDING + 50 - 20
        assert hook.texts[-1].endswith(f"change {notification_delivery.MAX_PENDING + 49}")


def test_what_is_left_goes_out_at_the_end(office: Offices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification_delivery, "STOP_S", 600.0)
    with serving(Hook()) as hook:
        one = office(hook, SendTimes(gather_s=600.0))
        one.tell("last")
        one.outbox.stop(600.0)
        assert [line.rpartition(" ")[2] for line in hook.texts] == ["last"]
        one.tell("too late")
        assert len(hook.texts) == 1


def test_the_end_does_not_wait_for_who_does_not_answer(
    office: Offices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notification_delivery, "STOP_S", 0.3)
    caplog.set_level(logging.ERROR)
    with serving(Hook()) as hook:
        hook.open.clear()
        one = office(hook, SendTimes(gather_s=600.0, answer_s=600.0))
        one.tell("x")
        one.outbox.stop(600.0)
        assert not one.outbox._thread.is_alive()
    assert caplog.records == []


def test_no_more_destinations_than_can_be_looked_after(office: Offices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notification_delivery, "MAX_DESTINATIONS", 2)
    one = office(pace=SendTimes(gather_s=600.0))
    for n in range(4):
        one.tell("x", Destination(f"ns-{n}", "secret:slack"))
    assert len(one.outbox._queues) == 2


def test_a_hundred_dead_webhooks_of_a_project_delay_no_other(office: Offices) -> None:
    """Neither by the lookups that hang, which take threads, nor by their number."""
    blocked, hanging = threading.Event(), list[str]()
    with serving(Hook()) as hook:
        one = office()

        def url_of(destination: Destination) -> str:
            if destination.namespace == "dead":
                hanging.append(destination.reference)
                blocked.wait()
                raise WebhookError("nobody answers")
            return hook.url

        one.outbox._value_of = url_of  # type: ignore[assignment]
        try:
            for n in range(notification_delivery.MAX_PROJECT_DESTINATIONS + 20):
                one.tell("x", Destination("dead", f"secret:{n}"))
            assert len(one.outbox._queues) == notification_delivery.MAX_PROJECT_DESTINATIONS
            wait_until(lambda: len(hanging) == LOOKUPS)
            one.tell("alive", Destination("live", "secret:slack"))
            wait_until(lambda: hook.texts)
            assert len(hanging) == LOOKUPS, "the news of the other project has not waited for any of them"
        finally:
            blocked.set()
