"""What a quota is: read from anything, refused where it cannot be one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.errors import SpecError
from elasticctl.api.quota import MAX_WEIGHT, MIN_WEIGHT, POOLS, Quota, check_quota
from tests.support.any_json import JSON

SLOTS = st.dictionaries(st.sampled_from(POOLS), st.integers(0, 100), max_size=3)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(["apiVersion", "kind", "metadata", "spec"]), JSON), JSON, JSON)
def test_anything_is_read_as_a_quota_that_makes_sense(manifest: dict[str, Any], weight: Any, slots: Any) -> None:
    for data in (manifest, {**manifest, "spec": {"weight": weight, "guaranteed": slots, "limit": slots}}):
        quota = Quota.from_manifest(data)
        assert MIN_WEIGHT <= quota.weight <= MAX_WEIGHT
        assert all(slots >= 0 for slots in (*quota.guaranteed.values(), *quota.limit.values()))


@given(st.floats(MIN_WEIGHT, MAX_WEIGHT), SLOTS, SLOTS)
def test_what_is_stored_is_read_back(weight: float, guaranteed: dict[str, int], limit: dict[str, int]) -> None:
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
def test_what_cannot_be_a_quota_is_refused_by_field(spec: dict[str, Any], path: str, said: str) -> None:
    manifest = {**Quota("vision").to_manifest(), "spec": spec}
    with pytest.raises(SpecError) as caught:
        check_quota(manifest)
    assert caught.value.path == path
    assert said in str(caught.value)


@pytest.mark.parametrize("manifest", [[], {"kind": "ElasticQuota"}, {**Quota("a").to_manifest(), "kind": "ElasticJob"}])
def test_another_object_is_refused(manifest: Any) -> None:
    with pytest.raises(SpecError):
        check_quota(manifest)
