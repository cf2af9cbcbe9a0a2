"""Access to the dashboard of one user, and the changes that the page may make.

One user has access, from this machine, in a browser that was let in by a link that works once. Everything is below a
path chosen at random at each start: cookies are not separated by port, and a path keeps the session's from other
servers of this machine. A link carries a ticket, used up by the redirect that sets the cookie, so nothing that remains
in a history or a log gives access. To change a job takes more than the cookie: a token in a header, and the page's
own origin. A change (scale, suspend, resume, cancel) applies only to the very job that the page showed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from elasticctl.api.errors import UsageError
from elasticctl.api.spec import MAX_WORKERS
from elasticctl.api.text import join_or, quote
from elasticctl.cluster.base import Manifest
from elasticctl.operations import lifecycle
from elasticctl.operations.scale import ScaleRequest, scale
from elasticctl.operations.target import Target

COOKIE = "elasticctl-dashboard"
TOKEN_HEADER = "X-Elasticctl-Token"  # noqa: S105 - its name
MAX_TICKETS = 16

_HERE = ("127.0.0.1", "localhost")


class Gate:
    """The secrets of one run of the dashboard: held only in memory, compared in constant time."""

    def __init__(self) -> None:
        self.base = f"/{secrets.token_urlsafe(12)}/"
        self.session = secrets.token_urlsafe(32)
        self.token = secrets.token_urlsafe(32)
        self._tickets: list[bytes] = []

    def issue(self) -> str:
        """Return a path that lets one browser in, once; beyond MAX_TICKETS, the oldest unused ones expire."""
        ticket = secrets.token_urlsafe(32)
        self._tickets = [*self._tickets, _digest(ticket)][-MAX_TICKETS:]
        return f"{self.base}?ticket={ticket}"

    def redeem(self, ticket: str) -> bool:
        """Use up a ticket; False if it is not valid (any more)."""
        wanted = _digest(ticket)
        found = [known for known in self._tickets if hmac.compare_digest(known, wanted)]
        self._tickets = [known for known in self._tickets if known not in found]
        return bool(found)

    def admits(self, cookie: str) -> bool:
        """True if this is the session's cookie."""
        return hmac.compare_digest(_bytes(cookie), self.session.encode())

    def may_change(self, headers: Mapping[str, str]) -> bool:
        """True if this request to change something comes from the page itself."""
        given = _bytes(headers.get(TOKEN_HEADER, ""))
        own = headers.get("Origin", "") == f"http://{headers.get('Host', '')}"
        return own and hmac.compare_digest(given, self.token.encode())


def is_local(host: str) -> bool:
    """True if the `Host` header names this machine; another name may be DNS rebinding.

    Any port is accepted, as the page may be reached through a tunnel.
    """
    name, _, port = host.partition(":")
    return name in _HERE and (not port or (port.isascii() and port.isdigit()))


def is_own_origin(headers: Mapping[str, str]) -> bool:
    """True if the browser says that a page of this host makes this request; TLS may end in front of us."""
    scheme, _, host = headers.get("Origin", "").partition("://")
    return scheme in ("http", "https") and bool(host) and host == headers.get("Host", "")


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """True if the browser says that another site's page makes this request, other than by following a link."""
    site = headers.get("Sec-Fetch-Site", "none")
    return site not in ("same-origin", "none") and headers.get("Sec-Fetch-Mode") != "navigate"


def _digest(ticket: str) -> bytes:
    return hashlib.sha256(_bytes(ticket)).digest()


def _bytes(given: str) -> bytes:
    """Any header as bytes, as headers need not be UTF-8."""
    return given.encode("utf-8", "surrogatepass")


CHANGES: Mapping[str, Callable[[Target, Manifest], object]] = {
    "suspend": lifecycle.suspend,
    "resume": lifecycle.resume,
    "cancel": lifecycle.cancel,
}
"""The changes without a number; `scale` is the only other one."""


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """A requested change of the job with this uid; `workers` is only for `scale`."""

    verb: str
    uid: str
    workers: int = 0

    @classmethod
    def parse(cls, verb: str, body: object) -> ChangeRequest:
        """Read the last word of a path and a JSON body; UsageError if they are invalid."""
        if verb != "scale" and verb not in CHANGES:
            raise UsageError(f"{quote(verb)} is not a valid change. FIX: use {join_or(['scale', *CHANGES])}")
        found = body if isinstance(body, dict) else {}
        uid, workers = found.get("uid"), found.get("workers", 0)
        if not isinstance(uid, str) or not uid:
            raise UsageError("uid: missing; it says which job is meant")
        if not isinstance(workers, int) or isinstance(workers, bool) or not 0 <= workers <= MAX_WORKERS:
            raise UsageError(f"workers: {quote(workers)} is not a number from 0 to {MAX_WORKERS}")
        if (verb == "scale") != (workers > 0):
            raise UsageError("workers: scale needs a number, and no other verb takes one")
        return cls(verb, uid, workers)


def apply_change(target: Target, name: str, wish: ChangeRequest) -> None:
    """Carry out a change.

    Raises NotFoundError if the name belongs to another job by now, ConflictError if the job has ended or is moving,
    UsageError for a number out of bounds, and what the cluster raises.
    """
    found = {"metadata": {"name": name, "uid": wish.uid}}
    if wish.verb == "scale":
        scale(target, found, ScaleRequest(to=wish.workers))
    else:
        CHANGES[wish.verb](target, found)
