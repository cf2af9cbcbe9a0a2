"""Every rule of reconcile by example."""

from __future__ import annotations

from dataclasses import replace

from elasticctl.spec import PodPhase
from elasticctl.status import Cause, Phase
from tests.controller.samples import (
    NOW,
    a_job,
    a_pod,
    a_running_job,
    a_step,
    an_end,
    created,
    deleted,
    told,
)


def test_a_new_job_gets_its_workers_at_the_lowest_indices():
    job, decision = a_step(a_job(), [])
    assert created(decision) == [0, 1, 2]
    assert job.status.phase is Phase.PENDING
    assert [item.type for item in job.status.conditions] == ["Created"]


def test_a_job_at_rest_is_neither_written_nor_acted_on():
    job = a_running_job()
    assert job.status.phase is Phase.RUNNING
    _again, decision = a_step(job, [a_pod(0), a_pod(1), a_pod(2)], NOW + 100)
    assert decision.status is job.status
    assert decision.actions == ()
    assert decision.requeue_s is None
    assert decision.events == ()


def test_a_preempted_worker_is_counted_then_deleted_then_made_again():
    job = a_running_job()
    pods = [a_pod(0), an_end(1, 1, disruption_target=True), a_pod(2)]
    job, decision = a_step(job, pods)
    assert decision.actions == ()
    assert decision.requeue_s == 0.0
    assert job.status.restarts == {"Preempted": 1}
    job, decision = a_step(job, pods)
    assert deleted(decision) == ["digits-worker-1"]
    job, decision = a_step(job, [a_pod(0), a_pod(2)])
    assert created(decision) == [1]
    assert job.status.restarts == {"Preempted": 1}
    assert job.status.failures == 0
    assert job.status.phase is Phase.RUNNING


def test_an_application_failure_waits_for_the_backoff():
    job = a_running_job()
    pods = [a_pod(0), an_end(1, 1, message=told("application")), a_pod(2)]
    job, _ = a_step(job, pods)
    assert job.status.failures == 1
    assert job.status.first_failure is not None
    assert job.status.first_failure.worker == "digits-worker-1"
    job, decision = a_step(job, [a_pod(0), a_pod(2)], NOW + 0.4)
    assert created(decision) == []
    assert decision.requeue_s is not None
    assert 0.5 < decision.requeue_s < 0.7
    job, decision = a_step(job, [a_pod(0), a_pod(2)], NOW + 1.1)
    assert created(decision) == [1]


def test_scaling_out_and_in():
    job = a_running_job()
    pods = [a_pod(0), a_pod(1), a_pod(2)]
    job, decision = a_step(replace(a_running_job(), desired=4), pods)
    assert created(decision) == [3]
    job, decision = a_step(replace(a_running_job(), desired=1), pods)
    assert decision.actions == ()
    job, decision = a_step(job, pods)
    assert deleted(decision) == ["digits-worker-1", "digits-worker-2"]
    job, decision = a_step(job, [a_pod(0)])
    assert decision.actions == ()
    assert job.status.restarts == {Cause.SCALED_IN.value: 2}


def test_the_first_success_and_a_bounded_wait_for_the_others():
    pods = [an_end(0, 0), a_pod(1), a_pod(2)]
    job, decision = a_step(a_running_job(clean_pod_policy="Running"), pods)
    assert (job.status.phase, job.status.reason) == (Phase.RUNNING, "Finishing")
    assert decision.requeue_s == 30.0
    job, decision = a_step(job, [an_end(0, 0), an_end(1, 1), a_pod(2)], NOW + 1)
    assert job.status.failures == 0
    job, decision = a_step(job, pods, NOW + 30)
    assert job.status.phase is Phase.SUCCEEDED


def test_a_spent_budget_fails_the_job():
    job, _decision = a_step(a_running_job(backoff_limit=0), [a_pod(0), an_end(1, 3, message="boom"), a_pod(2)])
    assert (job.status.phase, job.status.reason) == (Phase.FAILED, "BackoffLimitExceeded")
    assert "digits-worker-1 (exit code 3): boom" in job.status.message


def test_pending_pods_leave_the_job_pending():
    job, _ = a_step(a_job(), [a_pod(0, PodPhase.PENDING)])
    assert (job.status.phase, job.status.reason) == (Phase.PENDING, "WaitingForWorkers")
