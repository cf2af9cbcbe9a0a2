"""Whom the rendezvous port lets in: which connections it accepts, and which job a request belongs to.

Every pod of a cluster can reach the port. A client is unknown until it has shown a valid token. Unknown clients are
limited by address, the workers of a job by job. A worker shows its token within milliseconds of connecting, and its
address then gets back what the connection took, so thousands of workers that share one address are let in as they come.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from elasticctl.api.codec import from_json
from elasticctl.api.objects import as_mapping, as_text
from elasticctl.api.status import Phase, TokenStatus
from elasticctl_controller.core.group.worker_tokens import accepted_numbers, expired_numbers
from elasticctl_controller.rendezvous.groups import Groups
from elasticctl_controller.rendezvous.requests import Caller, Refused

CONNECTS, CONNECTS_PER_S = 2048.0, 200.0
"""How many unknown clients may connect from one address in a burst, and per second in the long run."""
UNKNOWN_PER_ADDRESS = 1024
UNKNOWN_CLIENTS = 4096
"""How many unknown clients may be connected at a time; the oldest one is closed for the next."""
PER_WORKER, PER_JOB = 16, 64
"""How many connections a job may have: a launcher needs 3 or 4, and a replaced worker may leave some behind."""
ADDRESSES = 16_384


@dataclass(slots=True)
class _Address:
    tokens: float
    at_s: float
    unknown: int = 0


@dataclass(slots=True)
class Admission:
    """Counts connections, and the rate of new ones, per address."""

    _addresses: dict[str, _Address] = field(default_factory=dict)

    def admit(self, peer: str, now_s: float) -> bool:
        """Count an unknown client that connects; False if it may not. `now_s` is the time of a monotonic clock."""
        network = network_of(peer)
        found = self._addresses.pop(network, None) or _Address(CONNECTS, now_s)
        self._addresses[network] = found  # the one that was heard of last is at the end
        found.tokens = min(CONNECTS, found.tokens + (now_s - found.at_s) * CONNECTS_PER_S)
        found.at_s = now_s
        if found.tokens < 1 or found.unknown >= UNKNOWN_PER_ADDRESS:
            return False
        found.tokens -= 1
        found.unknown += 1
        if len(self._addresses) > ADDRESSES:
            self._drop_oldest()
        return True

    def leave(self, peer: str, *, known: bool) -> None:
        """An unknown client has disconnected or, if it is `known` now, has shown a token."""
        found = self._addresses.get(network_of(peer))
        if found is not None:
            found.unknown -= 1
            found.tokens += known

    def _drop_oldest(self) -> None:
        """Drop the address that has been silent longest and has no connections."""
        for network, found in self._addresses.items():
            if not found.unknown:
                del self._addresses[network]
                return


def network_of(peer: str) -> str:
    """The range that one machine can choose its addresses from: with IPv6, a network of 64 bits."""
    if ":" not in peer:
        return peer
    address = ipaddress.IPv6Address(peer.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(mapped) if mapped else str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def most_connections(workers: int) -> int:
    """How many connections a job may have with that many live workers."""
    return PER_JOB + PER_WORKER * workers


_PATH = re.compile(r"/v1/jobs/([^/]+)/([^/]+)/[^/]*")
_TERMINAL = frozenset(phase.value for phase in Phase if phase.terminal)


class Authorization:
    """Identifies the job of each request. `token_for(job_uid, number)` returns a bearer token of a job.

    `tokens` say which numbers are valid, by job key; the lock of `groups` guards them. `find_job(key)` returns the
    manifest of a job that has no group yet.
    """

    def __init__(
        self,
        groups: Groups,
        token_for: Callable[[str, int], str],
        find_job: Callable[[str], Mapping[str, Any] | None],
    ) -> None:
        self._groups, self.token_for, self._find_job = groups, token_for, find_job
        self.tokens: dict[str, TokenStatus | None] = {}

    def identify(self, path: str, authorization: str) -> Caller:
        """The job whose token a request carries. Raises Refused."""
        found = _PATH.fullmatch(path)
        if found is None:
            raise Refused(404, "there is nothing here")
        key = f"{unquote(found[1])}/{unquote(found[2])}"
        with self._groups.lock:
            group = self._groups.by_key.get(key)
            found_running = (group.job_uid, self.tokens.get(key)) if group else None
        running = found_running or self._find_running(key)
        if running is None:
            raise Refused(410, f"no running job {key}")  # the same for a job that has ended and one that never existed
        uid, token = running
        self._check_token(key, uid, token, authorization)
        if group is None:
            raise Refused(503, f"job {key} has not been reconciled yet")
        return Caller(key, uid)

    def _check_token(self, key: str, uid: str, token: TokenStatus | None, authorization: str) -> None:
        """Raise Refused unless the token in the header is valid now."""
        # A header may contain any bytes; bytes that are not text arrive as surrogates.
        given, now = authorization.encode("utf-8", "surrogateescape"), self._groups.clock()

        def is_one_of(numbers: Iterable[int]) -> bool:
            wanted = (f"Bearer {self.token_for(uid, number)}".encode() for number in numbers)
            return any(hmac.compare_digest(given, each) for each in wanted)

        if is_one_of(accepted_numbers(token, now)):
            return
        if is_one_of(expired_numbers(token, now)):
            raise Refused(503, f"this token of job {key} has expired: a newer one is on its way to its workers")
        raise Refused(401, f"wrong token for job {key}")

    def _find_running(self, key: str) -> tuple[str, TokenStatus | None] | None:
        """The uid and token of a job that exists and has not ended. After a restart, all its workers call at the same
        time."""
        manifest = self._find_job(key) or {}
        metadata, status = as_mapping(manifest.get("metadata")), as_mapping(manifest.get("status"))
        is_over = metadata.get("deletionTimestamp") is not None or status.get("phase") in _TERMINAL
        uid = as_text(metadata.get("uid"))
        if is_over or not uid:
            return None
        token = status.get("token")
        return uid, from_json(TokenStatus, token) if isinstance(token, Mapping) else None
