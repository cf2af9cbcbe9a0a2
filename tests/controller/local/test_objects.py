"""What may be stored as a job, and merge patches."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given

from elasticctl.api.errors import SpecError
from elasticctl_controller.local.objects import check_job
from tests.support.any_json import JSON
from tests.support.jobs import shell_job


def test_a_job_may_be_stored() -> None:
    assert check_job(shell_job("a-job-1", "true"))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"kind": "Job"}, "kind"),
        ({"apiVersion": "v1"}, "apiVersion"),
        ({"spec": []}, "spec"),
        ({"metadata": None}, "metadata"),
        ({"metadata": {}}, "metadata.name"),
        ({"metadata": {"name": "Upper"}}, "metadata.name"),
        ({"metadata": {"name": "../../etc"}}, "metadata.name"),
        ({"metadata": {"name": "x" * 53}}, "metadata.name"),
        ({"metadata": {"name": "a", "namespace": "a/b"}}, "metadata.namespace"),
    ],
)
def test_an_invalid_job_is_refused_with_the_field(change: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_job({**shell_job("job", "true"), **change})
    assert refused.value.path == path
    assert "\n" not in str(refused.value)


@given(JSON)
def test_garbage_is_refused_and_never_raises_anything_else(garbage: Any) -> None:
    with pytest.raises(SpecError):
        check_job(garbage)
