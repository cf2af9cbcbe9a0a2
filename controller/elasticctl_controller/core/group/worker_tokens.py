"""The bearer tokens by which the rendezvous service knows a job's workers: the next one takes over while the job runs.

Tokens are derived from the controller's key, the job's uid and a number, so only that number is stored. A pass of the
loop first writes the next number to the status, then delivers the token to the workers' files, and records in the next
pass that it has done so. The previous token stays valid for some time after that, and for as long as the next one
cannot be delivered: no worker is ever locked out because of another component's failure.

Workers prove to each other that they belong to one job with a key of their own. It is never sent, so it never changes.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.spec import ElasticJob
from elasticctl.api.status import JobStatus, TokenStatus

EVERY_S = 12 * 3600.0
OVERLAP_S = 3600.0
"""How long the previous token stays valid once the next one is delivered: kubelets take about two minutes to bring
it."""
LATE = 8
"""A caller with one of this many expired tokens has to retry with a newer one; it is not refused for a wrong token."""


def derive_token(key: bytes, job_uid: str, number: int = 0) -> str:
    """A token of a job; number 0 is the only token of a job whose workers were created by an older controller."""
    name = f"{job_uid}/{number}" if number else job_uid
    return hmac.new(key, name.encode(), hashlib.sha256).hexdigest()


def derive_peer_key(key: bytes, job_uid: str) -> str:
    """The key by which a job's workers recognize each other."""
    return hmac.new(key, f"{job_uid}/peers".encode(), hashlib.sha256).hexdigest()


def accepted_numbers(token: TokenStatus | None, now: float) -> tuple[int, ...]:
    """The numbers of the job's tokens that are valid, the current one first."""
    if token is None:
        return (0,)
    former = token.number > 1 and (token.former_until is None or now < token.former_until)
    return (token.number, token.number - 1) if former else (token.number,)


def expired_numbers(token: TokenStatus | None, now: float) -> range:
    """The numbers of the tokens that have expired recently."""
    oldest_good = min(accepted_numbers(token, now))
    return range(max(1, oldest_good - LATE), oldest_good)


def keep_newest(status: JobStatus, known: TokenStatus | None) -> JobStatus:
    """The status with the token that this controller knows, if the status has been removed or replaced by an older one:
    the workers have the newer token, and would be locked out."""
    is_older = known is not None and (status.token is None or status.token.number < known.number)
    return replace(status, token=known) if is_older else status


def rotate(job: ElasticJob, status: JobStatus, delivered: int, has_pods: bool, every_s: float, now: float) -> JobStatus:
    """The status with the token that should be current; `delivered` is the number of the last that was delivered."""
    token = status.token
    if job.rdzv_endpoint or status.phase.terminal:
        return status
    if token is None:
        fresh = not status.workers and not has_pods
        return replace(status, token=TokenStatus(1, Timestamp(now), Timestamp(now))) if fresh else status
    if token.former_until is None:
        if delivered != token.number:
            return status
        until = now + min(OVERLAP_S, every_s / 2)
        return replace(status, token=replace(token, former_until=Timestamp(until)))
    if status.workers and next_at(token, every_s) <= now:
        return replace(status, token=TokenStatus(token.number + 1, Timestamp(now)))
    return status


def next_at(token: TokenStatus, every_s: float) -> float:
    """When the next token is due, once this one has been delivered."""
    return max((token.since or 0.0) + every_s, token.former_until or 0.0)


def due_times(status: JobStatus, every_s: float) -> Iterator[float]:
    """When the token must be checked again, while there are workers; in seconds since the epoch."""
    if status.token is not None and status.token.former_until is not None and status.workers:
        yield next_at(status.token, every_s)
