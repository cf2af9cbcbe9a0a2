"""What ends cost: the restart budget, the pause before the next attempt, whose fault it was."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.spec import ElasticJob, PodPhase, Policy, RestartPolicy
from elasticctl.api.status import CheckpointStatus, GroupGeneration, Phase, RankFailure, RestartBackoff
from elasticctl_controller.core.reconcile import reconcile
from tests.support.controller.samples import (
    NOW,
    a_job,
    a_pod,
    a_running_job,
    a_step,
    an_end,
    created,
    observe,
    termination_message,
)


def test_an_application_failure_waits_for_the_backoff():
    job, _ = a_step(a_running_job(), [a_pod(0), an_end(1, 1, message=termination_message("application")), a_pod(2)])
    assert job.status.failures == 1
    job, decision = a_step(job, [a_pod(0), a_pod(2)], NOW + 0.25)
    assert created(decision) == []
    assert decision.requeue_s == 0.75
    assert created(a_step(job, [a_pod(0), a_pod(2)], NOW + 1)[1]) == [1]


def test_the_pause_doubles_up_to_its_limit_and_starts_over_after_a_long_life():
    job = a_running_job(policy=Policy(backoff_seconds=2.0, backoff_max_seconds=7.0), backoff_limit=100)
    pauses, now = [], NOW
    for lived_s in (5, 5, 5, 5, 500):
        start = Timestamp(now)
        now += lived_s
        worker = an_end(1, 1, uid=f"uid-{now}", started_at=start, finished_at=Timestamp(now))
        job, _ = a_step(job, [a_pod(0), worker, a_pod(2)], now)
        assert job.status.backoff.until is not None
        pauses.append(job.status.backoff.until - now)
        now = job.status.backoff.until
    assert pauses == [2, 4, 7, 7, 2]


def test_a_clock_that_is_set_back_does_not_prolong_the_pause():
    """The pause was begun by a clock that was an hour ahead."""
    job, _ = a_step(a_running_job(backoff_limit=100), [a_pod(0), a_pod(1)], now=NOW + 3600)
    assert job.status.restarts == {"Deleted": 1}
    job = replace(job, status=replace(job.status, backoff=RestartBackoff(failures=1, until=Timestamp(NOW + 3601))))
    job, decision = a_step(job, [a_pod(0), a_pod(1)])
    assert created(decision) == [2]
    job, decision = a_step(job, [a_pod(0), an_end(1, 1, message=termination_message("application"))])
    assert job.status.backoff.until == NOW + 60
    assert job.status.reason != "BackOff"


def test_a_row_of_failures_beyond_all_counting_pauses_for_the_longest_time():
    status = replace(a_running_job().status, backoff=RestartBackoff(failures=10**6, until=Timestamp(NOW + 1)))
    job = replace(a_running_job(backoff_limit=100), status=status)
    job, _ = a_step(job, [a_pod(0), an_end(1, 1, message=termination_message("application")), a_pod(2)])
    assert job.status.backoff.until == NOW + 60


def test_workers_that_fail_together_lengthen_the_pause_once():
    job = a_running_job()
    oom: dict[str, Any] = {"reason": "OOMKilled"}
    job, _ = a_step(job, [an_end(0, 137, **oom), an_end(1, 137, **oom), an_end(2, 137, **oom)])
    assert job.status.failures == 3
    assert (job.status.backoff.failures, job.status.backoff.until) == (1, NOW + 1)


def test_one_fault_in_all_workers_is_counted_once():
    ends = [an_end(i, 1, message=termination_message("application")) for i in range(3)]
    job, _ = a_step(a_running_job(), ends)
    assert job.status.restarts == {"ApplicationError": 1, "Collateral": 2}
    assert job.status.failures == 1


def test_a_survivor_that_fails_soon_after_a_loss_or_a_reduction_is_not_blamed():
    failed = an_end(2, 1, finished_at=Timestamp(NOW + 5))
    job, _ = a_step(a_running_job(), [a_pod(0), an_end(1, 137), a_pod(2)])
    job, _ = a_step(job, [a_pod(0), failed], NOW + 5)
    assert job.status.restarts == {"Killed": 1, "Collateral": 1}
    job, _ = a_step(replace(a_running_job(), desired=2), [a_pod(1), a_pod(2), a_pod(3)])
    job, _ = a_step(job, [a_pod(1), failed], NOW + 5)
    assert job.status.restarts == {"Deleted": 1, "ScaledIn": 1, "Collateral": 1}


@pytest.mark.parametrize("cause", ["preempted", "collateral"])
def test_a_worker_that_was_taken_away_is_replaced_immediately(cause):
    job, _ = a_step(
        a_running_job(backoff_limit=0), [a_pod(0), an_end(1, 1, message=termination_message(cause)), a_pod(2)]
    )
    assert (job.status.failures, job.status.backoff.until) == (0, None)
    assert created(a_step(job, [a_pod(0), a_pod(2)])[1]) == [1]


def test_workers_that_are_killed_again_and_again_right_after_their_start_are_slowed_down():
    job = a_running_job(backoff_limit=0)
    pauses, now = [], NOW
    for _ in range(3):
        worker = an_end(1, 137, uid=f"uid-{now}", started_at=Timestamp(now), finished_at=Timestamp(now + 3))
        now += 3
        job, _ = a_step(job, [a_pod(0), worker, a_pod(2)], now)
        assert job.status.backoff.until is not None
        pauses.append(job.status.backoff.until - now)
        now = job.status.backoff.until
    assert pauses == [1, 2, 4]
    assert job.status.restarts == {"Killed": 3, "Deleted": 1}
    assert job.status.phase is Phase.RUNNING


def killed_in_a_row(ends: int, signs: Callable[[float], dict[str, Any]] = lambda _: {}, **end: Any) -> list[float]:
    """The pauses after so many workers that end 3 s after their start; `signs(now)` is what was seen by then."""
    job = a_running_job(backoff_limit=100)
    pauses, now = [], NOW
    for _ in range(ends):
        how = {"uid": f"uid-{now}", "started_at": Timestamp(now), "finished_at": Timestamp(now + 3), **end}
        now += 3
        observed = observe(pods=(a_pod(0), an_end(1, 137, **how), a_pod(2)), **signs(now))
        job = replace(job, status=reconcile(job, observed, now).status)
        assert job.status.backoff.until is not None
        pauses.append(job.status.backoff.until - now)
        now = job.status.backoff.until
    return pauses


def stepped(now: float, worker: int = 1) -> dict[str, Any]:
    """A generation that this worker was in made a step a second ago."""
    workers = ("digits-worker-0", f"digits-worker-{worker}")
    formed, step = Timestamp(now - 2), Timestamp(now - 1)
    return {"generations": (GroupGeneration(int(now), workers, formed_at=formed, first_step_at=step),)}


def committed(now: float) -> dict[str, Any]:
    return {"checkpoint": CheckpointStatus(step=int(now), at=Timestamp(now - 1))}


def test_steps_in_between_begin_a_new_series():
    assert killed_in_a_row(8, stepped) == [1] * 8
    assert killed_in_a_row(4, lambda now: stepped(now, worker=2)) == [1, 2, 4, 8], "others' steps prove nothing"


def test_a_failure_that_counts_begins_a_new_series_after_a_new_checkpoint_only():
    assert killed_in_a_row(4, stepped, message=termination_message("application")) == [1, 2, 4, 8]
    assert killed_in_a_row(4, committed, message=termination_message("application")) == [1] * 4


@pytest.mark.parametrize("taken", [{"message": termination_message("preempted")}, {"disruption_target": True}])
def test_what_the_platform_takes_away_does_not_lengthen_the_pause(taken):
    assert killed_in_a_row(8, **taken) == [1] * 8


def test_a_pod_that_no_node_takes_is_slowed_down_too():
    refused = a_pod(
        1, PodPhase.FAILED, started_at=None, created_at=Timestamp(NOW - 1), reason="UnexpectedAdmissionError"
    )
    job, _ = a_step(a_running_job(), [a_pod(0), refused, a_pod(2)])
    assert job.status.backoff.until == NOW + 1


def test_a_script_that_crashes_immediately_fails_the_job_after_its_budget():
    job, now = a_job(desired=1, max=1, backoff_limit=2), NOW
    runs = 0
    while not job.status.phase.terminal:
        job, decision = a_step(job, [], now)
        runs += len(created(decision))
        start, now = now, now + 2
        if created(decision):
            message = termination_message("application", error=f"ValueError: attempt {runs}")
            worker = an_end(0, 1, uid=f"uid-{runs}", message=message, started_at=start, finished_at=Timestamp(now))
            job, _ = a_step(job, [worker], now)
    assert runs == 3
    assert (job.status.phase, job.status.reason) == (Phase.FAILED, "BackoffLimitExceeded")
    assert job.status.message == (
        "worker digits-worker-0 (rank 2, exit code 1): ValueError: attempt 3; failures: 3, backoffLimit: 2"
    )
    assert job.status.first_failure is not None
    assert job.status.first_failure.error == "ValueError: attempt 1"
    assert job.status.first_failure.last_lines == ("a", "b")
    assert job.status.conditions[-1].type == "Failed"


def test_a_failure_without_a_report_is_described_from_its_pod():
    job, _ = a_step(a_running_job(backoff_limit=0), [a_pod(0), an_end(1, 3, message="first\nboom\n"), a_pod(2)])
    assert job.status.message == "worker digits-worker-1 (exit code 3): boom; failures: 1, backoffLimit: 0"
    assert job.status.completion_time == NOW
    assert job.status.first_failure is not None
    assert job.status.first_failure.last_lines == ("first", "boom")


def test_restart_policy_never_fails_at_the_first_counted_failure_only():
    job = a_running_job(restart_policy=RestartPolicy.NEVER)
    job, _ = a_step(job, [a_pod(0), an_end(1, 137), a_pod(2)])
    assert job.status.phase is Phase.RUNNING
    job, _ = a_step(job, [a_pod(0), an_end(2, 137, reason="OOMKilled")])
    assert (job.status.phase, job.status.reason) == (Phase.FAILED, "RestartPolicyNever")


@pytest.mark.parametrize(
    ("code", "phase"), [(1, Phase.FAILED), (127, Phase.FAILED), (128, Phase.RUNNING), (139, Phase.RUNNING)]
)
def test_restart_policy_exit_code_distinguishes_permanent_failures(code, phase):
    job = a_running_job(restart_policy=RestartPolicy.EXIT_CODE)
    job, _ = a_step(job, [a_pod(0), an_end(1, code), a_pod(2)])
    assert job.status.phase is phase


def test_how_long_workers_ran_is_added_up_once_by_the_capacity_they_asked_for():
    spot = {"spec": {"nodeSelector": {"cloud.google.com/gke-spot": "true"}}}
    start = Timestamp(NOW - 100)
    pods = [a_pod(index, started_at=start) for index in range(3)]
    job, _ = a_step(a_job(template=spot), pods)
    assert job.status.worker_seconds == {}
    lost = an_end(1, 137, started_at=start, finished_at=Timestamp(NOW + 20))
    job, _ = a_step(job, [pods[0], lost, pods[2]], NOW + 30)
    job, _ = a_step(job, [pods[0], lost, pods[2]], NOW + 40)
    assert job.status.worker_seconds == {"spot": 120.0}
    job, _ = a_step(job, [pods[0], pods[2]], NOW + 50)
    job, _ = a_step(job, [pods[0]], NOW + 60)
    assert job.status.worker_seconds == {"spot": 280.0}


def test_workers_that_are_stopped_after_the_end_have_run_too():
    start = Timestamp(NOW - 10)
    cancelled = replace(a_running_job(), cancel=True)
    job, _ = a_step(cancelled, [a_pod(index, started_at=start) for index in range(3)])
    assert job.status.phase is Phase.CANCELLED
    ended = [an_end(i, 143, started_at=start, finished_at=Timestamp(NOW + 10)) for i in range(3)]
    job, _ = a_step(job, ended, NOW + 10)
    assert job.status.worker_seconds == {"unknown": 60.0}


# Generations whose ranks failed and were started again by the same workers


def broken(number: int, at: float, *, verdict: str = "application") -> GroupGeneration:
    failure = RankFailure(verdict, "digits-worker-1", 1, 3, error=f"ValueError: {number}", at=Timestamp(at))
    return GroupGeneration(number, ("digits-worker-0", "digits-worker-1"), failure=failure)


def a_pass(job: ElasticJob, *generations: GroupGeneration, committed: tuple[int, float] | None = None) -> ElasticJob:
    checkpoint = None if committed is None else CheckpointStatus(step=committed[0], at=Timestamp(committed[1]))
    observed = observe(pods=(a_pod(0), a_pod(1), a_pod(2)), generations=generations, checkpoint=checkpoint)
    return replace(job, status=reconcile(job, observed, NOW).status)


def test_ranks_that_are_started_again_count_once_like_a_worker_that_ended():
    job = a_running_job(backoff_limit=3)
    for _ in range(3):
        job = a_pass(job, broken(1, NOW - 9), broken(2, NOW - 5, verdict="collateral"), GroupGeneration(3))
    status = job.status
    assert (status.failures, status.failures_since_commit, status.phase) == (2, 2, Phase.RUNNING)
    assert status.restarts == {"ApplicationError": 1, "Collateral": 1}
    assert [(item.worker, item.message, item.exit_code, item.generation) for item in status.interruptions] == [
        ("digits-worker-1", "ValueError: 1", 3, 1), ("digits-worker-1", "ValueError: 2", 3, 2),
    ]  # fmt: skip
    assert status.first_failure is not None
    assert status.first_failure.error == "ValueError: 1"


def test_a_new_checkpoint_refills_the_budget_and_an_old_one_does_not():
    job = a_pass(a_running_job(backoff_limit=3), broken(1, NOW - 9), committed=(10, NOW - 20))
    assert job.status.failures_since_commit == 1
    job = a_pass(job, broken(2, NOW - 7), broken(3, NOW - 3), committed=(20, NOW - 5))
    assert (job.status.failures, job.status.failures_since_commit) == (3, 1), "one of the two came after it"
    job = a_pass(job, broken(4, NOW - 1), committed=(15, NOW))
    assert job.status.failures_since_commit == 2


def test_the_last_failure_of_the_budget_names_the_rank_and_its_error():
    job = a_pass(a_running_job(backoff_limit=1), broken(1, NOW - 9))
    last = an_end(1, 3, message=termination_message("application"))
    job, _ = a_step(job, [a_pod(0), last, a_pod(2)])
    assert (job.status.phase, job.status.reason) == (Phase.FAILED, "BackoffLimitExceeded")
    assert "rank 2" in job.status.message
    assert "ValueError: no" in job.status.message
    assert job.status.restarts == {"ApplicationError": 2}


def test_the_last_failure_is_kept_next_to_the_first():
    job = a_pass(a_running_job(backoff_limit=1), broken(1, NOW - 9))
    job, _ = a_step(job, [a_pod(0), an_end(1, 3, message=termination_message("application")), a_pod(2)])
    first, last = job.status.first_failure, job.status.last_failure
    assert first is not None
    assert last is not None
    assert (first.error, last.error) == ("ValueError: 1", "ValueError: no")
    assert [item.message for item in job.status.interruptions] == ["ValueError: 1", "ValueError: no"]


def test_history_shows_how_a_rank_without_an_error_ended():
    killed = RankFailure("killed", "digits-worker-1", 1, 137, "SIGKILL", at=Timestamp(NOW - 3))
    silent = RankFailure("application", "digits-worker-1", 1, 3, at=Timestamp(NOW - 2))
    job = a_pass(a_running_job(), GroupGeneration(1, failure=killed), GroupGeneration(2, failure=silent))
    assert [item.message for item in job.status.interruptions] == ["ended by SIGKILL", "exit code 3"]


def test_an_error_that_another_try_cannot_help_fails_the_job():
    message = json.dumps({"verdict": "application", "error": "SyntaxError: invalid syntax", "permanent": True})
    job, _ = a_step(a_running_job(backoff_limit=9), [a_pod(0), an_end(1, 1, message=message), a_pod(2)])
    assert (job.status.phase, job.status.reason) == (Phase.FAILED, "PermanentError")
    assert "SyntaxError: invalid syntax" in job.status.message


def test_a_rank_that_killed_itself_counts_for_its_launcher_lives():
    message = json.dumps({"verdict": "application", "error": "killed by SIGKILL", "signal": "SIGKILL"})
    job, _ = a_step(a_running_job(backoff_limit=0), [a_pod(0), an_end(1, 137, message=message), a_pod(2)])
    assert (job.status.phase, job.status.reason) == (Phase.FAILED, "BackoffLimitExceeded")


def test_a_rank_that_the_kernel_killed_for_its_memory_is_named_as_that():
    failure = RankFailure("killed", "digits-worker-1", 1, 137, "SIGKILL", "out of memory", at=Timestamp(NOW - 3))
    job = a_pass(a_running_job(), GroupGeneration(1, failure=failure))
    assert (job.status.restarts, job.status.failures) == ({"OOMKilled": 1}, 1)


def test_a_node_that_is_not_there_is_not_tried_again_and_again():
    """A template may name one; a worker that had started there would be replaced immediately."""
    eager = Policy(backoff_seconds=0.0, backoff_max_seconds=0.0)
    job, now, pauses = a_job(desired=1, max=1, backoff_limit=0, policy=eager), NOW, []
    for number in range(4):
        pod = a_pod(0, PodPhase.PENDING, uid=f"u{number}", started_at=None, created_at=Timestamp(now))
        job, _ = a_step(job, [pod], now)
        job, _ = a_step(job, [pod], now + 1, lost_nodes=frozenset({"node-0"}))
        assert job.status.backoff.until is not None
        pauses.append(job.status.backoff.until - now - 1)
        now = job.status.backoff.until
    assert pauses == [1, 2, 4, 8]
    assert (job.status.restarts, job.status.failures) == ({"NodeLost": 4}, 0)
