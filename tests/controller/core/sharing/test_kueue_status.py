"""What is reported to Kueue: patches of a Workload's status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import Manifest
from elasticctl.api.status import JobStatus, Phase
from elasticctl_controller.core.sharing.kueue import build_finish, build_pods_ready, build_release
from tests.support.controller.kueue import admission, queued, stored

NOW = 1_767_229_200.9
STAMP = "2026-01-01T01:00:00.000000Z"


def conditions(patch: Manifest) -> dict[str, dict[str, Any]]:
    return {item["type"]: item for item in patch["status"]["conditions"]}


def evicted(reason: str, **fields: Any) -> Manifest:
    workload = stored(queued(), "QuotaReserved", "Admitted", "Evicted", "PodsReady", **fields)
    workload["status"]["conditions"][2]["reason"] = reason
    return workload


def test_quota_is_given_back_for_the_version_that_was_read() -> None:
    patch = build_release(evicted("Preempted", admission=admission(3)), NOW)
    assert patch["metadata"] == {"resourceVersion": "7"}
    assert patch["status"]["admission"] is None
    found = conditions(patch)
    assert {name: item["status"] for name, item in found.items()} == {
        "QuotaReserved": "False",
        "Admitted": "False",
        "Evicted": "True",
        "PodsReady": "False",
        "Requeued": "True",
    }
    assert found["QuotaReserved"]["reason"] == "Pending"
    assert found["QuotaReserved"]["message"] == found["Requeued"]["message"] == "Evicted it is"
    assert found["Requeued"]["reason"] == "Preempted"
    assert found["Admitted"]["lastTransitionTime"] == STAMP
    assert found["Evicted"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"  # it is Kueue's, and as it was
    assert all(item["reason"] for item in found.values())  # the server wants one


@pytest.mark.parametrize(
    ("reason", "status", "active", "again"),
    [
        ("Preempted", {}, True, "True"),
        ("SomethingNew", {}, True, "True"),
        ("AdmissionCheck", {}, True, "True"),
        ("AdmissionCheck", {"requeueState": {"requeueAt": "2026-01-01T02:00:00Z"}}, True, "False"),
        ("PodsReadyTimeout", {}, True, "False"),
        ("ClusterQueueStopped", {}, True, "False"),
        ("Deactivated", {}, False, "False"),
        ("Deactivated", {}, True, "True"),  # somebody has activated it meanwhile
    ],
)
def test_it_waits_again_at_once_unless_kueue_says_when(
    reason: str, status: dict[str, Any], active: bool, again: str
) -> None:
    workload = evicted(reason, **status)
    workload["spec"]["active"] = active
    assert conditions(build_release(workload, NOW))["Requeued"]["status"] == again


def test_what_was_never_admitted_is_not_said_to_be_no_longer() -> None:
    found = conditions(build_release(stored(queued(), "QuotaReserved"), NOW))
    assert {name: item["status"] for name, item in found.items()} == {"QuotaReserved": "False"}


@pytest.mark.parametrize(
    ("phase", "reason"), [(Phase.SUCCEEDED, "Succeeded"), (Phase.FAILED, "Failed"), (Phase.CANCELLED, "Failed")]
)
def test_the_end_is_told_with_how_it_went(phase: Phase, reason: str) -> None:
    job = replace(queued(), status=JobStatus(phase=phase, message="so it was"))
    patch = build_finish(stored(job, "Admitted"), job, NOW)
    found = conditions(patch)["Finished"]
    assert (found["status"], found["reason"], found["message"]) == ("True", reason, "so it was")
    assert found["observedGeneration"] == 2
    assert conditions(patch)["Admitted"]["status"] == "True"
    assert "admission" not in patch["status"]


def test_workers_that_run_are_told_of() -> None:
    assert conditions(build_pods_ready(stored(queued()), NOW))["PodsReady"]["status"] == "True"
