"""What the page may have done to a job, and to which."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.errors import ConflictError, NotFoundError, UsageError
from elasticctl.dashboard.access import ChangeRequest, apply_change
from elasticctl.operations.target import Target
from elasticctl.settings.contexts import Context
from tests.support.dashboard.cluster import Jobs
from tests.support.job_samples import FAILED, job


def target(cluster: Jobs) -> Target:
    return Target(Context("lab", "kubernetes"), "default", cluster)  # type: ignore[arg-type]


def spec_after(verb: str, workers: int = 0, **status: Any) -> dict[str, Any]:
    cluster = Jobs(job(**status))
    apply_change(target(cluster), "digits", ChangeRequest(verb, "uid-digits", workers))
    found: dict[str, Any] = cluster.jobs["digits"]["spec"]
    return found


def test_each_verb_does_what_the_command_does() -> None:
    assert spec_after("suspend")["suspend"] is True
    assert spec_after("resume", phase="Suspended")["suspend"] is False
    assert spec_after("cancel")["cancel"] is True
    assert spec_after("scale", 2)["replicaSpecs"]["Worker"]["replicas"] == 2


def test_bounds_are_those_of_the_command() -> None:
    with pytest.raises(UsageError, match="5 workers are more than the maximum of digits, 4"):
        spec_after("scale", 5)


def test_a_change_in_between_is_not_overwritten() -> None:
    cluster = Jobs(job())
    cluster.in_between = job()
    cluster.in_between["metadata"]["resourceVersion"] = "8"
    cluster.in_between["spec"]["minReplicas"] = 2
    apply_change(target(cluster), "digits", ChangeRequest("scale", "uid-digits", 2))
    spec = cluster.jobs["digits"]["spec"]
    assert (spec["minReplicas"], spec["replicaSpecs"]["Worker"]["replicas"]) == (2, 2)


def test_another_job_of_the_same_name_is_left_alone() -> None:
    with pytest.raises(NotFoundError, match="another job now has its name"):
        apply_change(target(Jobs(job())), "digits", ChangeRequest("cancel", "another-uid"))


def test_a_job_that_has_ended_stays_as_it_is() -> None:
    with pytest.raises(ConflictError, match="has ended"):
        apply_change(target(Jobs(job(**FAILED))), "digits", ChangeRequest("resume", "uid-digits"))
    with pytest.raises(NotFoundError):
        apply_change(target(Jobs()), "digits", ChangeRequest("resume", "uid-digits"))


@pytest.mark.parametrize(
    ("verb", "body", "said"),
    [
        ("delete", {"uid": "u"}, "scale, suspend, resume or cancel"),
        ("cancel", {}, "which job"),
        ("cancel", {"uid": 7}, "which job"),
        ("cancel", [], "which job"),
        ("cancel", {"uid": "u", "workers": 3}, "no other verb takes one"),
        ("scale", {"uid": "u"}, "scale needs a number"),
        ("scale", {"uid": "u", "workers": "3"}, "not a number"),
        ("scale", {"uid": "u", "workers": True}, "not a number"),
        ("scale", {"uid": "u", "workers": -1}, "not a number"),
        ("scale", {"uid": "u", "workers": 10**9}, "not a number"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused(verb: str, body: object, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ChangeRequest.parse(verb, body)
