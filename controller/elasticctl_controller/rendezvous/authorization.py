"""Which job a request belongs to: the job in its path, if the request carries that job's bearer token."""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote

from elasticctl.api.codec import from_json
from elasticctl.api.objects import as_mapping, as_text
from elasticctl.api.status import Phase, TokenStatus
from elasticctl_controller.core.group.worker_tokens import accepted_numbers, expired_numbers
from elasticctl_controller.rendezvous.groups import Groups
from elasticctl_controller.rendezvous.requests import Caller, Refused

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
        # A header may contain any bytes; those that are not text arrive as surrogates.
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
        """The uid and token of a job that exists and has not ended. After a restart, all its workers call at once."""
        manifest = self._find_job(key) or {}
        metadata, status = as_mapping(manifest.get("metadata")), as_mapping(manifest.get("status"))
        is_over = metadata.get("deletionTimestamp") is not None or status.get("phase") in _TERMINAL
        uid = as_text(metadata.get("uid"))
        if is_over or not uid:
            return None
        token = status.get("token")
        return uid, from_json(TokenStatus, token) if isinstance(token, Mapping) else None
