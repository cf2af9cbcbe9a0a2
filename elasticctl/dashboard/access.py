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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elasticctl.api.errors import ConflictError, UsageError
from elasticctl.api.spec import MAX_WORKERS, ElasticJob
from elasticctl.api.text import listed, shown
from elasticctl.cluster.base import Cluster, Manifest

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


def is_cross_site(headers: Mapping[str, str]) -> bool:
    """Does the browser say that another site's page asks for this, other than by a link that was followed?"""
    site = headers.get("Sec-Fetch-Site", "none")
    return site not in ("same-origin", "none") and headers.get("Sec-Fetch-Mode") != "navigate"


def _digest(ticket: str) -> bytes:
    return hashlib.sha256(_bytes(ticket)).digest()


def _bytes(given: str) -> bytes:
    """What somebody has sent, whatever it is: headers need not be UTF-8."""
    return given.encode("utf-8", "surrogatepass")


ScalePatch = Callable[[Manifest, int], Mapping[str, Any]]
"""From a job and a number of workers to the merge patch that `elasticctl scale` makes."""

VERBS: Mapping[str, Mapping[str, Any]] = {
    "suspend": {"suspend": True},
    "resume": {"suspend": False},
    "cancel": {"cancel": True},
}
"""What each sets in the spec; `scale` is the one besides."""

_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class ChangeRequest:
    """What somebody asked for, of the job with this uid; `workers` for `scale` only."""

    verb: str
    uid: str
    workers: int = 0

    @classmethod
    def parse(cls, verb: str, body: object) -> ChangeRequest:
        """From the last word of a path and a JSON body; UsageError when it makes no sense."""
        if verb != "scale" and verb not in VERBS:
            raise UsageError(f"{shown(verb)} cannot be done here; {listed(['scale', *VERBS])} can")
        found = body if isinstance(body, dict) else {}
        uid, workers = found.get("uid"), found.get("workers", 0)
        if not isinstance(uid, str) or not uid:
            raise UsageError("uid: which job is meant?")
        if not isinstance(workers, int) or isinstance(workers, bool) or not 0 <= workers <= MAX_WORKERS:
            raise UsageError(f"workers: {shown(workers)} is not a number from 0 to {MAX_WORKERS}")
        if (verb == "scale") != (workers > 0):
            raise UsageError("workers: a number for scale, and for nothing else")
        return cls(verb, uid, workers)


def apply_change(cluster: Cluster, namespace: str, name: str, wish: ChangeRequest, scaled: ScalePatch) -> None:
    """Patch the job, again where somebody else has changed it meanwhile.

    Raises ConflictError when it has ended or is another job by now, UsageError for a number out of bounds, and what
    the cluster raises.
    """
    for attempt in range(_ATTEMPTS):
        patch = _patch(cluster.get_job(namespace, name), wish, scaled)
        try:
            cluster.patch_job(namespace, name, patch)
        except ConflictError:
            if attempt == _ATTEMPTS - 1:
                raise
            continue
        return


def _patch(manifest: Manifest, wish: ChangeRequest, scaled: ScalePatch) -> Mapping[str, Any]:
    job = ElasticJob.from_manifest(manifest)
    if job.uid != wish.uid:
        raise ConflictError(f"{job.name} is not the job that the page shows: it has been made again since")
    if job.status.phase.terminal:
        raise ConflictError(f"{job.name} has ended ({job.status.phase.value}); {wish.verb} comes too late")
    if wish.verb == "scale":
        return scaled(manifest, wish.workers)
    return {"metadata": {"resourceVersion": job.resource_version}, "spec": dict(VERBS[wish.verb])}
