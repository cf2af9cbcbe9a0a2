"""Events about jobs, as `kubectl describe` shows them; best effort, and never in a pass's way.

The same news again within ten minutes raises the first one's count. Of one job and reason only a few different messages
are kept apart; what comes after those is counted on the last.
"""

from __future__ import annotations

import base64
import binascii
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticctl.api import notifications
from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import API_VERSION, KIND, ElasticJob
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl_controller.core.notifications import WebhookError
from elasticctl_controller.kube.limiter import LimitedApi
from elasticctl_controller.loop.notifier import Destination, value_of

COMPONENT = "elasticctl-controller"
WINDOW_S = 600.0
MAX_DIFFERENT = 10
MAX_WAITING = 1_000
MESSAGE_CHARS = 1024
"""What the API server takes."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """One event as the controller tells it."""

    job: ElasticJob
    type: str
    reason: str
    message: str
    at: float


@dataclass(slots=True)
class _Series:
    """The event objects of one job and reason: message -> [name, count, time of the last]."""

    events: dict[str, tuple[str, int, float]] = field(default_factory=dict)


class EventRecorder:
    """Writes events in a thread of its own; what cannot be written is logged and dropped."""

    def __init__(self, api: LimitedApi, instance: str, clock: Callable[[], float] = time.time) -> None:
        self._api, self._instance, self._clock = api, instance, clock
        self._waiting: queue.Queue[PendingEvent | None] = queue.Queue(MAX_WAITING)
        self._series: dict[tuple[str, str], _Series] = {}
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Begin, in a thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most `timeout_s`, and end."""
        self._put(None)
        self._thread.join(timeout_s)

    def record(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        """Have an event written; returns at once."""
        self._put(PendingEvent(job, type_, reason, message[:MESSAGE_CHARS], self._clock()))

    def _put(self, news: PendingEvent | None) -> None:
        try:
            self._waiting.put_nowait(news)
        except queue.Full:
            log.warning("too many events wait to be written; one is dropped")

    def _run(self) -> None:
        while (news := self._waiting.get()) is not None:
            try:
                self._write(news)
            except ElasticctlError as e:
                log.warning("event %s of job %s is lost: %s", news.reason, news.job.key, e)
            except Exception:  # the thread's edge: events are not worth a controller
                log.exception("event %s of job %s is lost", news.reason, news.job.key)

    def _write(self, news: PendingEvent) -> None:
        self._tidy(news.at)
        series = self._series.setdefault((news.job.uid, news.reason), _Series())
        message = news.message
        if message not in series.events and len(series.events) >= MAX_DIFFERENT:
            message = next(reversed(series.events))
        if message in series.events:
            name, count, _ = series.events[message]
            patch = {"count": count + 1, "message": news.message, "lastTimestamp": to_rfc3339(news.at)}
            try:
                self._api.request("PATCH", self._path(news, name), patch, content_type=MERGE_PATCH)
            except NotFoundError:
                del series.events[message]  # events live for an hour; somebody may delete them sooner
            else:
                series.events[message] = (name, count + 1, news.at)
                return
        event = new_event(news, self._instance)
        self._api.request("POST", self._path(news), event)
        series.events[news.message] = (event["metadata"]["name"], 1, news.at)

    def _path(self, news: PendingEvent, name: str = "") -> str:
        return resource_path("v1", news.job.namespace, "events", name)

    def _tidy(self, now: float) -> None:
        """Forget what nobody will add to any more."""
        for key, series in list(self._series.items()):
            series.events = {text: kept for text, kept in series.events.items() if now - kept[2] < WINDOW_S}
            if not series.events:
                del self._series[key]


def new_event(news: PendingEvent, instance: str) -> Manifest:
    """The core/v1 Event of this news."""
    at = to_rfc3339(news.at)
    about: Mapping[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": news.job.namespace,
        "name": news.job.name,
        "uid": news.job.uid,
        "resourceVersion": news.job.resource_version,
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{news.job.name}.{secrets.token_hex(8)}", "namespace": news.job.namespace},
        "involvedObject": about,
        "type": news.type,
        "reason": news.reason,
        "message": news.message,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "source": {"component": COMPONENT, "host": instance},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance,
    }


class SecretReader(Protocol):
    """What is asked of an API server; `elasticctl_controller.kube.limiter.LimitedApi`, or a plain connection."""

    def request(self, method: str, path: str) -> dict[str, Any]:
        """Send one request. Raises ClusterError."""


def kube_webhook_urls(api: SecretReader) -> Callable[[Destination], str]:
    """URLs from the Secrets of a Kubernetes cluster."""

    def url_of(destination: Destination) -> str:
        reference = notifications.parse_reference(destination.reference)
        if reference.local_only:
            raise WebhookError(f"{reference.kind}: is for the local cluster; here it is secret:KEY")
        try:
            found = api.request("GET", resource_path("v1", destination.namespace, "secrets", notifications.SECRET))
        except NotFoundError:
            found = {}
        data = found.get("data") or {}
        try:
            values = {
                key: base64.b64decode(value, validate=True).decode()
                for key, value in data.items()
                if key == reference.name
            }
        except (binascii.Error, ValueError, TypeError):
            raise WebhookError(f"the key {reference.name} of the secret {notifications.SECRET} is no text") from None
        return value_of(values, destination, reference)

    return url_of
