"""Which of a job's tokens is current, and which are good."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.status import JobStatus, Phase, TokenStatus, WorkerStatus
from elasticctl_controller.core.group.worker_tokens import (
    EVERY_S,
    LATE,
    OVERLAP_S,
    accepted_numbers,
    expired_numbers,
    next_at,
    rotate,
)
from tests.support.controller.samples import a_job

NOW = 1_700_000_000.0
WORKERS = (WorkerStatus(name="job-worker-0", uid="u"),)


def step(status: JobStatus, now: float, delivered: int = 0) -> JobStatus:
    return rotate(a_job(), status, delivered, False, EVERY_S, now)


def token(status: JobStatus) -> TokenStatus:
    assert status.token is not None
    return status.token


def test_a_new_job_has_its_first_token_immediately_and_no_previous_one() -> None:
    status = step(JobStatus(), NOW)
    first = token(status)
    assert step(status, NOW + 2 * EVERY_S) == status, "no worker has it yet"
    assert accepted_numbers(first, NOW) == (1,)
    assert from_json(TokenStatus, to_json(first)) == first


def test_the_next_token_takes_over_and_the_former_is_good_for_a_while() -> None:
    status = replace(step(JobStatus(), NOW), workers=WORKERS)
    assert step(status, NOW + EVERY_S - 1) == status
    status = step(status, NOW + EVERY_S)
    assert accepted_numbers(token(status), NOW + EVERY_S) == (2, 1)
    at = NOW + EVERY_S + 60
    status = step(status, at, delivered=2)
    assert accepted_numbers(token(status), at + OVERLAP_S - 1) == (2, 1)
    assert accepted_numbers(token(status), at + OVERLAP_S) == (2,)
    assert list(expired_numbers(token(status), at + OVERLAP_S)) == [1]


def test_the_former_is_good_for_as_long_as_the_next_cannot_be_delivered() -> None:
    status = step(replace(step(JobStatus(), NOW), workers=WORKERS), NOW + EVERY_S)
    month = NOW + 30 * 24 * 3600
    assert step(status, month, delivered=1) == status
    assert accepted_numbers(token(status), month) == (2, 1)


def test_a_token_leaves_before_the_next_but_one_comes() -> None:
    """Two are valid at a time, even if the controller has missed some."""
    late = TokenStatus(5, Timestamp(NOW - 10 * EVERY_S), Timestamp(NOW + 100))
    status = JobStatus(token=late, workers=WORKERS)
    assert step(status, NOW) == status
    assert next_at(late, EVERY_S) == NOW + 100
    assert accepted_numbers(token(step(status, NOW + 100)), NOW + 100) == (6, 5)


def test_those_of_long_ago_are_no_tokens_any_more() -> None:
    found = TokenStatus(1000, Timestamp(NOW), Timestamp(NOW))
    assert list(expired_numbers(found, NOW)) == list(range(1000 - LATE, 1000))
    assert list(expired_numbers(None, NOW)) == []


@pytest.mark.parametrize("workers", [(), WORKERS])
def test_workers_of_an_older_controller_keep_what_they_have(workers: tuple[WorkerStatus, ...]) -> None:
    status = JobStatus(workers=workers)
    assert rotate(a_job(), status, 0, not workers, EVERY_S, NOW) == status
    assert accepted_numbers(None, NOW) == (0,)


def test_jobs_that_are_over_or_bring_their_own_rendezvous_get_none() -> None:
    over = JobStatus(phase=Phase.SUCCEEDED, token=TokenStatus(1, Timestamp(NOW), Timestamp(NOW)))
    assert step(over, NOW + 2 * EVERY_S) == over
    assert rotate(replace(a_job(), rdzv_endpoint="etcd:2379"), JobStatus(), 0, False, EVERY_S, NOW).token is None
