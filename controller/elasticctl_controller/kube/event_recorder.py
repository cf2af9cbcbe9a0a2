"""How the controller notifies people: Events about jobs, as `kubectl describe` shows them, and the URLs of webhooks.

Events are best effort and never delay a pass. An event that repeats within about ten minutes raises the count of the
first one. For each job and reason, only a few different messages get an Event of their own; further ones are counted on
the last.

A webhook's URL is a key of one Secret, `elasticctl-notify`, in the job's own namespace. It is the only Secret that the
controller may read, if it was installed with notifications. It is read again for each message, and no job can use the
Secret of another namespace.
"""

from __future__ import annotations

import base64
import binascii
import logging
import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from elasticctl.api import notifications
from elasticctl.api.codec import Manifest, to_rfc3339
from elasticctl.api.errors import ElasticctlError, NotFoundError
from elasticctl.api.spec import API_VERSION, KIND, ElasticJob
from elasticctl.kubeapi.connection import MERGE_PATCH, resource_path
from elasticctl.kubeapi.features import Feature, left_out
from elasticctl_controller.kube.limited_api import LimitedApi
from elasticctl_controller.loop.notifier import Destination, value_of
from elasticctl_controller.loop.webhooks import WebhookError

COMPONENT = "elasticctl-controller"
WINDOW_S = 600.0
MAX_DIFFERENT = 10
DROP_EVERY_S = 30.0
MAX_WAITING, MAX_WAITING_OF_ONE = 1_000, 500
"""How many events may be queued, and how many of one namespace: the rest is always left to the others."""
MESSAGE_CHARS = 1024
"""The limit of the API server."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PendingEvent:
    """An event that waits to be written."""

    job: ElasticJob
    type: str
    reason: str
    message: str
    at: float


@dataclass(slots=True)
class _Series:
    """The Event objects of one job and reason: message -> (name, count, time of the last)."""

    events: dict[str, tuple[str, int, float]] = field(default_factory=dict)


class EventRecorder:
    """Writes events in its own thread; an event that cannot be written is logged and dropped."""

    def __init__(self, api: LimitedApi, instance: str, clock: Callable[[], float] = time.time) -> None:
        self._api, self._instance, self._clock = api, instance, clock
        self._waiting: queue.Queue[PendingEvent | None] = queue.Queue(MAX_WAITING)
        self._lock, self._queued = threading.Lock(), Counter[str]()  # by namespace
        self._series: dict[tuple[str, str], _Series] = {}
        self._dropped_at = 0.0
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Write the queued events, for at most `timeout_s`, and end the thread."""
        with suppress(queue.Full):  # then the thread is not waited for: it ends with the process
            self._waiting.put_nowait(None)
        self._thread.join(timeout_s)

    def record(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        """Queue an event; returns immediately. It is dropped if too many are queued, of its namespace or in all."""
        try:
            with self._lock:
                if self._queued[job.namespace] >= MAX_WAITING_OF_ONE:
                    raise queue.Full
                self._waiting.put_nowait(PendingEvent(job, type_, reason, message[:MESSAGE_CHARS], self._clock()))
                self._queued[job.namespace] += 1
        except queue.Full:
            fields = {"job": job.key, "reason": reason}
            log.warning("job %s: dropped the event %s: too many are queued", job.key, reason, extra=fields)

    def _run(self) -> None:
        while (event := self._waiting.get()) is not None:
            with self._lock:
                self._queued[event.job.namespace] -= 1
                if not self._queued[event.job.namespace]:
                    del self._queued[event.job.namespace]
            try:
                self._write(event)
            except ElasticctlError as e:
                fields = {"job": event.job.key, "reason": event.reason}
                log.warning("job %s: lost the event %s: %s", event.job.key, event.reason, e, extra=fields)
            except Exception:  # the edge of the thread: no event is worth the controller's end
                fields = {"job": event.job.key, "reason": event.reason}
                log.exception("job %s: lost the event %s", event.job.key, event.reason, extra=fields)

    def _write(self, event: PendingEvent) -> None:
        self._drop_old(event.at)
        series = self._series.setdefault((event.job.uid, event.reason), _Series())
        message = event.message
        if message not in series.events and len(series.events) >= MAX_DIFFERENT:
            message = next(reversed(series.events))
        if message in series.events:
            name, count, _ = series.events[message]
            patch = {"count": count + 1, "message": event.message, "lastTimestamp": to_rfc3339(event.at)}
            try:
                self._api.request("PATCH", self._path(event, name), patch, content_type=MERGE_PATCH)
            except NotFoundError:
                del series.events[message]  # events expire after an hour, and may be deleted earlier
            else:
                series.events[message] = (name, count + 1, event.at)
                return
        manifest = build_event(event, self._instance)
        self._api.request("POST", self._path(event), manifest)
        series.events[event.message] = (manifest["metadata"]["name"], 1, event.at)

    def _path(self, event: PendingEvent, name: str = "") -> str:
        return resource_path("v1", event.job.namespace, "events", name)

    def _drop_old(self, now: float) -> None:
        """Drop the events that are too old to be repeated, now and then: there may be thousands."""
        if 0 <= now - self._dropped_at < DROP_EVERY_S:
            return
        self._dropped_at = now
        for key, series in list(self._series.items()):
            series.events = {text: event for text, event in series.events.items() if now - event[2] < WINDOW_S}
            if not series.events:
                del self._series[key]


def build_event(event: PendingEvent, instance: str) -> Manifest:
    """Build the core/v1 Event."""
    at = to_rfc3339(event.at)
    about: Mapping[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "namespace": event.job.namespace,
        "name": event.job.name,
        "uid": event.job.uid,
        "resourceVersion": event.job.resource_version,
    }
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{event.job.name}.{secrets.token_hex(8)}", "namespace": event.job.namespace},
        "involvedObject": about,
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
        "source": {"component": COMPONENT, "host": instance},
        "reportingComponent": COMPONENT,
        "reportingInstance": instance,
    }


class SecretReader(Protocol):
    """The part of `LimitedApi` that is needed to read a Secret."""

    def request(self, method: str, path: str) -> dict[str, Any]:
        """Send one request. Raises ClusterError."""


def kube_webhook_urls(api: SecretReader) -> Callable[[Destination], str]:
    """Return a function that finds a webhook's URL in the Secrets of a Kubernetes cluster."""

    def url_of(destination: Destination) -> str:
        reference = notifications.parse_reference(destination.reference)
        if reference.local_only:
            raise WebhookError(f"{reference.kind}: works on the local cluster only. FIX: use secret:KEY")
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
            raise WebhookError(f"the key {reference.name} of the secret {notifications.SECRET} is not text") from None
        return value_of(values, destination, reference)

    return url_of


def no_webhook_urls(destination: Destination) -> str:
    """The same for a controller that may not read Secrets: raises WebhookError."""
    raise WebhookError(left_out(Feature.NOTIFICATIONS))
