"""`history`: the lines below the table, and its data."""

from __future__ import annotations

import json
from typing import Any

import pytest

from elasticctl.api.spec import ElasticJob
from elasticctl.cli.views.history import totals, totals_lines
from elasticctl.cluster.local.client import LocalCluster
from tests.support.cli import Run
from tests.support.job_samples import AT, at, job
from tests.support.jobs import shell_job

GROUPS: list[dict[str, Any]] = [
    {"generation": 1, "openedAt": at(8), "firstStepAt": at(11), "resumedStep": 0, "lastStep": 100},
    {"generation": 2, "openedAt": at(21), "firstStepAt": at(22), "resumedStep": 90, "lastStep": 120},
]


def found(**status: Any) -> ElasticJob:
    return ElasticJob.from_manifest(job(**status))


def test_totals_are_two_lines() -> None:
    progress = {"step": 120, "at": at(51)}
    assert list(totals_lines(found(generations=GROUPS, progress=progress, stepsRedone=10), AT + 51)) == [
        "1 interruption, 1 scaling: 3.8s until training went on, 10 steps done again",
        "training moved forward 76.0 % of 50s (goodput)",
    ]


def test_losses_with_one_recovery_cost_its_time_once() -> None:
    lost = [
        {"at": at(10 + i), "worker": f"digits-worker-{i}", "cause": "Killed", "recoveredAt": at(22)} for i in range(3)
    ]
    took = [{**loss, "recoveryS": 12.0 - i, "stepsRedone": 10} for i, loss in enumerate(lost)]
    scaled = {"at": at(20), "fromWorkers": 3, "toWorkers": 4, "phase": "Done", "doneAt": at(25), "recoveryS": 5.0}
    status = {"interruptions": took, "scalings": [scaled], "restarts": {"Killed": 3}, "stepsRedone": 10}
    first, *_ = totals_lines(found(generations=GROUPS, **status), AT + 51)
    assert first == "3 interruptions, 1 scaling: 15s until training went on, 10 steps done again"
    assert totals(found(**status), AT + 51).recovery_s == 12.0


def test_a_group_that_hung_did_not_move_forward_until_the_hang_was_found() -> None:
    hung = {**GROUPS[0], "lastStepAt": at(16)}
    progress = {"step": 120, "at": at(51)}
    lines = list(totals_lines(found(generations=[hung, GROUPS[1]], progress=progress, stepsRedone=10), AT + 51))
    assert lines[-1] == "training moved forward 67.0 % of 50s (goodput)"


@pytest.mark.parametrize(("phase", "when"), [("Running", "not yet"), ("Failed", "never")])
def test_a_loss_without_recovery_is_named_next_to_the_sum(phase: str, when: str) -> None:
    lost = [{"at": at(10), "worker": "digits-worker-1", "cause": "Killed"}]
    status = {"phase": phase, "interruptions": lost, "scalings": [], "restarts": {"Killed": 1}, "stepsRedone": 0}
    first, *_ = totals_lines(found(**status), AT + 20)
    assert first == f"1 interruption (1 {when} recovered from), 0 scalings: 0 steps done again"


def test_a_scaling_in_progress_has_no_known_duration() -> None:
    scaling = {"at": at(10), "fromWorkers": 3, "toWorkers": 4, "phase": "InProgress"}
    status = {"phase": "Running", "interruptions": [], "scalings": [scaling], "restarts": {}, "stepsRedone": 0}
    first, *_ = totals_lines(found(**status), AT + 20)
    assert first == "0 interruptions, 1 scaling (1 in progress): 0 steps done again"


def test_without_steps_there_is_no_goodput() -> None:
    quiet = found(interruptions=[], scalings=[], restarts={"Completed": 1})
    assert list(totals_lines(quiet, AT + 60)) == ["digits: no interruptions, no scalings"]
    assert totals(quiet, AT + 60).goodput_share is None


def test_who_changed_a_job_is_in_its_history_and_in_that_of_the_machine(run: Run, local_cluster: LocalCluster) -> None:
    local_cluster.create_job(shell_job("digits", "sleep 60", 1, maxReplicas=3))
    assert run("scale", "digits", "2").code == 0
    change = json.loads(run("history", "digits", "-o", "json").out)["changes"][0]
    assert (change["verb"], change["fields"][0]["after"]) == ("scale", "2")
    assert change["by"].endswith(" (login)")
    assert change["client"].startswith("elasticctl ")
    assert "scale\tspec.replicaSpecs.Worker.replicas 1 -> 2" in run("history", "digits").out
    assert "by " + change["by"] in run("events", "digits").out
    assert run("delete", "digits", "-y").code == 0
    of_machine = json.loads(run("history", "-o", "json").out)["changes"]
    assert [(line["verb"], line["name"], line["outcome"]) for line in of_machine] == [
        ("scale", "digits", "done"),
        ("delete", "digits", "done"),
    ]
    assert "delete\tdigits\tlocal/default" in run("history").out
