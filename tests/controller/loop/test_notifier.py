"""Notifications: which changes of jobs are sent, and how they are delivered to webhooks."""

from __future__ import annotations

import base64
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticctl.api.codec import to_json
from elasticctl.api.errors import ClusterError, ForbiddenError, NotFoundError
from elasticctl.api.spec import ANNOTATION_NOTIFY, ElasticJob
from elasticctl.api.status import JobStatus, Phase
from elasticctl.cluster.local.paths import LocalPaths
from elasticctl.cluster.local.secrets import Secrets
from elasticctl_controller.core import notifications
from elasticctl_controller.core.notifications import Notification
from elasticctl_controller.kube.event_recorder import kube_webhook_urls
from elasticctl_controller.local.supervisor import local_webhook_urls
from elasticctl_controller.loop import notifier as noticing_module
from elasticctl_controller.loop import notifier as sending
from elasticctl_controller.loop.notifier import Destination, Notifier, Outbox, SendTimes, report_as_events
from elasticctl_controller.loop.webhooks import LOOKUPS, WebhookError, WebhookRules
from tests.support.controller.samples import NOW, a_job
from tests.support.waiting import wait_until
from tests.support.webhooks import Hook, serving

RUNNING = JobStatus(phase=Phase.RUNNING, active=3)


class Place:
    """A workload of one job, in memory."""

    def __init__(self) -> None:
        self.manifest: dict[str, Any] | None = None
        self.events: list[tuple[str, str, str]] = []

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not asked for")

    def get_job(self, key: str) -> Mapping[str, Any] | None:
        return self.manifest

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        metadata = {"name": job.name, "uid": job.uid, "annotations": {ANNOTATION_NOTIFY: job.notify}}
        self.manifest = {"metadata": metadata, "status": to_json(status)}

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        self.events.append((job.name, reason, message))


class Post:
    """Keeps what would be sent."""

    def __init__(self) -> None:
        self.got: list[tuple[Destination, Notification]] = []

    def put(self, destination: Destination, item: Notification) -> None:
        self.got.append((destination, item))

    @property
    def kinds(self) -> list[str]:
        return [item.kind.value for _, item in self.got]


@pytest.fixture
def post() -> Post:
    return Post()


@pytest.fixture
def noticing() -> Iterator[Callable[..., Notifier]]:
    """Makes notifiers that report a waiting job immediately, once they have been started."""
    made: list[Notifier] = []

    def make(place: Place, post: Post, *, started: bool = True) -> Notifier:
        made.append(Notifier(place.get_job, post, 0.05, lambda: NOW))  # type: ignore[arg-type]
        if started:
            made[-1].start()
        return made[-1]

    yield make
    for one in made:
        one.stop()


Noticing = Callable[..., Notifier]


def write(place: Place, made: Notifier, job: ElasticJob, status: JobStatus) -> None:
    """Store a status and announce it, as the loop does."""
    place.write_status(job, status)
    made.announce(job, status)


def test_only_jobs_that_want_it_are_reported(noticing: Noticing, post: Post) -> None:
    place = Place()
    made = noticing(place, post)
    write(place, made, a_job(), RUNNING)
    assert post.got == []
    wanting = a_job(notify="secret:slack", namespace="team-a")
    write(place, made, wanting, RUNNING)
    assert [(destination, item.kind.value) for destination, item in post.got] == [
        (Destination("team-a", "secret:slack"), "started")
    ]
    write(place, made, replace(wanting, status=RUNNING), replace(RUNNING, active=2))
    assert post.kinds == ["started"]


def test_a_long_wait_is_reported_once_with_its_reason(noticing: Noticing, post: Post) -> None:
    place, job = Place(), a_job(notify="secret:slack")
    made = noticing(place, post)
    waiting = JobStatus(phase=Phase.PENDING, message="waits for 2 GPUs")
    write(place, made, job, waiting)
    wait_until(lambda: post.kinds == ["waits"])
    assert post.got[0][1].text == "has been waiting for 0.0s: waits for 2 GPUs"
    write(place, made, replace(job, status=waiting), replace(waiting, message="waits for 1 GPU"))
    write(place, made, replace(job, status=waiting), RUNNING)
    restarting = replace(RUNNING, phase=Phase.RESTARTING)
    write(place, made, replace(job, status=RUNNING), restarting)
    wait_until(lambda: post.kinds == ["waits", "started", "waits"])


