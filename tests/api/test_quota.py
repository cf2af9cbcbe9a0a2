"""Quotas: read from anything, refused if invalid; and who holds what, as the command line and the dashboard show it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import SpecError
from elasticctl.api.quota import (
    MAX_WEIGHT,
    MIN_WEIGHT,
    POOLS,
    JobSlots,
    PoolUsage,
    ProjectUsage,
    Quota,
    check_quota,
    job_usage,
    usage_by_job,
    usage_by_pool,
    usage_by_project,
)
from elasticctl.api.spec import ElasticJob
from tests.support.any_json import JSON
from tests.support.job_samples import job

SLOTS = st.dictionaries(st.sampled_from(POOLS), st.integers(0, 100), max_size=3)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["apiVersion", "kind", "metadata", "spec"]), JSON), JSON, JSON)
def test_anything_is_read_as_a_quota_that_makes_sense(manifest: dict[str, Any], weight: Any, slots: Any) -> None:
    for data in (manifest, {**manifest, "spec": {"weight": weight, "guaranteed": slots, "limit": slots}}):
        quota = Quota.from_manifest(data)
        assert MIN_WEIGHT <= quota.weight <= MAX_WEIGHT
        assert all(slots >= 0 for slots in (*quota.guaranteed.values(), *quota.limit.values()))


@given(st.floats(MIN_WEIGHT, MAX_WEIGHT), SLOTS, SLOTS)
def test_a_stored_quota_is_read_back(weight: float, guaranteed: dict[str, int], limit: dict[str, int]) -> None:
    limit = {pool: max(slots, guaranteed.get(pool, 0)) for pool, slots in limit.items()}
    quota = Quota("vision", weight, guaranteed, limit)
    assert check_quota(quota.to_manifest()) == quota


@pytest.mark.parametrize(
    ("spec", "path", "said"),
    [
        ({"weight": "heavy"}, "spec.weight", 'not "heavy"'),
        ({"weight": True}, "spec.weight", "not true"),
        ({"weight": 0}, "spec.weight", "from 0.001 to 1000"),
        ({"guaranteed": ["t4"]}, "spec.guaranteed", "must be a mapping"),
        ({"guaranteed": {"t40": 1}}, "spec.guaranteed", 'did you mean "t4"'),
        ({"limit": {"t4": -1}}, "spec.limit.t4", "not -1"),
        ({"limit": {"t4": 1.5}}, "spec.limit.t4", "not 1.5"),
        ({"guaranteed": {"t4": 3}, "limit": {"t4": 2}}, "spec.guaranteed.t4", "the limit is 2"),
    ],
)
def test_an_invalid_quota_is_refused_by_field(spec: dict[str, Any], path: str, said: str) -> None:
    manifest = {**Quota("vision").to_manifest(), "spec": spec}
    with pytest.raises(SpecError) as caught:
        check_quota(manifest)
    assert caught.value.path == path
    assert said in str(caught.value)


@pytest.mark.parametrize("manifest", [[], {"kind": "ElasticQuota"}, {**Quota("a").to_manifest(), "kind": "ElasticJob"}])
def test_another_object_is_refused(manifest: Any) -> None:
    with pytest.raises(SpecError):
        check_quota(manifest)


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


def test_free_slots_are_reported_if_all_jobs_are_seen() -> None:
    held = usage_by_job(JOBS)
    rows = usage_by_project(QUOTAS, held)
    assert usage_by_pool(rows, held, all_seen=True) == [
        PoolUsage("a100", "GPU", 0, None, None),
        PoolUsage("t4", "GPU", 8, 16, 8),
    ]
    assert usage_by_pool(rows, held, all_seen=False)[1] == PoolUsage("t4", "GPU", 8, 16, None)


@pytest.mark.parametrize(("sizes", "free"), [((16, 12), 4), ((16, 0), 8), ((4, 4), 0)])
def test_the_smallest_of_several_pool_sizes_counts(sizes: tuple[int, int], free: int) -> None:
    """Jobs learn one by one of a node that came or went, and waiting jobs do not."""
    held = [replace(usage_by_job(JOBS)[0], job=f"job-{size}", slots=4, pool_slots=size) for size in sizes]
    (found,) = usage_by_pool(usage_by_project([], held), held, all_seen=True)
    assert (found.held, found.free) == (8, free)


def test_slots_of_processors_are_called_so() -> None:
    held = usage_by_job([shared("one", "a", {**FULL, "pool": "cpu"})])
    assert usage_by_pool(usage_by_project([], held), held, all_seen=True)[0].unit == "CPU slot"
