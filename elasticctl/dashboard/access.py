"""Who may look: one user, from one machine, through one browser that was let in by a link that works once.

Everything lies below a path that is drawn at each start, because cookies are not kept apart by port: the session's is
sent to no other server of this machine, whosever it is. A link carries a ticket, which is used up by the redirect that
sets the cookie, so nothing that stays in a history or a log opens anything. What changes a job needs more than the
cookie: a token of its own in a header, and the page's own origin.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

COOKIE = "elasticctl-dashboard"
TOKEN_HEADER = "X-Elasticctl-Token"  # noqa: S105 - its name
MAX_TICKETS = 16

_HERE = ("127.0.0.1", "localhost")


class Gate:
    """The secrets of one run of the dashboard. They are kept in memory only, and compared in constant time."""

    def __init__(self) -> None:
        self.base = f"/{secrets.token_urlsafe(12)}/"
        self.session = secrets.token_urlsafe(32)
        self.token = secrets.token_urlsafe(32)
        self._tickets: list[bytes] = []

    def issue(self) -> str:
        """A path that lets one browser in, once; of many that nobody used the oldest stop working."""
        ticket = secrets.token_urlsafe(32)
        self._tickets = [*self._tickets, _digest(ticket)][-MAX_TICKETS:]
        return f"{self.base}?ticket={ticket}"

    def redeem(self, ticket: str) -> bool:
        """Use a ticket up; False for one that is not good (any more)."""
        wanted = _digest(ticket)
        found = [known for known in self._tickets if hmac.compare_digest(known, wanted)]
        self._tickets = [known for known in self._tickets if known not in found]
        return bool(found)

    def admits(self, cookie: str) -> bool:
        """Is this the session's cookie?"""
        return hmac.compare_digest(_bytes(cookie), self.session.encode())

    def may_change(self, headers: Mapping[str, str]) -> bool:
        """Does this request to change something come from the page itself?"""
        given = _bytes(headers.get(TOKEN_HEADER, ""))
        own = headers.get("Origin", "") == f"http://{headers.get('Host', '')}"
        return own and hmac.compare_digest(given, self.token.encode())


def is_local(host: str) -> bool:
    """Does the `Host` header name this machine? Another name is one that somebody else has pointed here.

    Any port will do: the page may be reached through a tunnel.
    """
    name, _, port = host.partition(":")
    return name in _HERE and (not port or (port.isascii() and port.isdigit()))


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Does the browser say that another site's page asks for this, other than by a link that was followed?"""
    site = headers.get("Sec-Fetch-Site", "none")
    return site not in ("same-origin", "none") and headers.get("Sec-Fetch-Mode") != "navigate"


def _digest(ticket: str) -> bytes:
    return hashlib.sha256(_bytes(ticket)).digest()


def _bytes(given: str) -> bytes:
    """What somebody has sent, whatever it is: headers need not be UTF-8."""
    return given.encode("utf-8", "surrogatepass")
