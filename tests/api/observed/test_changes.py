"""Records of who changed an object."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from elasticctl.api.objects import merge_patch
from elasticctl.api.observed.changes import (
    KEPT,
    PREFIX,
    Change,
    FieldChange,
    changes_of,
    differences,
    patch_with_change,
    verb_of,
    with_change,
)
from tests.support.any_json import JSON
from tests.support.job_samples import AT, job


def made(at: float, verb: str = "scale", **more: Any) -> Change:
    return Change(at, "maria", "elasticctl 1", verb, **more)


def test_a_job_keeps_its_newest_records_in_order_of_time() -> None:
    found = with_change(job(), made(AT, "submit"), "aa")
    for number in range(KEPT + 5):
        found = merge_patch(found, patch_with_change(found, {}, made(AT + 1 + number), f"{number:02}"))
    kept = changes_of(found)
    assert [change.at for change in kept] == [AT + 6 + number for number in range(KEPT)]


def test_a_copied_manifest_brings_no_history_along() -> None:
    forged = with_change(job(), Change(AT, "somebody else", "", "submit"), "aa")
    assert [change.by for change in changes_of(with_change(forged, made(AT + 9), "bb"))] == ["maria"]


def test_two_concurrent_changes_lose_neither_record() -> None:
    found = with_change(job(), made(AT, "submit"), "aa")
    patches = [patch_with_change(found, {}, made(AT + 1, verb), verb[:2]) for verb in ("cancel", "suspend")]
    for patch in patches:
        found = merge_patch(found, patch)
    assert [change.verb for change in changes_of(found)] == ["submit", "cancel", "suspend"]


def test_a_record_says_what_was_and_what_is() -> None:
    patch = {"metadata": {"resourceVersion": "7"}, "spec": {"sharing": {"priority": 10}, "suspend": True}}
    before = {"spec": {"sharing": {"priority": 0}}}
    fields = differences(before, patch)
    assert fields == (FieldChange("spec.sharing.priority", "0", "10"), FieldChange("spec.suspend", "", "true"))
    assert verb_of(patch, fields) == "suspend"
    assert fields[0].words == "spec.sharing.priority 0 -> 10"
    assert differences(before, {"spec": {"sharing": {"priority": 0}}}) == ()


def test_templates_are_not_copied_into_records() -> None:
    patch = {"spec": {"replicaSpecs": {"Worker": {"template": {"spec": {"env": "PASSWORD=swordfish"}}}}}}
    assert "swordfish" not in repr(differences({}, patch))


def test_one_record_that_is_damaged_hides_no_other() -> None:
    found = with_change(job(), made(AT), "aa")
    for number, damage in enumerate(("{", "[]", "null", "[" * 100_000, 7, None)):
        found["metadata"]["annotations"][f"{PREFIX}{number}"] = damage
    assert changes_of(found) == [made(AT)]


@settings(max_examples=20)
@given(JSON, JSON)
def test_any_object_may_be_read_and_patched(thing: Any, patch: Any) -> None:
    changes_of(thing)
    differences(thing, patch if isinstance(patch, dict) else {})
    patch_with_change(thing, {}, made(AT), "aa")
