"""--set changes one field."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from elasticctl.api.errors import UsageError
from elasticctl.operations.manifest_changes import set_field

MANIFEST: dict[str, Any] = {"metadata": {"name": "a"}, "spec": {"list": [{"b": 1}, 2], "text": "x"}}


@pytest.mark.parametrize(
    ("path", "value", "where", "found"),
    [
        ("spec.backoffLimit", "4", ("spec", "backoffLimit"), 4),
        ("spec.text", '"4"', ("spec", "text"), "4"),
        ("spec.policy.hangTimeoutSeconds", "1.5", ("spec", "policy", "hangTimeoutSeconds"), 1.5),
        ("spec.list[0].b", "[1, {c: d}]", ("spec", "list", 0, "b"), [1, {"c": "d"}]),
        ("spec.list[1]", "no", ("spec", "list", 1), False),
        ('metadata.labels["x.y/z"]', "v", ("metadata", "labels", "x.y/z"), "v"),
        ("spec.text", "", ("spec", "text"), None),
    ],
)
def test_a_field_is_set(path: str, value: str, where: tuple[Any, ...], found: Any) -> None:
    manifest: Any = copy.deepcopy(MANIFEST)
    set_field(manifest, path, value)
    for step in where:
        manifest = manifest[step]
    assert manifest == found


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("", "1", '--set "": give a field'),
        (".a", "1", '--set ".a": give a field'),
        ("a..b", "1", "give a field"),
        ("a b", "1", "give a field"),
        ("spec.list[9]", "1", "there is no place for 9"),
        ("spec.list[9].b", "1", "nothing at 9, step 3 of the path"),
        ("spec.list.b", "1", 'there is no place for "b"'),
        ("spec.text.b.c", "1", 'nothing at "b"'),
        ("spec.fresh[0]", "1", 'nothing at "fresh"'),
        ("spec.text", "[", "not YAML"),
        ("spec.text", "{a: 1, a: 2}", "given twice"),
    ],
)
def test_a_path_that_leads_nowhere(path: str, value: str, message: str) -> None:
    manifest = copy.deepcopy(MANIFEST)
    with pytest.raises(UsageError) as caught:
        set_field(manifest, path, value)
    assert message in str(caught.value)
