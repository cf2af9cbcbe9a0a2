"""Sends notifications of the changes of jobs to their webhooks.

The loop announces each status that it has written, so nothing is sent that is not stored, and two replicas never send
the same. Notifications are lost if the controller is killed between writing a status and sending them. `Outbox` sends
them.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl_controller.core import notifications
from elasticctl_controller.core.notifications import Notification
from elasticctl_controller.loop.apply_actions import Workload
from elasticctl_controller.loop.notification_delivery import Destination, Outbox

WAITS_LONG_S = 900.0
"""How long a job waits until that is notified of."""
RETRY_S = 5.0
"""The pause after it could not be read whether a job still waits."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Wait:
    """A waiting job: since when (seconds since the epoch), and when to notify of that (monotonic seconds)."""

    key: str
    since: float
    due: float


class Notifier:
    """Sends notifications about jobs to `outbox`, also when a job has waited for `waits_long_s`.

    `find_job(key)` returns a job's manifest, or None if it is gone.
    """

    def __init__(
        self,
        find_job: Callable[[str], Mapping[str, Any] | None],
        outbox: Outbox,
        waits_long_s: float = WAITS_LONG_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._find_job, self._outbox, self._waits_long_s, self._clock = find_job, outbox, waits_long_s, clock
        self._changed = threading.Condition()
        self._waits: dict[str, _Wait] = {}  # by job uid, in the order in which they began
        self._stopped = False
        self._thread = threading.Thread(target=self._run_waits, name="waits", daemon=True)

    def start(self) -> None:
        """Start to watch for waiting jobs."""
        self._thread.start()

    def stop(self) -> None:
        """Stop watching for waiting jobs."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """True between `start` and `stop`; False if the thread has died, which is an error."""
        return self._thread.is_alive()

    def announce(self, job: ElasticJob, status: JobStatus) -> None:
        """A status has been stored: send its notifications if the job, which has the status before, wants them."""
        if job.notify:
            now = self._clock()
            for item in notifications.list_notifications(job, status, now):
                self._outbox.put(Destination(job.namespace, job.notify), item)
            self._track_waiting(job, status, now)

    def drop_job(self, key: str) -> None:
        """A job is gone: it no longer waits."""
        with self._changed:
            for uid in [uid for uid, wait in self._waits.items() if wait.key == key]:
                del self._waits[uid]

    def _track_waiting(self, job: ElasticJob, status: JobStatus, now: float) -> None:
        """Record whether a job waits; there is one notification each time that it does."""
        with self._changed:
            if status.phase not in notifications.WAITING:
                self._waits.pop(job.uid, None)
            elif job.uid not in self._waits:
                for uid in [uid for uid, wait in self._waits.items() if wait.key == job.key]:
                    del self._waits[uid]  # it was deleted and created again in between
                self._waits[job.uid] = _Wait(job.key, now, time.monotonic() + self._waits_long_s)
                self._changed.notify()

    def _run_waits(self) -> None:
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
                self._notify_of_wait(uid, wait)
            except ElasticctlError as e:
                log.warning(
                    "job %s: cannot read whether it still waits: %s; retrying", wait.key, e, extra={"job": wait.key}
                )
                with self._changed:
                    wait.due = time.monotonic() + RETRY_S
            except Exception:  # the thread's edge: other jobs wait too
                log.exception("job %s: the notification that it waits failed", wait.key, extra={"job": wait.key})

    def _notify_of_wait(self, uid: str, wait: _Wait) -> None:
        job = ElasticJob.from_manifest(self._find_job(wait.key) or {})
        if job.uid != uid or not job.notify or job.status.phase not in notifications.WAITING:
            with self._changed:  # it no longer waits, which other notifications report
                self._waits.pop(uid, None)
            return
        now = self._clock()
        item = notifications.build_waiting_notification(job, job.status, now - wait.since, now)
        self._outbox.put(Destination(job.namespace, job.notify), item)


def report_as_events(workload: Workload) -> Callable[[Notification, str], None]:
    """A callback that records what an outbox cannot deliver as an event of the job."""

    def report(item: Notification, message: str) -> None:
        job = ElasticJob.from_manifest(workload.get_job(f"{item.namespace}/{item.job}") or {})
        if job.uid == item.uid:
            workload.record_event(job, "Warning", "NotifyFailed", message)

    return report
