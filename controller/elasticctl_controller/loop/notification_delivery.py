"""Delivers notifications to webhooks, from a thread of its own.

What one destination gets within a moment is sent as one message, so that the loss of a rack is one message. A message
is retried while the receiver does not answer, is busy or fails. Meanwhile newer notifications queue up; beyond
`MAX_PENDING`, the oldest are dropped and counted. Redirects are not followed: a webhook has one address, and its secret
is sent to no other. Each project has its own share of threads and destinations, so that dead webhooks of one do not
delay the notifications of another.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.notifications import SECRET, Reference
from elasticctl_controller.core.notifications import Notification
from elasticctl_controller.loop.webhooks import (
    EVERY_PUBLIC_HOST,
    NoAnswer,
    Webhook,
    WebhookClient,
    WebhookError,
    WebhookRules,
    build_message,
)

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