def test_only_the_job_that_has_the_name_now_is_watched(noticing: Noticing, post: Post) -> None:
    """The old one was announced, and deleted and created again before its deletion was seen."""
    place = Place()
    made = noticing(place, post, started=False)
    for uid in ("old", "new"):
        write(place, made, replace(a_job(notify="secret:slack"), uid=uid), JobStatus())
    assert list(made._waits) == ["new"]


@pytest.mark.parametrize("gone", [None, {"metadata": {"name": "digits", "uid": "another"}}])
def test_a_job_that_is_gone_waits_no_more(noticing: Noticing, post: Post, gone: dict[str, Any] | None) -> None:
    place = Place()
    made = noticing(place, post, started=False)
    write(place, made, a_job(notify="secret:slack"), JobStatus())
    place.manifest = gone
    made.start()
    wait_until(lambda: not made._waits)
    assert post.got == []


def test_a_store_that_fails_for_a_while_ends_no_watch_over_who_waits(
    noticing: Noticing, post: Post, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noticing_module, "RETRY_S", 0.05)
    errors: list[Exception] = [ClusterError("the disk is away"), KeyError("a bug")]

    class Failing(Place):
        def get_job(self, key: str) -> Mapping[str, Any] | None:
            if errors:
                raise errors.pop(0)
            return super().get_job(key)

    place = Failing()
    made = noticing(place, post)
    write(place, made, a_job(notify="secret:slack"), JobStatus(message="waits for 2 GPUs"))
    wait_until(lambda: not errors)
    write(place, made, a_job(notify="secret:slack", uid="another"), JobStatus(message="waits for 2 GPUs"))
    wait_until(lambda: post.kinds == ["waits"])


def test_a_job_that_is_deleted_after_its_wait_was_reported_is_dropped(noticing: Noticing, post: Post) -> None:
    place = Place()
    made = noticing(place, post)
    write(place, made, a_job(notify="secret:slack"), JobStatus())
    wait_until(lambda: post.kinds == ["waits"])
    assert made._waits
    made.drop_job("default/digits")
    assert not made._waits


def test_an_undelivered_notification_becomes_an_event_of_that_very_job() -> None:
    place = Place()
    place.write_status(a_job(), RUNNING)
    item = Notification("started", "default", "digits", "job-uid-1", 0.0, "x")  # type: ignore[arg-type]
    report = report_as_events(place)  # type: ignore[arg-type]
    report(item, "it answered 404")
    report(replace(item, uid="its predecessor"), "it answered 404")
    assert place.events == [("digits", "NotifyFailed", "it answered 404")]


# Where URLs come from

URL = "https://hooks.example.org/planted"


def test_on_this_machine_a_url_comes_from_a_secret_a_file_or_a_variable(tmp_path: Path) -> None:
    paths = LocalPaths(tmp_path / "state", tmp_path / "run")
    paths.create()
    Secrets(paths).write("default", "elasticctl-notify", {"slack": URL})
    (tmp_path / "hook").write_text(URL + "\n")
    url_of = local_webhook_urls(paths, {"HOOK": URL})
    for reference in ("secret:slack", "slack", f"file:{tmp_path}/hook", "env:HOOK"):
        assert url_of(Destination("default", reference)).strip() == URL
    for destination, why in [
        (Destination("other", "secret:slack"), "namespace other has no secret elasticctl-notify with the key slack"),
        (Destination("default", "secret:teams"), "with the key teams"),
        (Destination("default", "env:NONE"), "NONE is not in the environment"),
        (Destination("default", f"file:{tmp_path}/none"), "No such file"),
    ]:
        with pytest.raises(WebhookError, match=why):
            url_of(destination)


