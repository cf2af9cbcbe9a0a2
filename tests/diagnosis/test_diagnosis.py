"""Why a job is as it is: each rule on a job that it is about, and none on any job at all raises."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.spec import ElasticJob, Policy
from elasticctl.diagnosis import RULES, Case, Finding, Severity, diagnose
from tests.support.job_samples import AT, FAILED, at, job

NOW = AT + 60.0
QUIET: dict[str, Any] = {"interruptions": [], "scalings": [], "restarts": {}}
LAUNCH = ["elasticctl-launch", "--nproc-per-node", "1", "--"]


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = manifest["spec"]["replicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    return found


def case(*pods: dict[str, Any], now: float = NOW, holders: dict[str, int] | None = None, **status: Any) -> Case:
    manifest = job(**{**QUIET, **status})
    container(manifest)["command"] = LAUNCH
    return Case(ElasticJob.from_manifest(manifest), pods, now, holders or {})


def pod(index: int = 0, phase: str = "Pending", **status: Any) -> dict[str, Any]:
    metadata = {"name": f"digits-worker-{index}", "creationTimestamp": at(50)}
    return {"metadata": metadata, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str, index: int = 0) -> dict[str, Any]:
    return pod(index, containerStatuses=[{"state": {"waiting": {"reason": reason, "message": message}}}])


def first(of: Case) -> Finding:
    return diagnose(of)[0]


def named(of: Case) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(of)}


def test_a_job_that_trains_is_fine() -> None:
    (only,) = diagnose(case())
    assert (only.rule, only.severity, only.decisive) == ("training", Severity.INFO, False)
    assert only.text == (
        "It is training: 4 workers are running, of 4 wanted; step 120 of 560; 8,123 samples/s; the last checkpoint,"
        " of step 100, is 3.0s old."
    )


def test_a_worker_that_runs_outside_the_group_is_starting() -> None:
    workers = [{"index": i, "name": f"digits-worker-{i}", "node": "n", "phase": "Running"} for i in range(4)]
    members = [worker["name"] for worker in workers[:3]]
    formed = {"generation": 3, "workers": members, "formedAt": at(40), "firstStepAt": at(41)}
    (only,) = diagnose(case(workers=workers, generations=[formed]))
    assert only.text.startswith("It is training: 3 workers are in the group and 1 starting, of 4 wanted; step 120 of")


def test_a_loss_that_is_not_a_number_is_a_finding_while_it_trains_and_after() -> None:
    lost = {"step": 120, "notFinite": {"loss": {"value": "NaN", "step": 81, "at": at(50)}}}
    found = named(case(progress=lost))["not-finite"]
    assert (found.severity, found.text) == (
        Severity.WARNING,
        "A metric is not a finite number: loss NaN since step 81.",
    )
    assert [step.command for step in found.mends] == ["elasticctl checkpoints list digits"]
    ended = case(phase="Succeeded", progress=lost, checkpoint={"step": 80})
    assert [finding.rule for finding in diagnose(ended)] == ["succeeded", "not-finite"]
    assert diagnose(ended)[1].mends[-1].command == "elasticctl rerun digits --from-checkpoint latest"
    assert "not-finite" not in named(case(progress={"step": 120, "metrics": {"loss": 0.5}}))


def test_commands_quote_what_others_wrote() -> None:
    hostile = {**FAILED["firstFailure"], "worker": "digits-worker-0;reboot"}
    found = first(case(**{**FAILED, "firstFailure": hostile, "lastFailure": hostile}))
    assert found.mends[0].command == "elasticctl logs digits --worker '0;reboot'"
    manifest = job(**QUIET)
    manifest["metadata"]["annotations"] = {"elastic.pytorch.org/moving-to": "a;reboot s3://bucket/x"}
    moving = named(Case(ElasticJob.from_manifest(manifest), (), NOW))["moving"]
    assert moving.mends[0].command == "elasticctl move digits --to 'a;reboot'"


def test_a_failed_job_names_rank_code_error_lines_and_budget() -> None:
    found = first(case(**FAILED))
    assert found.text == (
        "It failed: rank 1 of worker-1 ended with exit code 1: ValueError: bad learning rate. That was failure 4;"
        " --backoff-limit allows 3."
    )
    assert found.details == ("Traceback (most recent call last):", "ValueError: bad learning rate")
    assert [step.command for step in found.mends] == [
        "elasticctl logs digits --worker 1",
        "elasticctl rerun digits --from-checkpoint latest",
    ]


def test_without_a_checkpoint_it_cannot_continue() -> None:
    assert first(case(**FAILED, checkpoint={})).mends[-1].command == "elasticctl rerun digits"
    assert first(case(phase="Cancelled", checkpoint={})).mends[0].command == "elasticctl rerun digits"


@pytest.mark.parametrize(
    ("failure", "text"),
    [
        ({"signal": "SIGSEGV", "exitCode": 139, "rank": 0}, "rank 0 of worker-1 was ended by SIGSEGV"),
        ({"error": "OOMKilled", "exitCode": 137}, "worker-1 was killed because it used more memory than allowed"),
        ({"error": "ApplicationError", "exitCode": 7}, "worker-1 ended with exit code 7."),
        ({}, "worker-1 failed."),
        (
            {"error": "the group hangs: rank 1 has been in x for 5m00s", "exitCode": 1},
            "It failed: the group hangs: rank",
        ),
    ],
)
def test_how_the_first_worker_failed(failure: dict[str, Any], text: str) -> None:
    failure_of = {**FAILED, "firstFailure": {"worker": "digits-worker-1", **failure}}
    assert text in first(case(**failure_of)).text


@pytest.mark.parametrize(
    ("reason", "text"),
    [
        ("RestartPolicyNever", "Its restart policy, Never, allows no failure."),
        ("PermanentExitCode", "With the restart policy ExitCode, exit codes below 128 are final."),
    ],
)
def test_a_policy_can_be_what_failed_it(reason: str, text: str) -> None:
    assert first(case(**{**FAILED, "reason": reason})).text.endswith(text)


def test_a_deadline_is_no_failure_of_the_script() -> None:
    found = first(case(phase="Failed", reason="DeadlineExceeded"))
    assert found.rule == "deadline-exceeded"
    assert "at step 120 of 560; its last checkpoint is from step 100." in found.text
    assert found.mends[0].command == (
        "elasticctl rerun digits --from-checkpoint latest --set spec.activeDeadlineSeconds=SECONDS"
    )


def test_a_success_counts_its_interruptions() -> None:
    found = first(case(phase="Succeeded", completionTime=at(100), interruptions=job()["status"]["interruptions"]))
    assert found.text == "It succeeded after 1m39s, over 1 interruption."


def test_a_suspended_job_says_how_to_go_on() -> None:
    found = first(case(phase="Suspended"))
    assert (found.rule, found.mends[0].command) == ("suspended", "elasticctl resume digits")


@pytest.mark.parametrize("phase", ["Suspended", "Cancelled", "Failed"])
def test_workers_that_still_clean_up_are_named(phase: str) -> None:
    ending = pod(phase="Running")
    ending["metadata"]["deletionTimestamp"] = at(85)
    ended = pod(1, phase="Succeeded")
    ended["metadata"]["deletionTimestamp"] = at(85)
    found = named(case(ending, ended, phase=phase))
    assert found["cleaning-up"].text == "worker-0 has been asked to end and still cleans up, and may take 25s more."
    assert "cleaning-up" not in named(case(ended, phase=phase))
    assert "cleaning-up" not in named(case(ending))


@pytest.mark.parametrize(
    ("reason", "message", "rule", "text"),
    [
        ("NotAdmitted", "waits.", "waiting-for-admission", "It waits. Its progress is kept: step 100."),
        ("Suspended", "on request", "suspended", "It was suspended on request. Its progress is kept: step 100."),
    ],
)
def test_a_job_in_a_queue_quotes_kueue_unless_its_owner_suspended_it(
    reason: str, message: str, rule: str, text: str
) -> None:
    manifest = job(**QUIET, phase="Suspended", reason=reason, message=message)
    manifest["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    manifest["spec"]["suspend"] = True
    found = first(Case(ElasticJob.from_manifest(manifest), (), NOW, {}))
    assert (found.rule, found.text) == (rule, text)


def test_workers_that_wait_for_their_share_are_not_starting() -> None:
    share = {"workers": 0, "pool": "t4", "message": "waits for 2 of 8 T4"}
    waits = case(phase="Pending", progress={}, share=share, now=NOW + 600)
    assert [finding.rule for finding in diagnose(waits)] == ["waiting-for-its-share"]
    granted = case(phase="Pending", progress={}, share={"workers": 2, "since": at(650)}, now=AT + 655)
    assert first(granted).text == "Its workers are starting: 0 of at least 1 run."


@pytest.mark.parametrize(
    "status",
    [
        {"conditions": [{"type": "Restarting", "status": "True", "lastTransitionTime": at(654)}]},
        {"conditions": [{"type": "Suspended", "status": "False", "lastTransitionTime": at(654)}]},
        {"interruptions": [{"at": at(654), "worker": "digits-worker-0", "uid": "u", "cause": "Preempted"}]},
        {"workers": [{"name": "digits-worker-0", "uid": "u", "cause": "Preempted", "endedAt": at(654)}]},
    ],
)
def test_how_long_workers_take_to_start_is_counted_from_when_they_could(status: dict[str, Any]) -> None:
    found = first(case(phase="Restarting", now=AT + 655, **status))
    assert (found.rule, found.severity) == ("starting", Severity.INFO)


def test_a_worker_that_waited_for_a_place_starts_when_it_has_one() -> None:
    placed = {"type": "PodScheduled", "status": "True", "lastTransitionTime": at(650)}
    found = first(case(pod(conditions=[placed]), phase="Pending", now=AT + 655))
    assert (found.rule, found.severity) == ("starting", Severity.INFO)
    late = first(case(pod(conditions=[placed]), phase="Pending", now=AT + 730))
    assert late.text == "Its workers are starting: 0 of at least 1 run. 1m20s so far."


def test_a_storage_that_accepts_nothing_is_a_warning() -> None:
    activity = {
        "doing": "training",
        "since": at(1),
        "detail": "nothing is saved: file:///state: No space left on device",
    }
    found = named(case(activity=activity))["not-saved"]
    assert (found.severity, found.text) == (
        Severity.WARNING,
        "It is still training, but nothing is saved: file:///state: No space left on device;"
        " the last checkpoint is from step 100.",
    )


def test_a_container_that_is_being_created_is_no_problem() -> None:
    found = first(case(waiting("ContainerCreating", ""), phase="Pending"))
    assert (found.rule, found.severity) == ("starting", Severity.INFO)
    late = first(case(waiting("ContainerCreating", ""), phase="Pending", now=NOW + 100))
    assert (late.severity, late.mends[0].command) == (Severity.WARNING, "elasticctl events digits")


def test_a_pause_after_failures_says_until_when_and_why() -> None:
    failed = {**FAILED, "phase": "Restarting", "failures": 2, "backoff": {"failures": 2, "until": at(68)}}
    found = first(case(**failed))
    assert found.rule == "back-off"
    killed = case(**failed | {"firstFailure": None, "failures": 0})
    assert "ended right after they started twice in a row; it tries" in first(killed).text
    assert "failed twice in a row (rank 1 of worker-1 ended with exit code 1" in found.text
    assert "tries again in 8.0s. 2 of 3 allowed failures used." in found.text
    assert first(case(**failed, now=AT + 70)).rule == "failing"


def test_workers_that_have_not_met_import_first() -> None:
    unmet = case(pod(0, "Running"), progress={}, checkpoint={}, now=AT + 5)
    assert (first(unmet).rule, first(unmet).severity) == ("joining", Severity.INFO)
    assert first(case(pod(0, "Running"), progress={}, checkpoint={}, now=AT + 90)).severity == Severity.WARNING


def test_workers_with_a_setup_may_be_at_it() -> None:
    manifest = job(**QUIET, progress={}, checkpoint={})
    container(manifest)["command"] = LAUNCH
    container(manifest).setdefault("env", []).append({"name": "ELASTICCTL_SETUP", "value": "pip install x"})
    found = first(Case(ElasticJob.from_manifest(manifest), (pod(0, "Running"),), AT + 5))
    assert found.text == (
        "1 worker is running and about to join, still running `pip install x`, as --setup says, or importing modules."
    )


def group(**fields: Any) -> dict[str, Any]:
    return {"generation": 3, "workers": ["digits-worker-0"], "formedAt": at(40), **fields}


def test_a_group_without_a_step_is_watched() -> None:
    assert first(case(generations=[group()])).rule == "before-the-first-step"
    late = first(case(generations=[group()], now=AT + 500))
    assert late.severity == Severity.WARNING
    slow_before = group(generation=2, formedAt=at(-1000), firstStepAt=at(-400))
    usual = first(case(generations=[slow_before, group()], now=AT + 500))
    assert (usual.rule, usual.severity) == ("before-the-first-step", Severity.INFO)


def test_a_script_that_reports_nothing_is_no_problem() -> None:
    """It may train for hours; a script without our library reports nothing."""
    silent = case(pod(0, "Running"), generations=[group()], progress={}, checkpoint={}, now=AT + 50_000)
    found = {finding.rule: finding for finding in diagnose(silent)}
    assert "before-the-first-step" not in found
    assert (found["says-nothing"].severity, found["says-nothing"].decisive) == (Severity.INFO, False)
    assert "first step" not in " ".join(finding.text for finding in found.values())
    assert first(silent).rule != "before-the-first-step"
    assert found["training"].text.startswith("It is running: ")


def test_the_activity_of_the_group_is_reported() -> None:
    doing = {"doing": "first step", "since": at(100)}
    before = group(generation=2, formedAt=at(0), firstStepAt=at(30), resumedStep=0)
    found = first(case(generations=[before, group()], activity=doing, now=AT + 340))
    assert "first step (4m00s so far; last time 30s)" in found.text
    stuck = {"doing": "hung", "since": at(100), "detail": "rank 3 stands in next_data"}
    stepping = group(firstStepAt=at(50), resumedStep=100)
    found = first(case(generations=[stepping], activity=stuck, now=AT + 340))
    assert (found.rule, found.severity) == ("hung", Severity.WARNING)
    assert "hung for 4m00s: rank 3 stands in next_data" in found.text
    exports = case(generations=[stepping], activity={"doing": "exporting", "since": at(100)}, now=AT + 5_000)
    assert "standstill" not in [finding.rule for finding in diagnose(exports)]
    assert "exporting (1h21m so far)" in " ".join(finding.text for finding in diagnose(exports))


def test_failures_are_counted_since_the_last_checkpoint() -> None:
    fresh = first(case(failures=7, failuresSinceCommit=2, restarts={}))
    assert "2 of 3 allowed failures used since the last checkpoint, 1 left." in fresh.text
    assert fresh.severity == Severity.WARNING
    ended = first(case(phase="Failed", failures=7, failuresSinceCommit=4, firstFailure={"worker": "digits-worker-0"}))
    assert "That was failure 4 since the last checkpoint; --backoff-limit allows 3" in ended.text
    unsaved = named(case(failures=2, failuresSinceCommit=2, checkpoint={}))["failing"]
    assert "2 of 3 allowed failures used, 1 left." in unsaved.text


@pytest.mark.parametrize(
    "error", ["MemoryError: Unable to allocate 12 GiB", "torch.OutOfMemoryError: CUDA out of memory. Tried to ..."]
)
def test_advice_for_a_script_that_runs_out_of_memory(error: str) -> None:
    """The same batch would run out of it again. The message may end with a full stop of its own."""
    failure = {"worker": "digits-worker-0", "rank": 0, "exitCode": 1, "error": f"{error}."}
    found = first(case(phase="Failed", reason="BackoffLimitExceeded", failures=4, firstFailure=failure, checkpoint={}))
    assert f"{error}. That was failure 4" in found.text
    assert (found.mends[-1].advice, found.mends[-1].command) == (
        "with a smaller batch or more memory, run it again",
        "elasticctl rerun digits",
    )


def test_the_last_failure_ended_the_job() -> None:
    """The first may have been another one, days and checkpoints ago."""
    last = {
        "worker": "digits-worker-0",
        "rank": 0,
        "exitCode": 7,
        "error": "OSError: disk",
        "lastLines": ["it was full"],
    }
    ended = case(**FAILED, failuresSinceCommit=4, lastFailure=last)
    assert first(ended).text.startswith("It failed: rank 0 of worker-0 ended with exit code 7: OSError: disk. That was")
    assert first(ended).details == ("it was full",)


def test_a_standstill_is_judged_by_the_steps_before_it() -> None:
    stepping = group(firstStepAt=at(50), resumedStep=100)
    steps = {"step": 121, "at": at(60)}
    assert "standstill" not in named(case(generations=[stepping], progress=steps, now=AT + 100))
    late = case(generations=[stepping], progress=steps, now=AT + 200)
    text = "No step for 2m20s; the last was 121. Before, a step took 0.5s."
    assert named(late)["standstill"].text == text
    limited = replace(late, job=replace(late.job, policy=Policy(hang_timeout_seconds=1800)))
    assert named(limited)["standstill"].text == (
        f"{text} If nothing moves for 30m00s, it restarts from the last checkpoint (--hang-timeout)."
    )


def test_failures_say_what_is_left_of_the_budget() -> None:
    some = {"failures": 1, "firstFailure": FAILED["firstFailure"]}
    found = named(case(**some))["failing"]
    assert found.text.startswith(
        "Its script has failed once; last, rank 1 of worker-1 ended with exit code 1: ValueError"
    )
    assert found.severity == Severity.WARNING
    assert found.text.endswith("1 of 3 allowed failures used, 2 left.")
    last = named(case(**{**some, "failures": 3}))["failing"]
    assert last.severity == Severity.ERROR
    assert last.text.endswith("3 of 3 allowed failures used, one more ends the job.")


def test_memory_and_standing_still_have_rules_of_their_own() -> None:
    found = named(case(failures=1, restarts={"OOMKilled": 1, "Stuck": 1, "Unresponsive": 1}))
    assert "1 worker used more memory than allowed" in found["out-of-memory"].text
    assert "failing" not in found
    assert "2 workers held up the group" in found["stuck"].text


def test_interruptions_of_the_last_hour_and_their_cost() -> None:
    lost = {"at": at(55), "worker": "digits-worker-2", "cause": "NodeLost"}
    known = job()["status"]["interruptions"][0]
    found = named(case(interruptions=[known, lost]))["interrupted"]
    assert found.text == (
        "2 interruptions in the last hour (NodeLost 1, Preempted 1): 2.5s until training went on, 12 steps done again;"
        " 1 not yet recovered from."
    )
    assert "interrupted" not in named(case(interruptions=[known], now=AT + 7200))
    together = [{**known, "worker": f"digits-worker-{i}"} for i in range(3)]
    assert named(case(interruptions=together))["interrupted"].text.endswith(
        "): 2.5s until training went on, 12 steps done again."
    )


def test_workers_that_are_killed_again_and_again_may_lack_memory() -> None:
    killed = [{"at": at(i), "worker": f"digits-worker-{i}", "cause": "Killed"} for i in range(3)]
    assert "killed" not in named(case(interruptions=killed[:2]))
    assert "perhaps the machine ran out of memory" in named(case(interruptions=killed))["killed"].text


def test_a_late_checkpoint_is_judged_by_the_usual_interval() -> None:
    """6 commits from second 50 to 170: one in 20 s. It is late after a minute."""
    began = {"generations": [group(generation=1, firstStepAt=at(50))], "checkpoint": {**SAVED, "at": at(170)}}
    fresh = {**began, "progress": {"step": 300, "at": at(220)}}
    assert "stale-checkpoint" not in named(case(**fresh, now=AT + 220))
    stale = {**began, "progress": {"step": 300, "at": at(290)}}
    found = named(case(**stale, now=AT + 290))["stale-checkpoint"]
    assert "is 2m00s old; there used to be one every 20s." in found.text
    assert "would cost 200 steps" in found.text


SAVED: dict[str, Any] = {"step": 100, "committed": 6}


def test_no_checkpoint_at_all() -> None:
    training = {"generations": [group(generation=1, firstStepAt=at(0))], "checkpoint": {}}
    late = {"progress": {"step": 300, "at": at(1000)}, "now": AT + 1000}
    assert "No checkpoint has been committed in 16m40s" in named(case(**training, **late))["no-checkpoint"].text
    assert "no-checkpoint" not in named(case(**training))


def test_without_storage_nothing_is_kept() -> None:
    manifest = job(**QUIET, checkpoint={})
    container(manifest).update(command=LAUNCH, env=[])
    found = diagnose(Case(ElasticJob.from_manifest(manifest), (), NOW))
    assert "no-storage" in {finding.rule for finding in found}


def test_a_script_that_reports_nothing_starts_over() -> None:
    groups = [{"generation": n + 1, "openedAt": at(100 * n), "formedAt": at(100 * n + 10)} for n in range(3)]
    silent: dict[str, Any] = {"progress": {}, "checkpoint": {}}
    found = named(case(generations=groups, **silent))["begun-again"]
    assert "3m00s have been repeated so far. FIX: train with Run" in found.text
    assert "begun-again" not in named(case(generations=groups[:1], **silent))
    assert "begun-again" not in named(case(**FAILED, generations=groups, **silent)), "it may not have got that far"
    assert "begun-again" not in named(case(generations=groups, progress={"step": 3}, checkpoint={}))
    assert "begun-again" not in named(case(generations=groups, progress={}, checkpoint={"step": 3}))


def test_a_launcher_programs_repeated_work_is_not_judged() -> None:
    groups = [
        {"generation": n + 1, "workers": ["a-1", "a-0"], "openedAt": at(100 * n), "formedAt": at(100 * n + 10)}
        for n in range(3)
    ]
    manifest = job(**{**QUIET, "generations": groups, "progress": {}, "checkpoint": {}})
    container(manifest)["command"] = ["elasticctl-launch", "--launcher", "--", "mpirun", "x"]
    found = named(Case(ElasticJob.from_manifest(manifest), (), NOW, {}))
    assert "begun-again" not in found
    assert found["says-nothing"].text.endswith(
        "The launcher program, on a-1, starts its ranks: only its output shows how far they are."
    )


def test_steps_done_again_matter_from_one_in_twenty_on() -> None:
    assert "steps-done-again" in named(case(stepsRedone=12))
    assert "steps-done-again" not in named(case(stepsRedone=6))


def test_rules_are_about_one_thing_each() -> None:
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert all(rule.__doc__ for rule in RULES)
