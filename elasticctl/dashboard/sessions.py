"""The sessions of a shared dashboard: each user has separate connections and APIs, kept only in memory.

A session is identified by a secret from the browser or from the proxy in front, of which only a digest is kept. It ends
when the cluster no longer accepts the user's token, after MAX_AGE_S, after IDLE_S without a request, and when others
need the room.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticctl.api.errors import BusyError, CredentialsError
from elasticctl.cluster.kube.user import NAME, User
from elasticctl.dashboard.feed import run_in_thread
from elasticctl.dashboard.user_api import Scope, UserApi
from elasticctl.settings.contexts import KUBERNETES, Context

MAX_SESSIONS, MAX_PER_USER = 128, 8
MAX_APIS = 4
"""How many namespaces one session may look at."""
MAX_AGE_S, IDLE_S = 12 * 3600.0, 3600.0
MAX_LOGINS = 4
"""How many tokens the cluster checks at a time."""


LogIn = Callable[[str, Callable[[], None]], User]
"""Finds out whose token this is; calls the function once it is no longer accepted. Blocks; raises ClusterError."""


@dataclass(slots=True)
class Login:
    """One login. `token` is the page's own, which changes require."""

    user: User
    token: str
    refused: threading.Event
    begun_at: float
    used_at: float
    apis: dict[str | None, UserApi] = field(default_factory=dict)

    @property
    def viewers(self) -> int:
        """The number of open pages."""
        return sum(api.feed.viewers for api in self.apis.values())

    def is_over(self) -> bool:
        """True once the cluster has refused the token, or the session is too old; may be asked in any thread."""
        return self.refused.is_set() or time.monotonic() - self.begun_at > MAX_AGE_S

    def api(self, namespace: str | None, hello: Mapping[str, Any], poll_s: float) -> UserApi:
        """The user's API for a namespace (None: all). Raises BusyError if there are too many."""
        found = self.apis.get(namespace)
        if found is not None and found.watching is not None and not found.watching.done():
            return found
        if len(self.apis) >= MAX_APIS:
            unseen = [name for name, api in self.apis.items() if not api.feed.viewers]
            if not unseen:
                raise BusyError(f"{MAX_APIS} namespaces are open already. FIX: close a page")
            self.apis.pop(unseen[0]).stop()
        place = Scope(self.user.cluster, Context(NAME, KUBERNETES), namespace, lambda: self.user.access)
        made = self.apis[namespace] = UserApi(place, self.token, poll_s, hello, self.is_over)
        made.start()
        return made

    def end(self) -> None:
        """Stop everything that runs for this user."""
        self.refused.set()
        for api in self.apis.values():
            api.stop()
        self.user.close()


class Sessions:
    """All sessions; for one event loop."""

    def __init__(self, log_in: LogIn) -> None:
        self._log_in = log_in
        self._by_digest: dict[bytes, Login] = {}
        self._coming: dict[bytes, asyncio.Task[Login]] = {}
        self._logins = asyncio.Semaphore(MAX_LOGINS)
        self._secret = secrets.token_bytes(32)

    def find(self, shown: str) -> Login | None:
        """The session that this secret belongs to; None if there is none, or it has ended."""
        self._end_stale()
        session = self._by_digest.get(_digest(shown))
        if session is not None:
            session.used_at = time.monotonic()
        return session

    async def admit(self, shown: str, token: str) -> Login:
        """Begin a session with the secret `shown`. Raises ClusterError if the cluster does not accept the token.

        Concurrent requests with one secret begin one session.
        """
        digest = _digest(shown)
        task = self._coming.get(digest)
        if task is None:
            task = self._coming[digest] = asyncio.create_task(self._start_login(digest, token))
            task.add_done_callback(lambda done: (self._coming.pop(digest), done.cancelled() or done.exception()))
        return await asyncio.shield(task)

    def end(self, shown: str) -> None:
        """End the session, if there is one."""
        session = self._by_digest.pop(_digest(shown), None)
        if session is not None:
            session.end()

    def end_all(self) -> None:
        """End all sessions."""
        for session in self._by_digest.values():
            session.end()
        self._by_digest.clear()

    async def _start_login(self, digest: bytes, token: str) -> Login:
        refused = threading.Event()
        async with self._logins:
            user = await run_in_thread(lambda: self._log_in(token, refused.set))
        if refused.is_set():
            raise CredentialsError("the cluster no longer accepts this token. FIX: log in with another one")
        self._end_stale()
        self._make_room(user.name)
        now = time.monotonic()
        # The same for all sessions of a user: a page goes on while its proxy renews the token.
        own = hmac.new(self._secret, user.name.encode(), hashlib.sha256).hexdigest()
        session = self._by_digest[digest] = Login(user, own, refused, now, now)
        return session

    def _make_room(self, user: str) -> None:
        """End the least recently used sessions, of a user with many and of all users."""
        mine = [digest for digest, session in self._by_digest.items() if session.user.name == user]
        for digests, most in ((mine, MAX_PER_USER), (list(self._by_digest), MAX_SESSIONS)):
            if len(digests) >= most:
                least = min(digests, key=lambda digest: self._rank(self._by_digest[digest]))
                self._by_digest.pop(least).end()

    @staticmethod
    def _rank(session: Login) -> tuple[bool, float]:
        return session.viewers > 0, session.used_at

    def _end_stale(self) -> None:
        """End sessions that are over or unused."""
        now = time.monotonic()
        for digest, session in list(self._by_digest.items()):
            if session.is_over() or (not session.viewers and now - session.used_at > IDLE_S):
                self._by_digest.pop(digest).end()


def _digest(shown: str) -> bytes:
    return hashlib.sha256(shown.encode("utf-8", "surrogatepass")).digest()
