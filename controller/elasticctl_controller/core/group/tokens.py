"""The bearer tokens by which the rendezvous service knows a job's workers: the next one takes over while the job runs.

Tokens are derived from the controller's key, the job's uid and a number, so nothing of them is stored but that number.
A pass of the loop first writes the next number to the status, then delivers that token to the workers' files, and notes
in the next pass that it has. The former one is good until some time after that, and for as long as the next cannot be
delivered: no worker is ever shut out for something that others failed to do.

Workers prove to each other that they are of one job by a key of their own. It is never sent, so it stays the same.
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
"""How long the former token is good once the next one has been delivered: kubelets bring it within some two minutes."""
LATE = 8
"""Whoever shows one of so many former tokens is told to come again with a newer one, rather than that it is wrong."""


def derive_token(key: bytes, job_uid: str, number: int = 0) -> str:
    """A token of a job; number 0 is that of a job whose workers an older controller has made, and stays."""
    name = f"{job_uid}/{number}" if number else job_uid
    return hmac.new(key, name.encode(), hashlib.sha256).hexdigest()


def derive_peer_key(key: bytes, job_uid: str) -> str:
    """What a job's workers prove to each other that they have."""
    return hmac.new(key, f"{job_uid}/peers".encode(), hashlib.sha256).hexdigest()


def accepted_numbers(token: TokenStatus | None, now: float) -> tuple[int, ...]:
    """Which of a job's tokens are good, the current one first."""
    if token is None:
        return (0,)
    former = token.number > 1 and (token.former_until is None or now < token.former_until)
    return (token.number, token.number - 1) if former else (token.number,)


def expired_numbers(token: TokenStatus | None, now: float) -> range:
    """Which of them were good lately."""
    oldest_good = min(accepted_numbers(token, now))
    return range(max(1, oldest_good - LATE), oldest_good)


def rotate(job: ElasticJob, status: JobStatus, delivered: int, has_pods: bool, every_s: float, now: float) -> JobStatus:
    """The status with the token that is to be current; `delivered` is the number of the last that was delivered."""
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
    """When to look at it again: while there are workers."""
    if status.token is not None and status.token.former_until is not None and status.workers:
        yield next_at(status.token, every_s)
