"""Notifications of the jobs that want them, from each status that is stored."""

from __future__ import annotations

import base64
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
from elasticctl_controller.core.notifications import Notification
from elasticctl_controller.kube.event_recorder import kube_webhook_urls
from elasticctl_controller.local.supervisor import local_webhook_urls
from elasticctl_controller.loop import notifier as noticing_module
from elasticctl_controller.loop.notification_delivery import Destination
from elasticctl_controller.loop.notifier import Notifier, report_as_events
from elasticctl_controller.loop.webhooks import WebhookError
from tests.support.controller.samples import NOW, a_job
from tests.support.waiting import wait_until

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
    """Makes notifiers that report a waiting job at once, when they have been started."""
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
    """The old one was announced, and deleted and created again before anybody saw it gone."""
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


def test_what_cannot_be_delivered_becomes_an_event_of_that_very_job() -> None:
    place = Place()
    place.write_status(a_job(), RUNNING)
    item = Notification("started", "default", "digits", "job-uid-1", 0.0, "x")  # type: ignore[arg-type]
    tell = report_as_events(place)  # type: ignore[arg-type]
    tell(item, "it answered 404")
    tell(replace(item, uid="its predecessor"), "it answered 404")
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
def test_what_is_not_there_is_said(reference: str, data: dict[str, Any], error: Exception | None, why: str) -> None:
    api = Secretive()
    api.data, api.error = data, error
    with pytest.raises(WebhookError, match=why):
        kube_webhook_urls(api)(Destination("team-a", reference))


def test_a_controller_that_may_not_read_it_says_so() -> None:
    api = Secretive()
    api.error = ForbiddenError("secrets is forbidden")
    with pytest.raises(ForbiddenError):
        kube_webhook_urls(api)(Destination("team-a", "slack"))
