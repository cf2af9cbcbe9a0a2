"""Sends news to webhooks, from a thread of its own: who has news puts it down and goes on at once.

News of one destination is gathered for a moment and goes out as one message, so that the loss of a rack is one message
and nobody is called more often than every `GATHER_S`. A message is tried again while its other end does not answer, is
busy or fails; meanwhile newer news gathers, and of more than `MAX_PENDING` pieces the oldest are dropped and counted.
Redirects are not followed: a webhook has one address, and a secret goes nowhere else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import aiohttp

from elasticctl.api.errors import ElasticctlError
from elasticctl.api.notifications import SECRET, Reference
from elasticctl_controller.core import notifications
from elasticctl_controller.core.notifications import Item, WebhookError

GATHER_S = 3.0
ANSWER_S = 10.0
MAX_PENDING = 200
MAX_LANES = 500
TRIES = 6
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
STOP_S = 3.0

log = logging.getLogger(__name__)


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
class Pace:
    """How long to gather, to wait for an answer, and, doubling, between tries; in seconds."""

    gather_s: float = GATHER_S
    answer_s: float = ANSWER_S
    first_pause_s: float = FIRST_PAUSE_S
    longest_pause_s: float = LONGEST_PAUSE_S


@dataclass(slots=True)
class _Lane:
    """What waits for one destination; `running`: somebody sees to it."""

    pending: deque[Item] = field(default_factory=deque)
    dropped: int = 0
    running: bool = False


class Outbox:
    """Takes news from any thread. `url_of(destination)` gives the URL, and may block; it raises ElasticctlError.

    `on_trouble(item, message)` hears, on the outbox's threads, of news that could not be delivered; the message holds
    no secret.
    """

    def __init__(
        self, url_of: Callable[[Destination], str], on_trouble: Callable[[Item, str], None], pace: Pace = Pace()
    ) -> None:
        self._url_of, self._on_trouble, self._pace = url_of, on_trouble, pace
        self._lock = threading.Lock()
        self._lanes: dict[Destination, _Lane] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
        self._stopping = asyncio.Event()
        self._closed = False

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def put(self, destination: Destination, item: Item) -> None:
        """Take a piece of news; returns at once, and raises nothing."""
        with self._lock:
            if self._closed:
                return
            lane = self._lanes.get(destination)
            if lane is None:
                if len(self._lanes) >= MAX_LANES:
                    log.warning("news of %s/%s is dropped: too many destinations", item.namespace, item.job)
                    return
                lane = self._lanes[destination] = _Lane()
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

    async def _see_to(self, destination: Destination, lane: _Lane) -> None:
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

    def _complain(self, destination: Destination, found: tuple[Item, ...], error: ElasticctlError) -> None:
        message = f"news was not delivered to {destination.reference}: {error}"
        for item in {item.job: item for item in found}.values():
            log.warning("job %s/%s: %s", item.namespace, item.job, message)
            try:
                self._on_trouble(item, message)
            except ElasticctlError as e:
                log.info("job %s/%s: that could not be told: %s", item.namespace, item.job, e)
            except Exception:  # or the lane would never send again
                log.exception("job %s/%s: that could not be told", item.namespace, item.job)

    async def _deliver(self, destination: Destination, found: tuple[Item, ...], dropped: int) -> None:
        """Send one message, trying again; raises ElasticctlError when that is of no use."""
        message = notifications.body(found, dropped)
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
