"""How long a storage that is away is waited for, and what is said of that meanwhile.

Away is a storage whose refusals are temporary: a service that is busy or down, a network, the place that credentials
come from, a file server. It is tried again with exponential back-off and full jitter (the pause is drawn between
nothing and a limit that doubles), so that ranks that were refused together do not come back together. Unless it is
bounded, patience lasts for as long as it takes: nothing here may decide that a job ends.
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

TOLD_AFTER_S = 3.0
"""A request that has failed for so long waits for its storage; what passes sooner is nothing to speak of."""
JITTER = random.Random()  # noqa: S311 - no secret
"""Of its own: a script draws the same random numbers whether its storage answers or not."""
_SAID_AGAIN_S, _SAID_RARELY_S = 60.0, 1800.0
_MOST_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, and how often to try: without end, unless it is bounded in time or in number.

    `total_s` counts from the first failure of a request: what a large one took before it failed is no sign that it
    will fail again.
    """

    tries: float = math.inf
    total_s: float = math.inf
    first_pause_s: float = 0.2
    longest_pause_s: float = 20.0
    connect_s: float = 10.0
    silence_s: float = 60.0

    def pause_s(self, tries: int, chance: float) -> float:
        """The pause after so many failed tries; `chance` in [0, 1) is where in the interval it falls."""
        doublings = min(tries - 1, _MOST_DOUBLINGS)
        return chance * min(self.longest_pause_s, self.first_pause_s * 2.0**doublings)


AT_A_TERMINAL = Patience(total_s=30.0)
"""Of a command that somebody waits for."""


class Waits:
    """The requests that wait for a storage at this moment, over all threads. Said once, then rarely, and when over."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[Tries, tuple[float, str]] = {}  # since when (monotonic), and why
        self._said_next_s: float | None = None

    def reason(self) -> str:
        """What is waited for and for how long, as "storage s3://b: 503 SlowDown for 4m"; empty: nothing."""
        with self._lock:
            longest = self._longest()
        return "" if longest is None else f"{longest[1]} for {describe_s(longest[0])}"

    def failed(self, tries: Tries, why: str) -> None:
        """A request has failed, and will be sent again."""
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
        """A request has got its answer, or was given up."""
        with self._lock:
            since_s, why = self._waiting.pop(tries, (0.0, ""))
            is_last = bool(why) and not self._waiting and self._said_next_s is not None
            if is_last:
                self._said_next_s = None
        if is_last:
            log.warning("%s: over after %s", why, describe_s(time.monotonic() - since_s))

    def _longest(self) -> tuple[float, str] | None:
        """Of what waits for so long that it counts, how long that has been, and why."""
        since_s, why = min(self._waiting.values(), default=(math.inf, ""))
        away_s = time.monotonic() - since_s
        return (away_s, why) if away_s >= TOLD_AFTER_S else None


@dataclass(frozen=True, slots=True)
class Waiter:
    """Who sends requests to the storage `url`, how patiently, and where that is told."""

    url: str
    patience: Patience = Patience()
    waits: Waits = field(default_factory=Waits)

    def request(self, doing: str, patience: Patience | None = None) -> Tries:
        """A request about to be sent; `doing` ("write data/x to s3://b") is for errors."""
        return Tries(self, doing, patience or self.patience)


class Tries:
    """One request, sent until its answer is final: a context, in which `failed` is called between two tries."""

    def __init__(self, waiter: Waiter, doing: str, patience: Patience) -> None:
        self._waiter, self._doing, self._patience = waiter, doing, patience
        self._made = 0
        self._failing_since_s: float | None = None

    @property
    def until(self) -> str:
        """For how long it is tried, in words."""
        total_s = self._patience.total_s
        return "until it answers" if math.isinf(total_s) else f"for {describe_s(total_s)} at most"

    def failed(self, reason: str, asked_s: float = 0.0) -> None:
        """Pause before the next try. Raises StorageError when there is none left.

        `asked_s` is the pause a service asks for. Where there is no end of patience, it is not heeded beyond the
        longest pause: a service that is back long before would be waited for.
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
    """A duration as "12s", "4m" or "3h05m"."""
    if seconds < 60:
        return f"{seconds:.0f}s"
    hours, minutes = divmod(int(seconds // 60), 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m"
