"""docs/security.md shows the controller's rights as the manifests give them, and each of them says why."""

from __future__ import annotations

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.kubeapi.features import LABEL_FEATURE, Feature
from tests.support.rights_table import PAGE, WHY, generate, roles


def test_the_table_is_that_of_the_manifests() -> None:
    page = PAGE.read_text("utf-8")
    assert page == generate(page), "FIX: python -m tests.support.rights_table"


@pytest.mark.parametrize("role", roles(), ids=lambda role: role["metadata"]["name"])
def test_every_rule_says_why_and_no_reason_is_without_a_rule(role: Manifest) -> None:
    said = {name.removeprefix(WHY) for name in role["metadata"]["annotations"] if name.startswith(WHY)}
    assert said == {resource.replace("/", ".") for rule in role["rules"] for resource in rule["resources"]}


def test_every_feature_has_a_role_of_its_own() -> None:
    found = [
        role["metadata"]["labels"][LABEL_FEATURE] for role in roles() if LABEL_FEATURE in role["metadata"]["labels"]
    ]
    assert sorted(found) == sorted(Feature)
