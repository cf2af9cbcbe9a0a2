"""What the jobs of a project are allowed, and what of a job breaks it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from elasticctl.api.errors import SpecError
from elasticctl.api.limits import AllowedJobs, check_limits
from elasticctl.api.spec import ElasticJob
from tests.support.any_json import JSON
from tests.support.limits import ALLOWED, CASES, LimitCase


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_violations_are_named(case: LimitCase) -> None:
    found = AllowedJobs.from_spec({"allowed": case.allowed}).breaches(ElasticJob.from_manifest(case.job))
    assert case.breach in "; ".join(found)
    assert bool(found) == bool(case.breach)


def test_stored_limits_are_read_back() -> None:
    limits = check_limits(ALLOWED)
    assert limits.to_spec() == ALLOWED
    assert AllowedJobs.from_spec({}) == AllowedJobs()
    assert AllowedJobs().to_spec() == {}


@settings(max_examples=30)
@given(JSON, JSON)
def test_anything_is_read_and_a_damaged_list_allows_nothing(allowed: Any, job: Any) -> None:
    limits = AllowedJobs.from_spec({"allowed": allowed, "images": job})
    limits.breaches(ElasticJob.from_manifest(job if isinstance(job, dict) else {"spec": job}))
    damaged = AllowedJobs.from_spec({"allowed": {"images": [7]}})
    template = {"spec": {"containers": [{"image": "x"}]}}
    assert damaged.breaches(ElasticJob(template=template))


@pytest.mark.parametrize(
    ("allowed", "path", "said"),
    [
        ([], "spec.allowed", "must be a mapping"),
        ({"image": []}, "spec.allowed", 'did you mean "images"'),
        ({"images": "x"}, "spec.allowed.images", 'not "x"'),
        ({"images": ["a*b"]}, "spec.allowed.images", "a * that is not at its end"),
        ({"storage": ["/data"]}, "spec.allowed.storage", "is not a URL"),
        ({"serviceAccounts": [""]}, "spec.allowed.serviceAccounts", "list of names"),
        ({"priority": 1.5}, "spec.allowed.priority", "whole number"),
        ({"priority": 1001}, "spec.allowed.priority", "not 1001"),
        ({"usdPerDay": -1}, "spec.allowed.usdPerDay", "not -1"),
        ({"usdPerDay": float("nan")}, "spec.allowed.usdPerDay", "0 or more"),
    ],
)
def test_an_invalid_limit_is_refused_by_field(allowed: Any, path: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        check_limits(allowed)
    assert caught.value.path == path
    assert said in str(caught.value)
