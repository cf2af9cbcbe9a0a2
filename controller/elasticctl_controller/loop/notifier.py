"""A `Workload` that notices what is news: it stands between the loop and the real one, and sees each status written.

So nothing is told that is not stored, nothing is told twice by two replicas, and the loop knows nothing of it. What a
controller is killed between writing a status and sending the news is not sent.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl_controller.core import notifications
from elasticctl_controller.core.notifications import Item
from elasticctl_controller.loop.controller import Workload
from elasticctl_controller.loop.outbox import Destination, Outbox

WAITS_LONG_S = 900.0
RETRY_S = 5.0

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wait:
    """A job that waits: since when, by the clock, and when that is to be said, by the monotonic one."""

    key: str
    since: float
    due: float


class Noticing:
    """`inner`, with the news of its jobs put into `outbox`; a job that waits for `waits_long_s` is news too."""

    def __init__(
        self,
        inner: Workload,
        outbox: Outbox,
        waits_long_s: float = WAITS_LONG_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._inner, self._outbox, self._waits_long_s, self._clock = inner, outbox, waits_long_s, clock
        self._changed = threading.Condition()
        self._waits: dict[str, _Wait] = {}  # by job uid, in the order in which they began
        self._stopped = False
        self._thread = threading.Thread(target=self._mind, name="waits", daemon=True)

    def start(self) -> None:
        """Begin to mind who waits."""
        self._thread.start()

    def stop(self) -> None:
        """End that; nothing is due any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def rendezvous_endpoint(self) -> str:
        return self._inner.rendezvous_endpoint

    def subscribe(self, callback: Callable[[str], None]) -> None:
        self._inner.subscribe(callback)

    def get_job(self, key: str) -> Mapping[str, Any] | None:
        """Return the job's manifest, or None when it is gone: then it no longer waits."""
        manifest = self._inner.get_job(key)
        if manifest is None:
            with self._changed:
                for uid in [uid for uid, wait in self._waits.items() if wait.key == key]:
                    del self._waits[uid]
        return manifest

    def list_pods(self, job: ElasticJob) -> Iterable[Mapping[str, Any]]:
        return self._inner.list_pods(job)

    def lost_nodes(self) -> frozenset[str]:
        return self._inner.lost_nodes()

    def create_pod(self, job: ElasticJob, manifest: Mapping[str, Any]) -> None:
        self._inner.create_pod(job, manifest)

    def delete_pod(self, job: ElasticJob, name: str, uid: str, *, force: bool) -> None:
        self._inner.delete_pod(job, name, uid, force=force)

    def delete_job(self, job: ElasticJob) -> None:
        self._inner.delete_job(job)

    def record_event(self, job: ElasticJob, type_: str, reason: str, message: str) -> None:
        self._inner.record_event(job, type_, reason, message)

    def write_status(self, job: ElasticJob, status: JobStatus) -> None:
        """Store the status; what it has of news goes out, if the job wants that."""
        self._inner.write_status(job, status)
        if job.notify:
            now = self._clock()
            for item in notifications.items(job, status, now):
                self._outbox.put(Destination(job.namespace, job.notify), item)
            self._watch(job, status, now)

    def _watch(self, job: ElasticJob, status: JobStatus, now: float) -> None:
        """Note whether a job waits; each time that it does is told of once."""
        with self._changed:
            if status.phase not in notifications.WAITING:
                self._waits.pop(job.uid, None)
            elif job.uid not in self._waits:
                self._waits[job.uid] = _Wait(job.key, now, time.monotonic() + self._waits_long_s)
                self._changed.notify()

    def _mind(self) -> None:
        while True:
            with self._changed:
                due = min((wait.due for wait in self._waits.values()), default=math.inf)
                left_s = due - time.monotonic()
                if self._stopped:
                    return
                if left_s > 0:
                    self._changed.wait(None if due == math.inf else left_s)
                    continue
                uid, wait = next((uid, wait) for uid, wait in self._waits.items() if wait.due == due)
                wait.due = math.inf
            try:
                self._say_that_it_waits(uid, wait)
            except ElasticctlError as e:
                log.warning("job %s: whether it still waits cannot be read: %s; trying again", wait.key, e)
                self._put_off(wait)
            except Exception:  # the thread's edge: other jobs wait too
                log.exception("job %s: that it waits could not be told", wait.key)

    def _put_off(self, wait: _Wait) -> None:
        with self._changed:
            wait.due = time.monotonic() + RETRY_S

    def _say_that_it_waits(self, uid: str, wait: _Wait) -> None:
        job = ElasticJob.from_manifest(self._inner.get_job(wait.key) or {})
        if job.uid != uid or not job.notify or job.status.phase not in notifications.WAITING:
            with self._changed:  # it is gone, or somebody is about to say so
                self._waits.pop(uid, None)
            return
        now = self._clock()
        item = notifications.waits(job, job.status, now - wait.since, now)
        self._outbox.put(Destination(job.namespace, job.notify), item)


def told_as_events(workload: Workload) -> Callable[[Item, str], None]:
    """What an outbox cannot deliver, as an event of the job, where somebody will look."""

    def tell(item: Item, message: str) -> None:
        job = ElasticJob.from_manifest(workload.get_job(f"{item.namespace}/{item.job}") or {})
        if job.uid == item.uid:
            workload.record_event(job, "Warning", "NotifyFailed", message)

    return tell
