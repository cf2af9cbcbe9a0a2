"""Who holds what: the facts that the command line and the dashboard both show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.quota import (
    JobSlots,
    PoolUsage,
    ProjectUsage,
    Quota,
    job_usage,
    usage_by_job,
    usage_by_pool,
    usage_by_project,
)
from elasticctl.api.spec import ElasticJob
from tests.support.job_samples import job

FULL = {
    "workers": 4, "borrowed": 2, "pool": "t4", "slotsPerWorker": 2, "poolSlots": 16, "reason": "Full",
    "message": "has all 4 workers that it asks for; borrows 4 GPUs from b",
}  # fmt: skip
WAITS = {
    "workers": 0, "pool": "t4", "reason": "WaitsForTurn", "message": "waits for 2 GPUs held by jobs that come first",
    "change": "gives 2 workers to a/one",
}  # fmt: skip


def shared(name: str, project: str, share: dict[str, Any], **status: Any) -> ElasticJob:
    found = job(name, share=share, **status)
    found["metadata"]["namespace"] = project
    return ElasticJob.from_manifest(found)


JOBS = [
    shared("one", "a", FULL),
    shared("two", "b", WAITS, phase="Pending"),
    ElasticJob.from_manifest(job("alone")),
]
QUOTAS = [Quota("a", 1.0, {"t4": 4}, {"t4": 16}).to_manifest(), Quota("b", 2.0, {"t4": 4, "a100": 8}).to_manifest()]


def test_a_row_for_each_project_and_kind() -> None:
    assert usage_by_project(QUOTAS, usage_by_job(JOBS)) == [
        ProjectUsage("a", "t4", 1.0, held=8, guaranteed=4, limit=16, borrowed=4, unused=0, waiting=0),
        ProjectUsage("b", "a100", 2.0, held=0, guaranteed=8, limit=None, borrowed=0, unused=8, waiting=0),
        ProjectUsage("b", "t4", 2.0, held=0, guaranteed=4, limit=None, borrowed=0, unused=4, waiting=1),
    ]


def test_a_job_in_a_project_without_a_quota_has_a_row_too() -> None:
    (row,) = usage_by_project([], usage_by_job(JOBS[:1]))
    assert (row.project, row.weight, row.guaranteed, row.limit, row.unused) == ("a", 1.0, 0, None, 0)


def test_jobs_that_do_not_share_or_are_over_hold_nothing() -> None:
    assert [item.job for item in usage_by_job(JOBS)] == ["one", "two"]
    assert job_usage(shared("over", "a", FULL, phase="Succeeded")) is None
    assert job_usage(shared("undecided", "a", {"workers": 0, "reason": "Undecided"})) is None
    assert job_usage(JOBS[1]) == JobSlots(
        "b", "two", "t4", 0, 4, 0, 0, "WaitsForTurn", WAITS["message"], "gives 2 workers to a/one"
    )


def test_what_is_free_is_told_where_all_is_seen() -> None:
    held = usage_by_job(JOBS)
    rows = usage_by_project(QUOTAS, held)
    assert usage_by_pool(rows, held, all_seen=True) == [
        PoolUsage("a100", "GPU", 0, None, None),
        PoolUsage("t4", "GPU", 8, 16, 8),
    ]
    assert usage_by_pool(rows, held, all_seen=False)[1] == PoolUsage("t4", "GPU", 8, 16, None)


@pytest.mark.parametrize(("told", "free"), [((16, 12), 4), ((16, 0), 8), ((4, 4), 0)])
def test_of_several_sizes_of_a_pool_the_least_counts(told: tuple[int, int], free: int) -> None:
    """Jobs hear of a node that has come or gone one by one, and those that wait do not."""
    held = [replace(usage_by_job(JOBS)[0], job=f"job-{size}", slots=4, pool_slots=size) for size in told]
    (found,) = usage_by_pool(usage_by_project([], held), held, all_seen=True)
    assert (found.held, found.free) == (8, free)


def test_slots_of_processors_are_called_so() -> None:
    held = usage_by_job([shared("one", "a", {**FULL, "pool": "cpu"})])
    assert usage_by_pool(usage_by_project([], held), held, all_seen=True)[0].unit == "CPU slot"
