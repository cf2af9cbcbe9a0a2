"""A `Workload` that notices what is news: it stands between the loop and the real one, and sees each status written.

So nothing is told that is not stored, nothing is told twice by two replicas, and the loop knows nothing of it. What a
controller is killed between writing a status and sending the news is not sent.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.notifications import SECRET, Reference
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus
from elasticctl_controller.core import notifications
from elasticctl_controller.core.notifications import Notification, WebhookError
from elasticctl_controller.loop.controller import Workload

WAITS_LONG_S = 900.0
RETRY_S = 5.0

log = logging.getLogger(__name__)
GATHER_S = 3.0
ANSWER_S = 10.0
MAX_PENDING = 200
MAX_LANES = 500
TRIES = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
STOP_S = 3.0


@dataclass(slots=True)
class _Wait:
    """A job that waits: since when, by the clock, and when that is to be said, by the monotonic one."""

    key: str
    since: float
    due: float


class NotifyingWorkload:
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
            for item in notifications.list_notifications(job, status, now):
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
        item = notifications.build_waiting_notification(job, job.status, now - wait.since, now)
        self._outbox.put(Destination(job.namespace, job.notify), item)


def report_as_events(workload: Workload) -> Callable[[Notification, str], None]:
    """What an outbox cannot deliver, as an event of the job, where somebody will look."""

    def tell(item: Notification, message: str) -> None:
        job = ElasticJob.from_manifest(workload.get_job(f"{item.namespace}/{item.job}") or {})
        if job.uid == item.uid:
            workload.record_event(job, "Warning", "NotifyFailed", message)

    return tell


@dataclass(frozen=True, slots=True)
class Destination:
    """Where news goes: a reference (`elasticctl.api.notifications`), which means something in a namespace."""

    namespace: str
    reference: str


def value_of(values: Mapping[str, str], destination: Destination, reference: Reference) -> str:
    """The value of a reference's key. Raises WebhookError when there is none."""
    if reference.name not in values:
        raise WebhookError(f"namespace {destination.namespace} has no secret {SECRET} with the key {reference.name}")
    return values[reference.name]


@dataclass(frozen=True, slots=True)
class SendTimes:
    """How long to gather, to wait for an answer, and, doubling, between tries; in seconds."""

    gather_s: float = GATHER_S
    answer_s: float = ANSWER_S
    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S


@dataclass(slots=True)
class _Pending:
    """What waits for one destination; `running`: somebody sees to it."""

    pending: deque[Notification] = field(default_factory=deque)
    dropped: int = 0
    running: bool = False


class Outbox:
    """Takes news from any thread. `url_of(destination)` gives the URL, and may block; it raises ElasticctlError.

    `on_trouble(item, message)` hears, on the outbox's threads, of news that could not be delivered; the message holds
    no secret.
    """

    def __init__(
        self,
        url_of: Callable[[Destination], str],
        on_trouble: Callable[[Notification, str], None],
        pace: SendTimes = SendTimes(),
    ) -> None:
        self._url_of, self._on_trouble, self._pace = url_of, on_trouble, pace
        self._lock = threading.Lock()
        self._lanes: dict[Destination, _Pending] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._stopping = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, destination: Destination, item: Notification) -> None:
        """Take a piece of news; returns at once, and raises nothing."""
        with self._lock:
            if self._closed:
                return
            lane = self._lanes.get(destination)
            if lane is None:
                if len(self._lanes) >= MAX_LANES:
                    log.warning("news of %s/%s is dropped: too many destinations", item.namespace, item.job)
                    return
                lane = self._lanes[destination] = _Pending()
            lane.pending.append(item)
            if len(lane.pending) > MAX_PENDING:
                lane.pending.popleft()
                lane.dropped += 1
            if not lane.running:
                lane.running = True
                asyncio.run_coroutine_threadsafe(self._see_to(destination, lane), self._loop)

    def stop(self, timeout_s: float = STOP_S) -> None:
        """Send what is left, once and at once, and end."""
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
            self._loop.close()

    async def _serve(self) -> None:
        await self._stopping.wait()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            _, late = await asyncio.wait(left, timeout=STOP_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _see_to(self, destination: Destination, lane: _Pending) -> None:
        """Send what a lane holds, until it holds nothing."""
        while True:
            await self._rest(self._pace.gather_s)
            with self._lock:
                found, dropped = tuple(lane.pending), lane.dropped
                lane.pending.clear()
                lane.dropped = 0
                if not found:
                    lane.running = False
                    del self._lanes[destination]
                    return
            try:
                await self._deliver(destination, found, dropped)
            except ElasticctlError as e:
                self._complain(destination, found, e)
            except Exception:  # the edge of a lane: the next message is another matter
                log.exception("news of %s/%s was not sent", found[-1].namespace, found[-1].job)

    def _complain(self, destination: Destination, found: tuple[Notification, ...], error: ElasticctlError) -> None:
        message = f"news was not delivered to {destination.reference}: {error}"
        for item in {item.job: item for item in found}.values():
            log.warning("job %s/%s: %s", item.namespace, item.job, message)
            try:
                self._on_trouble(item, message)
            except ElasticctlError as e:
                log.info("job %s/%s: that could not be told: %s", item.namespace, item.job, e)
            except Exception:  # or the lane would never send again
                log.exception("job %s/%s: that could not be told", item.namespace, item.job)

    async def _deliver(self, destination: Destination, found: tuple[Notification, ...], dropped: int) -> None:
        """Send one message, trying again; raises ElasticctlError when that is of no use."""
        message = notifications.build_message(found, dropped)
        for tried in range(1, TRIES + 1):
            asked_s = 0.0
            try:
                # Looked up for each try: a secret may be mended meanwhile.
                url = notifications.check_url(await asyncio.to_thread(self._url_of, destination))
                answer = await self._post(url, message)
            except _NoAnswer as e:
                trouble = str(e)
            else:
                if answer.status < 300:
                    return
                trouble, asked_s = f"it answered {answer.status}", answer.retry_after_s
                if answer.status < 500 and answer.status not in (408, 425, 429):
                    raise WebhookError(trouble + (", and redirects are not followed" if answer.status < 400 else ""))
            if tried == TRIES or self._stopping.is_set():
                break
            pause_s = min(self._pace.first_pause_s * 2 ** (tried - 1), self._pace.longest_pause_s)
            await self._rest(max(pause_s, min(asked_s, self._pace.longest_pause_s)))
        raise WebhookError(f"{trouble}; tried {tried} times")

    async def _post(self, url: str, message: bytes) -> _Answer:
        timeout = aiohttp.ClientTimeout(total=self._pace.answer_s)
        headers = {"Content-Type": "application/json", "User-Agent": "elasticctl"}
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, trust_env=True) as session,
                session.post(url, data=message, headers=headers, allow_redirects=False) as response,
            ):
                asked = response.headers.get("Retry-After", "")
                return _Answer(response.status, float(asked) if asked.isascii() and asked.isdigit() else 0.0)
        except TimeoutError:
            raise _NoAnswer(f"no answer within {self._pace.answer_s:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as e:
            raise _NoAnswer(f"no connection ({type(e).__name__})") from None  # its text may hold the URL

    async def _rest(self, seconds: float) -> None:
        """Wait so long, or until the outbox ends."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    retry_after_s: float


class _NoAnswer(Exception):
    """The other end did not answer; the message is fit to be shown."""
