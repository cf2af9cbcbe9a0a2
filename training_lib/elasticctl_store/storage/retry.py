"""When to try again: the one place that repeats requests, for every cloud.

Exponential back-off with full jitter (the pause is drawn between nothing and a limit that doubles), so that many ranks
that were refused together do not come back together. Bounded in number and in time. What a refusal means is the
service's to say (`Dialect`); whether a request that got no answer was carried out, nobody can say: see `Reply.unsure`.
"""

from __future__ import annotations

import email.utils
import enum
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from elasticctl_store.errors import StorageError
from elasticctl_store.storage.wire import Answer, Connections, Request, WireError

log = logging.getLogger("elasticctl_train")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for what, and how often to try. `total_s` counts from the first failure of a request: what a
    large one took before it failed is no sign that it will fail again.
    """

    tries: int = 10
    total_s: float = 300.0
    first_pause_s: float = 0.2
    longest_pause_s: float = 20.0
    connect_s: float = 10.0
    silence_s: float = 60.0

    def pause_s(self, tries: int, chance: float) -> float:
        """The pause after so many failed tries; `chance` in [0, 1) is where in the interval it falls."""
        return chance * min(self.longest_pause_s, self.first_pause_s * 2.0 ** (tries - 1))


def is_temporary(status: int) -> bool:
    """Does a status say that the same request may work later, whichever service says it?

    Proxies have ever more above 500 (Cloudflare's 520 to 530, 529). What is not implemented (501), not spoken (505) or
    full (507) stays so.
    """
    return status in {408, 409, 425, 429} or (status >= 500 and status not in {501, 505, 507})


class Verdict(enum.Enum):
    """What to do about an answer."""

    FINAL = enum.auto()
    TEMPORARY = enum.auto()
    STALE_CREDENTIALS = enum.auto()


@dataclass(frozen=True, slots=True)
class Reply:
    """A final answer. `unsure`: a try before this one may have been carried out without telling."""

    answer: Answer
    unsure: bool


class Dialect(Protocol):
    """What differs between services in signing requests and reading refusals."""

    def sign(self, request: Request) -> Mapping[str, str]:
        """All headers to send, credentials included. Raises StorageError, or WireError to be called again."""

    def renew(self) -> None:
        """Get new credentials, because a request was refused as signed with stale ones."""

    def judge(self, answer: Answer) -> Verdict:
        """Is it worth trying again?"""

    def reason(self, answer: Answer) -> str:
        """The refusal in a few words."""


class Caller:
    """Sends requests of one dialect over the connections to one origin, until there is a final answer."""

    def __init__(
        self,
        connections: Connections,
        dialect: Dialect,
        patience: Patience,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._connections, self._dialect, self._patience, self._sleep = connections, dialect, patience, sleep

    def call(self, request: Request, doing: str) -> Reply:
        """Send until the answer is final; `doing` ("write data/x to s3://b") is for errors.

        Raises StorageError when it never is within the patience.
        """
        failing_since_s: float | None = None
        tries, unsure, renewed = 0, False, False
        while True:
            tries += 1
            try:
                answer = self._send(request)
            except WireError as e:
                if e.final:
                    raise StorageError(f"cannot {doing}: {e}") from e
                unsure |= e.sent
                reason, asked_s = str(e), 0.0
            else:
                verdict = self._dialect.judge(answer)
                stale = verdict is Verdict.STALE_CREDENTIALS
                if verdict is Verdict.FINAL or (stale and renewed):
                    return Reply(answer, unsure)
                unsure |= answer.status >= 500 or answer.status < 300
                reason, asked_s = self._dialect.reason(answer), _retry_after_s(answer, time.time())
                if stale:
                    self._dialect.renew()
                    renewed = True
            failing_since_s = failing_since_s or time.monotonic()
            self._wait(tries, asked_s, failing_since_s, f"cannot {doing}: {reason}")

    def _send(self, request: Request) -> Answer:
        return self._connections.exchange(replace(request, headers=self._dialect.sign(request)))

    def _wait(self, tries: int, asked_s: float, failing_since_s: float, trouble: str) -> None:
        """Pause before the next try; StorageError when there is none left."""
        pause_s = max(asked_s, self._patience.pause_s(tries, random.random()))  # noqa: S311 - jitter, no secret
        spent_s = time.monotonic() - failing_since_s
        if tries >= self._patience.tries or spent_s + pause_s > self._patience.total_s:
            times = "once" if tries == 1 else f"{tries} times in {spent_s:.0f} s"
            raise StorageError(f"{trouble}; tried {times}; check the endpoint and the network")
        if tries in (3, 6):
            log.warning("%s; trying again (%d of %d tries made)", trouble, tries, self._patience.tries)
        self._sleep(pause_s)


def _retry_after_s(answer: Answer, now_s: float) -> float:
    """The pause a server asks for, as seconds or as a date; 0 when it asks for none."""
    asked = answer.headers.get("retry-after", "").strip()
    if asked.isascii() and asked.isdigit():
        return float(asked)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - now_s)
    except ValueError:
        return 0.0