class Secretive:
    """An API server that has one Secret."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.data: dict[str, Any] = {"slack": base64.b64encode(URL.encode()).decode()}
        self.error: Exception | None = None

    def request(self, method: str, path: str) -> dict[str, Any]:
        self.asked.append(f"{method} {path}")
        if self.error is not None:
            raise self.error
        return {"data": self.data}


def test_on_kubernetes_it_comes_from_the_one_secret_of_the_jobs_namespace() -> None:
    api = Secretive()
    assert kube_webhook_urls(api)(Destination("team-a", "slack")) == URL
    assert api.asked == ["GET /api/v1/namespaces/team-a/secrets/elasticctl-notify"]


@pytest.mark.parametrize(
    ("reference", "data", "error", "why"),
    [
        ("secret:teams", {}, None, "with the key teams"),
        ("secret:slack", {"slack": "*"}, None, "is not text"),
        ("secret:slack", {"slack": base64.b64encode(b"\xff").decode()}, None, "is not text"),
        ("secret:slack", {}, NotFoundError("none"), "no secret elasticctl-notify"),
        ("file:/etc/shadow", {}, None, "works on the local cluster only"),
        ("env:HOME", {}, None, "works on the local cluster only"),
    ],
)
def test_an_unusable_secret_is_reported(
    reference: str, data: dict[str, Any], error: Exception | None, why: str
) -> None:
    api = Secretive()
    api.data, api.error = data, error
    with pytest.raises(WebhookError, match=why):
        kube_webhook_urls(api)(Destination("team-a", reference))


def test_a_controller_that_may_not_read_the_secret_reports_that() -> None:
    api = Secretive()
    api.error = ForbiddenError("secrets is forbidden")
    with pytest.raises(ForbiddenError):
        kube_webhook_urls(api)(Destination("team-a", "slack"))


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

    def put(self, text: str, destination: Destination = SLACK, job: str = "digits") -> None:
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
        one.put("starts")
        wait_until(lambda: hook.texts)
    assert [signature[:3] for signature in hook.signatures] == ["v1,"]


def test_a_failure_that_cannot_be_recorded_ends_no_delivery(office: Offices, caplog: pytest.LogCaptureFixture) -> None:
    def broken(item: notifications.Notification, message: str) -> None:
        raise KeyError("a bug")

    with serving(Hook()) as hook:
        one = office()
        one.outbox._on_failure = broken
        one.put("before there is a URL")
        wait_until(lambda: "the failure could not be recorded" in caplog.text)
        one.urls["secret:slack"] = hook.url
        one.put("now")
        wait_until(lambda: hook.texts)


def test_notifications_are_delivered_in_order_and_gathered(office: Offices) -> None:
    with serving(Hook()) as hook:
        one = office(hook, started=False)
        for n in range(10):
            one.put(f"change {n}")
        one.outbox.start()
        wait_until(lambda: len(hook.texts) == 10)
        assert len(hook.got) == 1, "a burst is one message"
        assert [line.rpartition(" ")[2] for line in hook.texts] == [str(n) for n in range(10)]
        one.put("later")
        wait_until(lambda: len(hook.got) == 2)
        assert hook.calls[1] - hook.calls[0] >= QUICK.gather_s
        assert one.trouble == []


def test_a_server_that_fails_for_a_while_gets_everything_once(office: Offices) -> None:
    answers = {1: (500, {}), 2: (429, {"Retry-After": "0"}), 3: (503, {})}
    with serving(Hook(answer=lambda number: answers.get(number, (200, {})))) as hook:
        one = office(hook)
        one.put("first")
        wait_until(lambda: len(hook.calls) >= 2)
        one.put("second")
        wait_until(lambda: len(hook.texts) == 2)
        assert [line.rpartition(" ")[2] for line in hook.texts] == ["first", "second"]
        assert one.trouble == []


@pytest.mark.parametrize(
    ("status", "calls", "why"), [(500, 6, "it answered 500; tried 6 times"), (404, 1, "it answered 404")]
)
def test_delivery_to_a_server_that_keeps_failing_is_given_up_and_reported(
    office: Offices, status: int, calls: int, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(Hook(answer=lambda number: (status, {}))) as hook:
        one = office(hook)
        one.put("x")
        wait_until(lambda: one.trouble)
        assert one.trouble == [("digits", f"a notification was not delivered to secret:slack: {why}")]
        assert len(hook.calls) == calls
        assert "planted-secret" not in caplog.text


def test_a_redirect_is_not_followed(office: Offices) -> None:
    with serving(Hook()) as elsewhere:
        with serving(Hook(answer=lambda number: (307, {"Location": elsewhere.url}))) as hook:
            one = office(hook)
            one.put("x")
            wait_until(lambda: one.trouble)
            assert "answered 307, and redirects are not followed" in one.trouble[0][1]
        assert elsewhere.calls == []


def test_errors_of_connections_are_reported_without_the_address(
    office: Offices, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "TRIES", 2)
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
            one.put("x")
            wait_until(lambda one=one: one.trouble)  # type: ignore[misc]
            assert one.trouble[0][1].endswith(said)
            assert "planted-secret" not in caplog.text + str(one.trouble)


def test_a_missing_secret_is_reported_and_used_once_it_exists(office: Offices) -> None:
    with serving(Hook()) as hook:
        one = office()
        one.put("lost")
        wait_until(lambda: one.trouble)
        assert one.trouble[0][1] == "a notification was not delivered to secret:slack: there is no secret:slack"
        one.urls["secret:slack"] = hook.url
        one.put("found")
        wait_until(lambda: hook.texts)
        assert hook.texts[0].endswith("found")


def test_a_slow_server_delays_no_other_destination(office: Offices) -> None:
    with serving(Hook()) as slow, serving(Hook()) as quick:
        slow.open.clear()
        one = office(slow)
        one.urls["secret:other"] = quick.url
        one.put("x")
        wait_until(lambda: slow.calls)
        one.put("y", Destination("default", "secret:other"))
        wait_until(lambda: quick.got)
        assert not slow.got
        slow.open.set()
        wait_until(lambda: slow.got)


def test_if_too_many_notifications_wait_the_oldest_are_dropped_and_counted(office: Offices) -> None:
    blocked = threading.Event()
    with serving(Hook()) as hook:
        one = office(hook)
        url = one.urls["secret:slack"]
        one.outbox._value_of = lambda destination: (blocked.wait(), url)[1]  # type: ignore[assignment]
        one.put("first")
        wait_until(lambda: not one.outbox._queues[SLACK].pending)
        for n in range(sending.MAX_PENDING + 50):
            one.put(f"change {n}")
        assert len(one.outbox._queues[SLACK].pending) == sending.MAX_PENDING
        blocked.set()
        wait_until(lambda: len(hook.got) == 2)
        assert hook.got[1]["elasticctl"]["omitted"] == sending.MAX_PENDING + 50 - 20
        assert hook.texts[-1].endswith(f"change {sending.MAX_PENDING + 49}")


def test_queued_notifications_are_sent_at_the_end(office: Offices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "STOP_S", 600.0)
    with serving(Hook()) as hook:
        one = office(hook, SendTimes(gather_s=600.0))
        one.put("last")
        one.outbox.stop(600.0)
        assert [line.rpartition(" ")[2] for line in hook.texts] == ["last"]
        one.put("too late")
        assert len(hook.texts) == 1


def test_the_end_does_not_wait_for_who_does_not_answer(
    office: Offices, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sending, "STOP_S", 0.3)
    caplog.set_level(logging.ERROR)
    with serving(Hook()) as hook:
        hook.open.clear()
        one = office(hook, SendTimes(gather_s=600.0, answer_s=600.0))
        one.put("x")
        one.outbox.stop(600.0)
        assert not one.outbox._thread.is_alive()
    assert caplog.records == []


def test_the_number_of_destinations_is_limited(office: Offices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "MAX_DESTINATIONS", 2)
    one = office(pace=SendTimes(gather_s=600.0))
    for n in range(4):
        one.put("x", Destination(f"ns-{n}", "secret:slack"))
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
                raise WebhookError("no answer")
            return hook.url

        one.outbox._value_of = url_of  # type: ignore[assignment]
        try:
            for n in range(sending.MAX_PROJECT_DESTINATIONS + 20):
                one.put("x", Destination("dead", f"secret:{n}"))
            assert len(one.outbox._queues) == sending.MAX_PROJECT_DESTINATIONS
            wait_until(lambda: len(hanging) == LOOKUPS)
            one.put("alive", Destination("live", "secret:slack"))
            wait_until(lambda: hook.texts)
            assert len(hanging) == LOOKUPS, "the news of the other project has not waited for any of them"
        finally:
            blocked.set()
