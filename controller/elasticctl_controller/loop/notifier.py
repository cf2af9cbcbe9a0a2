"""Sends notifications of the changes of jobs to their webhooks.

The loop announces each status that it has written to `Notifier`, so nothing is sent that is not stored, and two
replicas never send the same. Notifications are lost if the controller is killed between writing a status and sending
them.

`Outbox` delivers them, from a thread of its own. What one destination gets within a moment is sent as one message, so
that the loss of a rack is one message. A message is retried while the receiver does not answer, is busy or fails. In
the meantime newer notifications queue up; beyond `MAX_PENDING`, the oldest are dropped and counted. Redirects are not
followed: a webhook has one address, and its secret is sent to no other. Each project has its own share of threads and
destinations, so that dead webhooks of one do not delay the notifications of another.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.notifications import SECRET, Reference
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl_controller.core import notifications
from elasticctl_controller.core.notifications import Notification
from elasticctl_controller.loop.apply_actions import Workload
from elasticctl_controller.loop.webhooks import (
    EVERY_PUBLIC_HOST,
    NoAnswer,
    Webhook,
    WebhookClient,
    WebhookError,
    WebhookRules,
    build_message,
)

WAITS_LONG_S = 900.0
"""How long a job waits until that is notified of."""
RETRY_S = 5.0
"""The pause after it could not be read whether a job still waits."""
MAX_PENDING = 200
"""The most notifications that wait for one destination."""
MAX_DESTINATIONS = 5000
MAX_PROJECT_DESTINATIONS = 100
"""The most destinations of one namespace that notifications are being sent to at a time."""
TRIES = 6
"""How often a message is sent until its delivery is given up."""
STOP_S = 3.0
"""How long the end waits for what is being sent."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where notifications go: a reference (`elasticctl.api.notifications`), valid in a namespace."""

    namespace: str
    reference: str


def value_of(values: Mapping[str, str], destination: Destination, reference: Reference) -> str:
    """The value of a reference's key. Raises WebhookError when there is none."""
    if reference.name not in values:
        raise WebhookError(f"namespace {destination.namespace} has no secret {SECRET} with the key {reference.name}")
    return values[reference.name]


@dataclass(frozen=True, slots=True)
class SendTimes:
    """Seconds to collect notifications, to wait for an answer, and, doubling, between attempts."""

    gather_s: float = 3.0
    answer_s: float = 10.0
    first_pause_s: float = 2.0
    longest_pause_s: float = 60.0


@dataclass(slots=True)
class _Pending:
    """The notifications that wait for one destination; `running`: a task is sending them."""

    pending: deque[Notification] = field(default_factory=deque)
    dropped: int = 0
    running: bool = False


class Outbox:
    """Sends notifications. Thread-safe.

    `value_of(destination)` returns the URL, and perhaps a key for signatures (`Webhook`); it may block, and raises
    ElasticctlError. `on_failure(item, message)` is called on the outbox's threads when a notification could not be
    delivered; the message contains no secret.
    """

    def __init__(
        self,
        value_of: Callable[[Destination], str],
        on_failure: Callable[[Notification, str], None],
        pace: SendTimes = SendTimes(),
        rules: WebhookRules = EVERY_PUBLIC_HOST,
    ) -> None:
        self._value_of, self._on_failure, self._pace = value_of, on_failure, pace
        self._client = WebhookClient(rules, pace.answer_s)
        self._lock = threading.Lock()
        self._queues: dict[Destination, _Pending] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._stopping = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        """Start to send."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True between `start` and `stop`; False if the thread has died, which is an error."""
        return self._thread.is_alive()

    def put(self, destination: Destination, item: Notification) -> None:
        """Queue a notification; returns immediately, and raises nothing."""
        with self._lock:
            if self._closed:
                return
            queue = self._queues.get(destination)
            if queue is None:
                same = sum(other.namespace == destination.namespace for other in self._queues)
                if len(self._queues) >= MAX_DESTINATIONS or same >= MAX_PROJECT_DESTINATIONS:
                    text = "job %s: a notification is dropped: too many destinations"
                    log.warning(text, item.key, extra={"job": item.key})
                    return
                queue = self._queues[destination] = _Pending()
            queue.pending.append(item)
            if len(queue.pending) > MAX_PENDING:
                queue.pending.popleft()
                queue.dropped += 1
            if not queue.running:
                queue.running = True
                asyncio.run_coroutine_threadsafe(self._send_pending(destination, queue), self._loop)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Send what is queued, without retries, and end."""
        with self._lock:
            closed, self._closed = self._closed, True
        if self._thread.is_alive() and not closed:
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(timeout_s)
        elif not closed:  # never started
            self._loop.close()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._client.close()
            self._loop.close()

    async def _serve(self) -> None:
        await self._stopping.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, late = await asyncio.wait(left, timeout=STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _send_pending(self, destination: Destination, queue: _Pending) -> None:
        """Send what waits for a destination, until nothing is left."""
        while True:
            await self._pause(self._pace.gather_s)
            with self._lock:
                found, dropped = tuple(queue.pending), queue.dropped
                queue.pending.clear()
                queue.dropped = 0
                if not found:
                    queue.running = False
                    del self._queues[destination]
                    return
            try:
                await self._deliver(destination, found, dropped)
            except ElasticctlError as e:
                self._report_failure(destination, found, e)
            except Exception:  # the edge of the task: the next message may succeed
                log.exception("job %s: a notification was not sent", found[-1].key, extra={"job": found[-1].key})

    def _report_failure(
        self, destination: Destination, found: tuple[Notification, ...], error: ElasticctlError
    ) -> None:
        message = f"a notification was not delivered to {destination.reference}: {error}"
        for item in {item.job: item for item in found}.values():
            fields = {"job": item.key}
            log.warning("job %s: %s", item.key, message, extra=fields)
            try:
                self._on_failure(item, message)
            except ElasticctlError as e:
                log.info("job %s: the failure could not be recorded: %s", item.key, e, extra=fields)
            except Exception:  # otherwise this destination would get nothing more
                log.exception("job %s: the failure could not be recorded", item.key, extra=fields)

    async def _deliver(self, destination: Destination, found: tuple[Notification, ...], dropped: int) -> None:
        """Send one message, with retries; raises ElasticctlError if it cannot be delivered."""
        message = build_message(found, dropped)
        for tried in range(1, TRIES + 1):
            asked_s = 0.0
            try:
                # Looked up for each attempt: the secret may have been fixed.
                project = destination.namespace
                hook = Webhook.parse(await self._client.run(project, self._value_of, destination))
                answer = await self._client.post(project, hook.url, message, hook.headers(message, time.time()))
            except NoAnswer as e:
                problem = str(e)
            else:
                if answer.status < 300:
                    return
                problem, asked_s = f"it answered {answer.status}", answer.retry_after_s
                if answer.status < 500 and answer.status not in (408, 425, 429):
                    raise WebhookError(problem + (", and redirects are not followed" if answer.status < 400 else ""))
            if tried == TRIES or self._stopping.is_set():
                break
            pause_s = min(self._pace.first_pause_s * 2 ** (tried - 1), self._pace.longest_pause_s)
            await self._pause(max(pause_s, min(asked_s, self._pace.longest_pause_s)))
        raise WebhookError(f"{problem}; tried {tried} times")

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the outbox ends."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


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
