"""How long to wait for a storage that is unavailable, and what is logged meanwhile.

A storage is unavailable while its refusals are temporary: a service that is overloaded or down, a network, the source
of credentials, a file server. Requests are retried with exponential backoff and full jitter (the pause is drawn between
0 and a limit that doubles), so that ranks that were refused together do not return together. Without a bound, a request
is retried for as long as it takes: nothing here may decide that a job ends.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from dataclasses import dataclass, field
from types import TracebackType

from elasticctl_store.errors import StorageError

log = logging.getLogger("elasticctl_train")

REPORTED_AFTER_S = 3.0
"""A request that has failed for this long counts as waiting for its storage. Shorter failures are not reported."""
JITTER = random.Random()  # noqa: S311 - no secret
"""A generator of its own, so that a script draws the same random numbers whether or not its storage fails."""
_SAID_AGAIN_S, _SAID_RARELY_S = 60.0, 1800.0
_MOST_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class Patience:
    """How long and how often to retry: without a limit, unless one is set in time or in number.

    `total_s` counts from the first failure of a request: the time that a large request took before it failed does not
    show that it will fail again. `connect_s` and `silence_s` are the timeouts of one try.
    """

    tries: float = math.inf
    total_s: float = math.inf
    first_pause_s: float = 0.2
    longest_pause_s: float = 20.0
    connect_s: float = 10.0
    silence_s: float = 60.0

    def pause_s(self, tries: int, chance: float) -> float:
        """Return the pause in seconds after this many failed tries; `chance` in [0, 1) is its place in the interval."""
        doublings = min(tries - 1, _MOST_DOUBLINGS)
        return chance * min(self.longest_pause_s, self.first_pause_s * 2.0**doublings)


AT_A_TERMINAL = Patience(total_s=30.0)
"""For a command that a user waits for."""


class Waits:
    """The requests that wait for a storage right now, over all threads. Logged when the wait begins, rarely, and at its
    end."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Tries, tuple[float, str]] = {}  # (start, monotonic; reason)
        self._said_next_s: float | None = None

    def reason(self) -> str:
        """Return what is waited for and for how long, such as "storage s3://b: 503 SlowDown for 4m"; "" if nothing
        is."""
        with self._lock:
            longest = self._longest()
        return "" if longest is None else f"{longest[1]} for {describe_s(longest[0])}"

    def failed(self, tries: Tries, why: str) -> None:
        """Record that a request has failed and will be retried."""
        now_s = time.monotonic()
        with self._lock:
            since_s, _ = self._waiting.get(tries, (now_s, ""))
            self._waiting[tries] = since_s, why
            longest = self._longest()
            if longest is None or (self._said_next_s is not None and now_s < self._said_next_s):
                return
            away_s = longest[0]
            is_new = self._said_next_s is None
            self._said_next_s = now_s + min(max(_SAID_AGAIN_S, away_s), _SAID_RARELY_S)
        if is_new:
            log.warning("%s; trying again %s", why, tries.until)
        else:
            log.warning("%s for %s; still trying", why, describe_s(away_s))

    def over(self, tries: Tries) -> None:
        """Record that a request has received its response, or was given up."""
        with self._lock:
            since_s, why = self._waiting.pop(tries, (0.0, ""))
            is_last = bool(why) and not self._waiting and self._said_next_s is not None
            if is_last:
                self._said_next_s = None
        if is_last:
            log.warning("%s: over after %s", why, describe_s(time.monotonic() - since_s))

    def _longest(self) -> tuple[float, str] | None:
        """Return (seconds, reason) of the longest wait; None if no request has waited for long enough to count."""
        since_s, why = min(self._waiting.values(), default=(math.inf, ""))
        away_s = time.monotonic() - since_s
        return (away_s, why) if away_s >= REPORTED_AFTER_S else None


@dataclass(frozen=True, slots=True)
class Waiter:
    """The storage at `url` as a target of requests: how patiently to send them, and where to record waits."""

    url: str
    patience: Patience = Patience()
    waits: Waits = field(default_factory=Waits)

    def request(self, doing: str, patience: Patience | None = None) -> Tries:
        """Return the context of a request to be sent; `doing`, such as "write data/x to s3://b", is used in errors."""
        return Tries(self, doing, patience or self.patience)


class Tries:
    """One request, retried until its response is final. Used as a context; call `failed` between two tries."""

    def __init__(self, waiter: Waiter, doing: str, patience: Patience) -> None:
        self._waiter, self._doing, self._patience = waiter, doing, patience
        self._made = 0
        self._failing_since_s: float | None = None

    @property
    def until(self) -> str:
        """How long the request is retried, in words."""
        total_s = self._patience.total_s
        return "until it answers" if math.isinf(total_s) else f"for {describe_s(total_s)} at most"

    def failed(self, reason: str, asked_s: float = 0.0) -> None:
        """Pause before the next try. Raises StorageError if no try is left.

        `asked_s` is the pause that the service requests. If there is no time limit, it is capped at the longest pause,
        so that the return of a service is noticed soon.
        """
        patience, now_s = self._patience, time.monotonic()
        self._made += 1
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        spent_s = now_s - self._failing_since_s
        if math.isinf(patience.total_s):
            asked_s = min(asked_s, patience.longest_pause_s)
        pause_s = max(asked_s, patience.pause_s(self._made, JITTER.random()))
        if self._made >= patience.tries or spent_s + pause_s > patience.total_s:
            times = "once" if self._made == 1 else f"{self._made} times in {spent_s:.0f} s"
            raise StorageError(f"cannot {self._doing}: {reason}; tried {times}; check the storage and the network")
        self._waiter.waits.failed(self, f"storage {self._waiter.url}: {reason}")
        time.sleep(pause_s)

    def __enter__(self) -> Tries:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._failing_since_s is not None:
            self._waiter.waits.over(self)


def describe_s(seconds: float) -> str:
    """Return a duration as "12s", "4m" or "3h05m"."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m"
