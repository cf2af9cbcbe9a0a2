"""The controller's way to the API server: counted, limited, fenced.

A token bucket keeps a controller that has much to do from crowding out everybody else; when the server says that it is
busy and for how long, all requests wait for that long. And nothing is written unless this process may act: one that
was suspended for a while, and lost its lease meanwhile, must not carry out what it had in hand.
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
    ClusterError,
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
"""The longest that a busy server is obeyed in one go."""

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
    """How long nothing is given out, by whichever of the buckets that share it."""

    until: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class TokenBucket:
    """`per_s` requests a second, `burst` at once; thread-safe. `clock` is monotonic seconds."""

    def __init__(
        self,
        per_s: float,
        burst: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._per_s, self._burst, self._clock, self._sleep = per_s, float(burst), clock, sleep
        self._tokens, self._at, self._closing = self._burst, clock(), _Closing(0.0)

    def apart(self, per_s: float, burst: int) -> TokenBucket:
        """Another one, with tokens of its own; what closes either closes both."""
        other = TokenBucket(per_s, burst, self._clock, self._sleep)
        other._closing = self._closing
        return other

    def take(self) -> None:
        """Wait for a token; they are given out in the order asked for."""
        with self._closing.lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s) - 1
            self._at = now
            wait_s = max(-self._tokens / self._per_s, self._closing.until - now)
        while wait_s > 0:
            self._sleep(wait_s)
            wait_s = self._closing.until - self._clock()  # it may have been closed meanwhile

    def close_for(self, seconds: float) -> None:
        """Give out nothing for that long, or as long as was said before."""
        with self._closing.lock:
            self._closing.until = max(self._closing.until, self._clock() + seconds)


class LimitedApi:
    """`connection` with all of this; `on_request(verb, outcome)` hears of each request, `may_act` says who may write.

    Verbs are HTTP's and WATCH; outcomes are "ok", an HTTP status, "unreachable" or "error".
    """

    def __init__(
        self,
        connection: Connection,
        bucket: TokenBucket,
        may_act: Callable[[], bool] = lambda: True,
        on_request: Callable[[str, str], None] = lambda verb, outcome: None,
    ) -> None:
        self._connection, self._bucket, self._may_act, self._on_request = connection, bucket, may_act, on_request

    def apart(self, per_s: float, burst: int) -> LimitedApi:
        """The same way at a rate of its own: what goes there holds nothing up here, unless the server is busy."""
        return LimitedApi(self._connection, self._bucket.apart(per_s, burst), self._may_act, self._on_request)

    def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        *,
        content_type: str = JSON,
    ) -> dict[str, Any]:
        """Make one request, again while the server is busy; raises as `Connection.request` does.

        ClusterError, and nothing was done, when this process may not act.
        """
        for tries_left in reversed(range(MAX_TRIES)):
            self._bucket.take()
            if method != "GET" and not self._may_act():
                raise ClusterError(f"{method} {path} was not sent: this replica does not lead")
            try:
                answer = self._connection.request(method, path, body, params, content_type=content_type)
            except ElasticctlError as e:
                self._on_request(method, outcome_of(e))
                if not self._obey(e) or tries_left == 0:
                    raise
            else:
                self._on_request(method, "ok")
                return answer
        raise AssertionError("unreachable: the last try returns or raises")

    def stream(self, path: str, params: Mapping[str, str] | None = None, *, timeout_s: float | None = None) -> Stream:
        """Begin a watch; raises as `Connection.stream` does."""
        self._bucket.take()
        try:
            stream = self._connection.stream(path, params, timeout_s=timeout_s)
        except ElasticctlError as e:
            self._on_request("WATCH", outcome_of(e))
            self._obey(e)
            raise
        self._on_request("WATCH", "ok")
        return stream

    def _obey(self, error: ElasticctlError) -> bool:
        """Make no request for as long as a busy server has said; False where none has said anything."""
        if not isinstance(error, BusyError) or error.retry_after_s is None:
            return False
        wait_s = min(error.retry_after_s, MAX_WAIT_S)
        log.warning("%s; no request is made for %.0f s", error, wait_s)
        self._bucket.close_for(wait_s)
        return True


def outcome_of(error: ElasticctlError) -> str:
    """An error as a label of the request counter."""
    return next((outcome for kind, outcome in _OUTCOMES.items() if isinstance(error, kind)), "error")
