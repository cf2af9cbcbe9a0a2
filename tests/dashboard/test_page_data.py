"""What the page shows of a job, and its workers over time."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.spec import ElasticJob
from elasticctl.dashboard.page_data import MAX_TEXT, MAX_WORKERS, job_details, job_row, training_steps, wanted_steps
from tests.support.any_json import JSON, KEYS
from tests.support.job_samples import AT, FAILED, at, job

CURVE = {
    "since": at(2),
    "atS": [0, 10, 20],
    "step": [0, 60, 120],
    "samplesPerS": [8000, 8100],
    "metrics": {"loss": [2, 0.21]},
}
ON_SPOT = {
    "nodeSelector": {"node.kubernetes.io/instance-type": "g4dn.xlarge", "eks.amazonaws.com/capacityType": "SPOT"},
    "containers": [{"name": "elasticjob-worker", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
}


def read(name: str = "digits", **status: Any) -> ElasticJob:
    return ElasticJob.from_manifest(job(name, **status))


def test_a_row_says_what_the_list_shows() -> None:
    group = {"generation": 1, "firstStepAt": at(2), "resumedStep": 0}
    progress = {"at": at(22), "step": 121, "totalSteps": 560}
    shown = job_row(read(generations=[group], progress=progress), AT + 60)
    assert shown | {
        "name": "digits", "namespace": "default", "phase": "Running", "active": 4, "desired": 4, "min": 1, "max": 4,
        "step": 121, "totalSteps": 560, "stepsPerS": 6.0, "interruptions": 1, "costUsd": None, "reason": "",
    } == shown  # fmt: skip


def test_a_row_does_not_change_by_growing_older() -> None:
    assert job_row(read(curve=CURVE), AT + 60) == job_row(read(curve=CURVE), AT + 6000)


def test_a_row_says_why_a_job_does_not_train() -> None:
    assert job_row(read(**FAILED), AT)["reason"] == "4 failures, 3 allowed"
    error = {"worker": "digits-worker-1", "rank": 1, "exitCode": 1, "error": "ValueError: no"}
    message = f"worker digits-worker-1 (rank 1, exit code 1): {error['error']}; failures: 4, backoffLimit: 3"
    assert job_row(read(**{**FAILED, "firstFailure": error, "message": message}), AT)["reason"] == "ValueError: no"
    assert job_row(read(phase="Pending", message="x" * 9999), AT)["reason"] == "x" * MAX_TEXT


def test_a_row_says_what_the_group_does_and_leaves_the_seconds_to_the_page() -> None:
    before = {"generation": 1, "formedAt": at(2), "firstStepAt": at(362), "resumedStep": 0}
    now = {"generation": 2, "formedAt": at(400)}
    doing = {"activity": {"doing": "first step", "since": at(400)}, "generations": [before, now]}
    expected = {"words": "first step", "since": AT + 400, "lastS": 360.0, "steady": False}
    assert job_row(read(**doing), AT + 600)["doing"] == job_row(read(**doing), AT + 900)["doing"] == expected
    loading = {"doing": "loading", "since": at(400), "detail": "step 657"}
    assert job_row(read(activity=loading), AT)["doing"] == expected | {"words": "loading step 657", "lastS": None}
    assert job_row(read(activity={"doing": "training"}), AT)["doing"]["steady"] is True
    assert job_row(read(), AT)["doing"] is None
    for phase in ("Suspended", "Failed"):
        assert job_row(read(phase=phase, activity=loading), AT)["doing"] is None


def test_unknown_is_not_zero() -> None:
    shown = job_details(read(progress={}, checkpoint={}), (), AT + 60)
    assert shown["stepsRedone"] is None
    assert job_details(read(stepsRedone=0), (), AT + 60)["stepsRedone"] == 0


def test_a_row_says_what_is_lent_by_other_projects() -> None:
    assert job_row(read(share={"workers": 4, "borrowed": 2, "pool": "T4"}), AT)["borrowed"] == 2
    assert job_row(read(), AT)["borrowed"] == 0


def test_details_are_everything_about_a_job() -> None:
    shown = job_details(read(curve=CURVE), (), AT + 60)
    assert shown["curve"] == {
        "at": [AT + 2, AT + 12, AT + 22], "step": [0, 60, 120], "samplesPerS": [8000, 8100],
        "metrics": {"loss": [2, 0.21]},
    }  # fmt: skip
    assert [item["cause"] for item in shown["interruptions"]] == ["Preempted"]
    assert shown["scalings"][0] | {"from": 3, "to": 4, "by": "user", "recoveryS": 1.25} == shown["scalings"][0]
    assert shown["restarts"] == {"Preempted": 1}
    assert shown["checkpoint"]["step"] == 100
    assert shown["findings"] == []  # that it trains can be seen
    assert shown["runs"]["storage"] == "file:///state/digits"
    assert shown["cost"] is None
    assert [entry["what"] for entry in shown["timeline"]][:2] == ["created", "interruption"]


def test_a_failure_comes_with_its_last_lines_and_what_to_type() -> None:
    first = job_details(read(**FAILED), (), AT + 200)["findings"][0]
    assert first["severity"] == "error"
    assert first["details"][-1] == "ValueError: bad learning rate"
    assert first["mends"][0]["command"] == "elasticctl logs digits --worker 1"


def test_long_quotations_do_not_cut_the_end_of_our_sentence() -> None:
    failed = {**FAILED, "firstFailure": {**FAILED["firstFailure"], "error": "ValueError: " + "x" * 5_000}}
    shown = job_details(read(**failed), (), AT + 200)
    assert shown["findings"][0]["text"].endswith("--backoff-limit allows 3.")
    assert len(shown["findings"][0]["text"]) < 500


def test_a_job_that_stands_has_no_rate() -> None:
    rates = [
        job_row(read(phase=phase), AT)["samplesPerS"] for phase in ("Suspended", "Pending", "Running", "Succeeded")
    ]
    assert rates == [None, None, 8123.4, 8123.4]


def test_a_job_without_a_maximum_has_none() -> None:
    manifest = job()
    assert job_row(ElasticJob.from_manifest(manifest), AT)["max"] == 4
    del manifest["spec"]["maxReplicas"]
    assert job_row(ElasticJob.from_manifest(manifest), AT)["max"] is None


def test_cost_is_shown_if_prices_are_known() -> None:
    manifest = job(workerSeconds={"spot": 3600.0}, workers=[{"name": "w", "startedAt": at(0), "phase": "Running"}])
    manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"] = ON_SPOT
    found = ElasticJob.from_manifest(manifest)
    cost = job_details(found, (), AT + 3600)["cost"]
    assert 0 < cost["spentUsd"] < cost["onDemandUsd"]
    assert cost["instance"] == "g4dn.xlarge"
    assert cost["perHourUsd"] > 0
    assert job_row(found, AT + 3600)["costUsd"] == round(cost["spentUsd"], 2)
    assert job_row(found, AT + 3600)["gpusPerWorker"] == 1


def test_a_large_job_is_cut_to_what_can_be_read() -> None:
    roster = [{"name": f"w-{n}", "uid": str(n), "phase": "Running"} for n in range(MAX_WORKERS + 50)]
    shown = job_details(read(workers=roster), (), AT)
    assert (len(shown["workers"]), shown["workersInAll"]) == (MAX_WORKERS, MAX_WORKERS + 50)


@settings(max_examples=25)
@given(st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON)))
def test_any_status_can_be_shown(status: dict[str, Any]) -> None:
    found = ElasticJob.from_manifest(job(**status))
    json.dumps([job_row(found, AT), job_details(found, (), AT)], allow_nan=False)


GROUPS = [
    {"generation": 1, "workers": ["a", "b", "c"], "openedAt": at(1), "formedAt": at(3)},
    {"generation": 2, "workers": ["a", "b"], "openedAt": at(20), "formedAt": at(21)},
    {"generation": 3, "workers": ["a", "b", "c", "d"], "openedAt": at(40)},
]


def since_at(steps: list[tuple[float, int]]) -> list[tuple[float, int]]:
    return [(round(moment - AT, 3), workers) for moment, workers in steps]


def test_no_worker_trains_between_two_groups() -> None:
    assert since_at(training_steps(read(generations=GROUPS))) == [(3, 3), (20, 0), (21, 2), (40, 0)]


def test_it_stops_with_the_job() -> None:
    over = read(generations=GROUPS[:2], phase="Succeeded", completionTime=at(50))
    assert since_at(training_steps(over))[-1] == (50, 0)
    paused = [{"type": "Suspended", "status": "True", "lastTransitionTime": at(30)}]
    assert since_at(training_steps(read(generations=GROUPS[:2], phase="Suspended", conditions=paused)))[-1] == (30, 0)


def test_before_the_first_group_there_is_nothing() -> None:
    assert training_steps(read()) == []


def test_wanted_follows_the_scalings() -> None:
    assert since_at(wanted_steps(read(), AT + 60)) == [(0, 3), (30, 4), (60, 4)]
    assert since_at(wanted_steps(read(scalings=[], completionTime=at(9), phase="Failed"), AT + 60)) == [(0, 4), (9, 4)]
