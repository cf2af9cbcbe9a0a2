"""A job as a table, and what disturbed it."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.observed.timeline import timeline
from elasticctl.api.spec import ElasticJob
from elasticctl.api.text import span
from elasticctl.cli.framework.output import format_tabs
from elasticctl.cli.views.history import history_table, interruptions, totals, totals_lines
from elasticctl.cli.views.job import status_table
from elasticctl.cli.views.jobs import job_table
from elasticctl.diagnosis import Case, diagnose
from tests.support.job_samples import AT, FAILED, at, drawn, job

NOW = AT + 60.4


pytestmark = pytest.mark.usefixtures("utc")


def test_a_long_value_goes_on_in_the_next_line() -> None:
    lines = drawn(status_table(job(), [], NOW), 62)
    assert lines[-4:-2] == [
        "Interruption  2023-11-14 22:13:40  digits-worker-1  Preempted",
        "              training again after 2.5s  12 steps done again",
    ]


def shown(**status: Any) -> list[str]:
    """The facts of a job, a line each."""
    return format_tabs(status_table(job(**status), [], NOW)).split("\n")


def test_a_metric_that_is_no_number_is_in_status_and_list() -> None:
    lost = {"step": 120, "metrics": {"accuracy": 0.5}, "notFinite": {"loss": {"value": "NaN", "step": 81}}}
    assert "Metrics\tloss NaN since step 81 accuracy 0.5" in shown(progress=lost)
    assert job_table([job(progress=lost)], NOW).rows[0][-1] == "loss NaN since step 81"


def test_status_shows_everything() -> None:
    assert format_tabs(status_table(job(), [], NOW)).split("\n") == [
        "FIELD\tVALUE",
        "Name\tdigits namespace default",
        "Phase\tRunning for 59s",
        "Workers\t4 of 4 training (1-4), CPU",
        "Progress\tstep 120/560 epoch 2/8 8,123 samples/s",
        "Metrics\tloss 0.21",
        "Checkpoint\tstep 100 3.4s ago, 6 committed",
        "Restarts\tPreempted 1",
        "Storage\tfile:///state/digits",
        "Interruption\t2023-11-14 22:13:40 digits-worker-1 Preempted training again after 2.5s 12 steps done again",
        "Scaling\t2023-11-14 22:13:50 3 -> 4 workers by user training after 1.2s",
    ]


def test_workers_do_not_train_before_their_groups_first_step() -> None:
    names = [f"digits-worker-{n}" for n in range(4)]
    group = {"generation": 3, "openedAt": at(50), "formedAt": at(51), "workers": names}
    workers = [{"name": name, "uid": f"uid-{name}", "phase": "Running"} for name in names]
    for stepped, doing in [({}, "running"), ({"firstStepAt": at(52)}, "training")]:
        lines = shown(generations=[{**group, **stepped}], workers=workers)
        assert f"Workers\t4 of 4 {doing} (1-4), CPU" in lines


@pytest.mark.parametrize("doing", ["stopping", "waiting", "preparing", "starting", "loading", "first step", "hung"])
def test_no_worker_trains_before_the_next_step_after_a_scaling_a_resume_or_a_loss(doing: str) -> None:
    """The newest group that is known has stepped, and is no more, or is about to be."""
    names = [f"digits-worker-{n}" for n in range(4)]
    stepped = {"generation": 3, "formedAt": at(51), "firstStepAt": at(52), "workers": names}
    lines = shown(generations=[stepped], activity={"doing": doing, "since": at(55)})
    assert "Workers\t4 of 4 running (1-4), CPU" in lines
    line = next(line for line in lines if line.startswith("Doing"))
    assert line == f"Doing\t{doing} (5.4s so far)"
    assert job_table([job(generations=[stepped], activity={"doing": doing, "since": at(55)})], NOW).rows[0][-1] == (
        f"{doing} (5.4s so far)"
    )


@pytest.mark.parametrize(("phase", "removal"), [("Suspended", "Suspended"), ("Cancelled", "Finished")])
def test_workers_that_still_clean_up_are_counted(phase: str, removal: str) -> None:
    workers = [
        {"name": "digits-worker-0", "uid": "u", "phase": "Terminating", "removal": removal},
        {"name": "digits-worker-1", "uid": "v", "phase": "Succeeded", "removal": removal},
    ]
    assert "Workers\t0 of 4 running, 1 stopping (1-4), CPU" in shown(phase=phase, workers=workers)


def test_no_worker_trains_when_a_member_is_gone() -> None:
    """An older controller does not report what the group does."""
    two = ["digits-worker-0", "digits-worker-1"]
    stepped = {"generation": 3, "formedAt": at(51), "firstStepAt": at(52), "workers": two}
    worker = {"name": "digits-worker-0", "uid": "u", "phase": "Running"}
    assert "Workers\t1 of 4 running, 3 waiting (1-4), CPU" in shown(generations=[stepped], workers=[worker])


def test_newcomers_do_not_train_yet() -> None:
    two = ["digits-worker-0", "digits-worker-1"]
    stepped = {"generation": 3, "formedAt": at(51), "firstStepAt": at(52), "workers": two}
    lines = shown(generations=[stepped], activity={"doing": "training", "since": at(52)})
    assert "Workers\t2 of 4 training, 2 starting (1-4), CPU" in lines
    assert "Doing\ttraining for 8.4s" in lines
    assert job_table([job(generations=[stepped], activity={"doing": "training"})], NOW).rows[0][-1] == ""


def test_failures_are_shown_as_the_budget_counts_them() -> None:
    assert "Failures\t2 of 3 allowed since the last checkpoint, 7 in all" in shown(failures=7, failuresSinceCommit=2)
    assert "Failures\t2 of 3 allowed before the first checkpoint" in shown(
        failures=2, failuresSinceCommit=2, checkpoint={}
    )


def test_a_script_that_reports_nothing_gets_true_words() -> None:
    """What is not known is not zero, and a group that has formed again has not failed to recover."""
    group = {"generation": 3, "formedAt": at(51), "workers": ["digits-worker-0"]}
    lost = {"at": at(20), "worker": "digits-worker-1", "uid": "u", "cause": "Preempted", "recoveredAt": at(22.5)}
    status = {"interruptions": [{**lost, "recoveryS": 2.5}], "restarts": {"Preempted": 1}}
    silent = job(generations=[group], progress={}, checkpoint={}, **status)
    lines = format_tabs(status_table(silent, [], NOW)).split("\n")
    assert "Interruption\t2023-11-14 22:13:40 digits-worker-1 Preempted group formed again after 2.5s" in lines
    assert "Scaling\t2023-11-14 22:13:50 3 -> 4 workers by user group formed after 1.2s" in lines
    found = ElasticJob.from_manifest(silent)
    assert totals(found, NOW).steps_redone is None
    assert next(iter(totals_lines(found, NOW))) == (
        "1 interruption, 1 scaling: 3.8s until a group had formed again, an unknown number of steps done again"
    )
    entries = [(entry.what, entry.details) for entry in timeline(found)]
    assert ("formed again", "after 2.5s") in entries
    assert "recovered" not in [what for what, _ in entries]


def test_a_job_with_a_rendezvous_of_its_own_is_not_reported_as_never_recovered() -> None:
    lost = {"at": at(20), "worker": "digits-worker-1", "uid": "u", "cause": "Preempted"}
    silent = ElasticJob.from_manifest(
        job(phase="Succeeded", progress={}, checkpoint={}, interruptions=[lost], scalings=[], restarts={"Preempted": 1})
    )
    assert "recovered" not in interruptions(silent.status)[0]
    assert next(iter(totals_lines(silent, NOW))) == "1 interruption, 0 scalings"


def test_ranks_that_failed_and_started_again_are_no_lost_worker() -> None:
    broken = {"at": at(40), "worker": "digits-worker-1", "cause": "Collateral", "message": "hung", "recoveryS": 3.0}
    found = ElasticJob.from_manifest(job(interruptions=[broken]))
    assert "\tranks failed\tdigits-worker-1\tCollateral: hung\t" in format_tabs(history_table(found))
    assert ("ranks failed", "Collateral: hung") in [(entry.what, entry.details) for entry in timeline(found)]


def test_a_failed_job_names_its_first_failing_rank() -> None:
    lines = format_tabs(status_table(job(**FAILED), [], NOW)).split("\n")
    assert "Phase\tFailed after 1m39s" in lines
    assert "Reason\tBackoffLimitExceeded: 4 failures, 3 allowed" in lines
    assert "Failures\t4 of 3 allowed" in lines
    assert "Failed last\trank 1 of digits-worker-1: exit code 1, ValueError: bad learning rate" in lines
    assert "Last lines\tTraceback (most recent call last): ValueError: bad learning rate" in lines


def test_last_lines_stay_lines_on_a_terminal() -> None:
    last = ["Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: bad learning rate"]
    failed = {**FAILED, "firstFailure": {**FAILED["firstFailure"], "lastLines": last}}
    assert drawn(status_table(job(**failed), [], NOW), 80)[-3:] == [
        "Last lines    Traceback (most recent call last):",
        '                File "train.py", line 3',
        "              ValueError: bad learning rate",
    ]


def test_a_job_that_stands_still_has_no_pace_and_no_end_in_sight() -> None:
    steps = {**job()["status"]["progress"], "at": at(58)}
    group = {"generation": 3, "formedAt": at(29), "firstStepAt": at(30), "resumedStep": 59, "lastStep": 120}
    found = job(activity={"doing": "training", "since": at(30)}, progress=steps, generations=[group])
    rows = dict(status_table(found, [], AT + 100).rows)
    assert (rows["Doing"], "8,123 samples/s" in rows["Progress"]) == ("training for 1m10s", True)
    rows = dict(status_table(found, [], AT + 130).rows)
    assert rows["Doing"] == "training for 1m40s, but no step for 1m12s"
    assert rows["Progress"] == "step 120/560  epoch 2/8", "neither a rate nor a time left"
    findings = diagnose(Case(ElasticJob.from_manifest(found), (), AT + 130))
    assert "samples/s" not in " ".join(finding.text for finding in findings)


@pytest.mark.parametrize(
    ("doing", "detail", "text"),
    [
        (
            "training",
            "nothing is saved: file:///s: no answer",
            "training for 30s; nothing is saved: file:///s: no answer",
        ),
        ("draining", "job-worker-1 joined", "draining: job-worker-1 joined (30s so far)"),
        ("loading", "step 657", "loading step 657 (30s so far)"),
        ("waiting", "for 2 workers to join", "waiting for 2 workers to join (30s so far)"),
    ],
)
def test_the_activity_of_a_group_reads_as_a_sentence(doing: str, detail: str, text: str) -> None:
    activity = {"doing": doing, "since": at(30.4), "detail": detail}
    assert dict(status_table(job(activity=activity), [], NOW).rows)["Doing"] == text


def test_a_waiting_job_says_why() -> None:
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes have a free GPU"}
    pods = [{"metadata": {"name": "digits-worker-0"}, "status": {"conditions": [condition]}}]
    table = status_table(job(phase="Pending"), pods, NOW)
    assert ("Reason", "worker-0 cannot be placed: 0/3 nodes have a free GPU.") in table.rows


def test_history_is_in_order_of_time() -> None:
    later = {"at": at(40), "worker": "digits-worker-2", "uid": "u", "cause": "NodeLost"}
    manifest = job(interruptions=[later, job()["status"]["interruptions"][0]])
    assert format_tabs(history_table(ElasticJob.from_manifest(manifest))).split("\n")[1:] == [
        "2023-11-14 22:13:40\tinterruption\tdigits-worker-1\tPreempted\t2.5s\t12",
        "2023-11-14 22:13:50\tscaling\t3 -> 4\tuser\t1.2s\t-",
        "2023-11-14 22:14:00\tinterruption\tdigits-worker-2\tNodeLost\t-\t-",
    ]


def test_history_fits_80_columns() -> None:
    lost = {"at": at(40), "worker": "digits-worker-12", "cause": "ApplicationError", "recoveryS": 75.0}
    assert drawn(history_table(ElasticJob.from_manifest(job(interruptions=[lost]))), 80) == [
        "AT                   WORKER            CAUSE             RECOVERED IN  REDONE",
        "2023-11-14 22:13:50  3 -> 4            user              1.2s",
        "2023-11-14 22:14:00  digits-worker-12  ApplicationError  1m15s",
    ]


def test_a_narrow_history_cuts_the_cause() -> None:
    lost = {"at": at(40), "worker": "digits-worker-2", "cause": "ApplicationError", "message": "SyntaxError: no colon"}
    assert drawn(history_table(ElasticJob.from_manifest(job(interruptions=[lost], scalings=[]))), 80) == [
        "AT                   WORKER           CAUSE                 RECOVERED IN  REDONE",
        "2023-11-14 22:14:00  digits-worker-2  ApplicationEr… colon",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0s"), (-3, "0.0s"), (9.94, "9.9s"), (59.4, "59s"), (59.6, "1m00s"), (3599.6, "1h00m"), (90000, "1d1h")],
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def roster(*workers: tuple[str, str]) -> list[dict[str, Any]]:
    """Workers by phase and node."""
    return [
        {"name": f"digits-worker-{index}", "uid": f"u{index}", "index": index, "phase": phase, "node": node}
        for index, (phase, node) in enumerate(workers)
    ]


def test_a_worker_that_is_pending_neither_runs_nor_trains() -> None:
    names = [f"digits-worker-{index}" for index in range(2)]
    words = "digits-worker-3: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    status: dict[str, Any] = {
        "active": 4,
        "workers": roster(("Running", "a"), ("Running", "b"), ("Pending", "c"), ("Pending", "")),
        "generations": [{"generation": 3, "formedAt": at(51), "firstStepAt": at(52), "workers": names}],
        "activity": {"doing": "training", "since": at(52)},
        "conditions": [
            {"type": "WorkersWaiting", "status": "True", "reason": "Unschedulable", "message": words},
        ],
    }
    lines = shown(**status)
    assert "Workers\t2 of 4 training, 1 starting, 1 waiting (1-4), CPU" in lines
    assert f"Waiting\t2 of 4 workers: {words.removeprefix('digits-')}" in lines
    (row,) = job_table([job(**status)], NOW).rows
    assert row[2] == "2/4 (1-4)"
    assert row[-1] == f"waiting: 2 of 4 workers: {words.removeprefix('digits-')}"


def test_a_job_that_is_refused_its_first_worker_says_so_in_the_list() -> None:
    words = 'pods "digits-worker-0" is forbidden: exceeded quota: team'
    refused = {"type": "WorkersWaiting", "status": "True", "reason": "FailedCreate", "message": words}
    status = {"phase": "Pending", "reason": "WaitingForWorkers", "message": "0 of 1", "conditions": [refused]}
    (row,) = job_table([job(**status)], NOW).rows
    assert row[-1] == f"FailedCreate: {words}"
    over = job(**{**status, "conditions": [{**refused, "status": "False"}]})
    assert job_table([over], NOW).rows[0][-1] == "WaitingForWorkers: 0 of 1"
