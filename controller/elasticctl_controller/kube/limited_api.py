"""The controller's requests to the API server: counted, rate-limited and fenced.

A token bucket keeps a busy controller from crowding out other clients. When the server says that it is busy, all
requests wait for as long as it asks. Nothing is written unless this process may act: a process that was suspended for a
while, and has lost its Lease in the meantime, must not finish what it had begun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.errors import (
    BusyError,
    ConflictError,
    ElasticctlError,
    ExpiredError,
    ForbiddenError,
    NotFoundError,
    SpecError,
    UnreachableError,
)
from elasticctl.kubeapi.connection import JSON, Connection, Stream

log = logging.getLogger(__name__)

MAX_TRIES = 5
MAX_WAIT_S = 30.0
"""The longest pause that a busy server can impose with one answer."""

_OUTCOMES: Mapping[type[ElasticctlError], str] = {
    NotFoundError: "404",
    ConflictError: "409",
    ExpiredError: "410",
    SpecError: "422",
    ForbiddenError: "403",
    BusyError: "429",
    UnreachableError: "unreachable",
}


@dataclass(slots=True)
class _Closing:
    """Until when the buckets that share this give out nothing."""

    until: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class TokenBucket:
    """`per_s` requests a second, with bursts of `burst`; thread-safe. `clock` is monotonic seconds."""

    def __init__(
        self,
        per_s: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._per_s, self._burst, self._clock, self._sleep = per_s, float(burst), clock, sleep
        self._tokens, self._at, self._closing = self._burst, clock(), _Closing(0.0)

    def with_own_rate(self, per_s: float, burst: int) -> TokenBucket:
        """Return a bucket with its own tokens; what closes either of the two closes both."""
        other = TokenBucket(per_s, burst, self._clock, self._sleep)
        other._closing = self._closing
        return other

    def take_token(self) -> None:
        """Wait for a token; tokens are given out in the order of the calls."""
        with self._closing.lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s) - 1
            self._at = now
            wait_s = max(-self._tokens / self._per_s, self._closing.until - now)
        while wait_s > 0:
            self._sleep(wait_s)
            wait_s = self._closing.until - self._clock()  # it may have been closed in the meantime

    def close_for(self, seconds: float) -> None:
        """Give out nothing for that long, or until the end of an earlier and longer closing."""
        with self._closing.lock:
            self._closing.until = max(self._closing.until, self._clock() + seconds)


class LimitedApi:
    """`connection` with limits. `on_request(verb, outcome)` is called for each request; `may_act` guards every write.

    Verbs are those of HTTP, and WATCH; outcomes are "ok", an HTTP status, "unreachable" or "error".
    """

    def __init__(
        self,
        connection: Connection,
        bucket: TokenBucket,
        may_act: Callable[[], bool] = lambda: True,
        on_request: Callable[[str, str], None] = lambda verb, outcome: None,
    ) -> None:
        self._connection, self._bucket, self._may_act, self._on_request = connection, bucket, may_act, on_request

    def with_own_rate(self, per_s: float, burst: int) -> LimitedApi:
        """Return the same API with its own rate limit: its requests delay none here, unless the server is busy."""
        return LimitedApi(self._connection, self._bucket.with_own_rate(per_s, burst), self._may_act, self._on_request)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | list[Any] | None = None,
        params: Mapping[str, str] | None = None,
        *,
        content_type: str = JSON,
        most_bytes: int | None = None,
    ) -> dict[str, Any]:
        """Make one request, and repeat it while the server is busy; raises what `Connection.request` raises.

        Raises UnreachableError, and sends nothing, if this process may not act.
        """
        for tries_left in reversed(range(MAX_TRIES)):
            self._bucket.take_token()
            if method != "GET" and not self._may_act():
                raise UnreachableError(f"{method} {path} was not sent: this replica does not lead")
            try:
                answer = self._connection.request(
                    method, path, body, params, content_type=content_type, most_bytes=most_bytes
                )
            except ElasticctlError as e:
                self._on_request(method, outcome_of(e))
                if not self._back_off(e) or tries_left == 0:
                    raise
            else:
                self._on_request(method, "ok")
                return answer
        raise AssertionError("unreachable: the last try returns or raises")

    def stream(self, path: str, params: Mapping[str, str] | None = None, *, timeout_s: float | None = None) -> Stream:
        """Start a watch; raises what `Connection.stream` raises."""
        self._bucket.take_token()
        try:
            stream = self._connection.stream(path, params, timeout_s=timeout_s)
        except ElasticctlError as e:
            self._on_request("WATCH", outcome_of(e))
            self._back_off(e)
            raise
        self._on_request("WATCH", "ok")
        return stream

    def _back_off(self, error: ElasticctlError) -> bool:
        """Pause all requests for as long as a busy server asks; False if it does not."""
        if not isinstance(error, BusyError) or error.retry_after_s is None:
            return False
        wait_s = min(error.retry_after_s, MAX_WAIT_S)
        log.warning("%s; pausing all requests for %.0f s", error, wait_s)
        self._bucket.close_for(wait_s)
        return True


def outcome_of(error: ElasticctlError) -> str:
    """An error as a label of the request counter."""
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")
