"""Every rule of reconcile by example."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.spec import CleanPodPolicy, ElasticJob, PodPhase, WorkerRef
from elasticctl.api.status import Cause, ConditionType, Phase, ReplicaStatus, ScalingPhase, ShareStatus
from elasticctl_controller.core.actions import CreateWorker, DeleteJob, DeleteWorker
from elasticctl_controller.core.interruption_notices import LeaveNotice
from elasticctl_controller.core.observation import Observed
from elasticctl_controller.core.reconcile import reconcile
from elasticctl_controller.core.workers import SILENT_MESSAGE
from tests.support.controller.samples import (
    NOW,
    a_generation,
    a_job,
    a_pod,
    a_running_job,
    a_step,
    an_end,
    created,
    deleted,
    termination_message,
)

THREE = [a_pod(0), a_pod(1), a_pod(2)]


def conditions(job: ElasticJob) -> dict[str, str]:
    return {item.type: item.status for item in job.status.conditions}


class TestMakingWorkers:
    def test_a_new_job_gets_its_workers_at_the_lowest_indices(self):
        job, decision = a_step(a_job(), [])
        assert created(decision) == [0, 1, 2]
        assert (job.status.phase, job.status.reason) == (Phase.PENDING, "WaitingForWorkers")
        assert job.status.start_time == NOW
        assert conditions(job) == {"Created": "True"}
        assert job.status.selector == "group-name=elastic.pytorch.org,job-name=digits,replica-type=worker"

    def test_a_job_at_rest_is_neither_written_nor_acted_on(self):
        job = a_running_job()
        decision = a_step(job, THREE, NOW + 100)[1]
        assert decision.status is job.status
        assert (decision.actions, decision.events, decision.requeue_s) == ((), (), None)

    def test_missing_workers_are_checked_again_even_without_an_event(self):
        decision = a_step(a_job(), [])[1]
        assert decision.requeue_s == 5.0

    def test_a_name_that_a_foreign_pod_has_is_left_alone(self):
        foreign = a_pod(0, owner_uid="another-job", uid="other")
        assert created(a_step(a_job(), [foreign])[1]) == [1, 2, 3]
        assert created(a_step(a_job(max=3), [foreign])[1]) == [1, 2]

    def test_a_foreign_pod_is_never_ours_with_any_labels(self):
        foreign_pods = [
            a_pod(0, owner_uid=""),
            a_pod(1, owner_uid="the job of that name before", exit_code=1, phase=PodPhase.FAILED),
            a_pod(2, name="digits-worker-02"),
            a_pod(3, name="digits-workers-3"),
        ]
        job, decision = a_step(a_job(), foreign_pods)
        assert job.status.workers == ()
        assert deleted(decision) == []

    def test_our_pod_stays_ours_when_its_labels_are_edited(self):
        job, decision = a_step(a_running_job(), [a_pod(0), replace(a_pod(1), index=None), replace(a_pod(2), index=7)])
        assert decision.actions == ()
        assert [worker.index for worker in job.status.workers] == [0, 1, 2]

    def test_a_worker_that_has_to_go_is_replaced_immediately_elsewhere_and_not_removed(self):
        going = {"notices": {"uid-1": LeaveNotice("AWS is reclaiming its node", 200.0)}, "avoid": ("node-1",)}
        job, decision = a_step(a_running_job(max=3), THREE, **going)
        assert decision.actions == (CreateWorker(3, "", ("node-1",)),)
        assert job.status.workers[1].notice == "AWS is reclaiming its node"
        job, decision = a_step(job, [*THREE, a_pod(3)], **going)
        assert decision.actions == ()
        assert (job.status.active, job.status.message) == (3, "3 of 3 workers running")
        job, decision = a_step(job, [THREE[0], THREE[2], a_pod(3)])
        assert decision.actions == (), "the one that took its place stays"
        assert job.status.active == 3

    def test_a_notice_that_is_taken_back_leaves_the_job_as_it_was(self):
        job = a_step(a_running_job(), THREE, notices={"uid-1": LeaveNotice("Karpenter")})[0]
        job = a_step(job, [*THREE, a_pod(3, phase=PodPhase.PENDING)])[0]
        assert deleted(a_step(job, [*THREE, a_pod(3, phase=PodPhase.PENDING)])[1]) == ["digits-worker-3"]

    def test_in_a_shared_cluster_there_is_no_room_for_a_replacement_next_to_a_worker_that_has_to_go(self):
        going = {"notices": {"uid-1": LeaveNotice("Karpenter")}, "share": ShareStatus(3)}
        assert created(a_step(a_running_job(max=3), THREE, **going)[1]) == []

    def test_a_job_that_is_scaled_to_0_keeps_no_worker_that_has_to_go(self):
        job = a_running_job(min=0)
        job = a_step(replace(job, desired=0), THREE, notices={"uid-1": LeaveNotice("Karpenter")})[0]
        assert all(worker.removal for worker in job.status.workers)

    def test_a_terminating_pod_keeps_its_index_and_is_replaced_immediately_even_above_max(self):
        leaving = a_pod(1, deleting=True)
        assert created(a_step(a_running_job(), [a_pod(0), leaving, a_pod(2)])[1]) == [3]
        assert created(a_step(a_running_job(max=3), [a_pod(0), leaving, a_pod(2)])[1]) == [3]
        replaced = [a_pod(0), leaving, a_pod(2), a_pod(3)]
        assert created(a_step(a_running_job(max=3), replaced)[1]) == [], "once, however long it takes to end"

    def test_workers_above_a_lowered_maximum_stay_if_they_are_few_enough(self):
        job = a_step(a_job(desired=2, max=8), [a_pod(5), a_pod(6)])[0]
        decision = a_step(replace(job, max=2), [a_pod(5), a_pod(6)])[1]
        assert decision.actions == ()

    def test_a_job_whose_deletion_a_finalizer_holds_up_stops_its_workers(self):
        job, decision = a_step(replace(a_running_job(), deleting=True, ttl_s=0.0), THREE)
        assert (decision.status.phase, decision.status.message) == (Phase.CANCELLED, "the job is being deleted")
        job, decision = a_step(job, THREE)
        assert deleted(decision) == ["digits-worker-0", "digits-worker-1", "digits-worker-2"]
        job, decision = a_step(job, [])
        assert (decision.actions, decision.requeue_s, job.status.restarts) == ((), None, {})

    def test_a_job_that_is_deleted_without_its_workers_is_left_alone(self):
        job = replace(a_running_job(), deleting=True, orphaning=True)
        decision = a_step(job, THREE)[1]
        assert (decision.status, decision.actions, decision.requeue_s) == (job.status, (), None)


class TestReplacing:
    def test_a_preempted_worker_is_counted_then_deleted_then_made_again(self):
        pods = [a_pod(0), an_end(1, 1, disruption_target=True), a_pod(2)]
        job, decision = a_step(a_running_job(), pods)
        assert (decision.actions, decision.requeue_s) == ((), 0.0)
        assert job.status.restarts == {"Preempted": 1}
        assert [event.reason for event in decision.events] == ["Preempted"]
        job, decision = a_step(job, pods)
        assert decision.actions == (DeleteWorker("digits-worker-1", "uid-1", force=True),)
        job, decision = a_step(job, [a_pod(0), a_pod(2)])
        assert decision.actions == (CreateWorker(1),)
        assert (job.status.restarts, job.status.failures) == ({"Preempted": 1}, 0)
        assert job.status.phase is Phase.RUNNING

    def test_a_worker_that_reports_itself_as_unanswering_is_counted(self):
        _, decision = a_step(a_running_job(), [a_pod(0), an_end(1, 1, message=SILENT_MESSAGE), a_pod(2)])
        assert (decision.status.restarts, decision.status.failures) == ({"Stuck": 1}, 1)

    def test_a_worker_that_answers_no_more_is_deleted_and_replaced(self):
        job, decision = a_step(a_running_job(), THREE, silent=frozenset({"uid-1"}))
        assert decision.status.restarts == {"Unresponsive": 1}
        assert decision.status.failures == 0, "its node may have died, and Kubernetes not know yet"
        assert decision.status.interruptions[-1].cause is Cause.UNRESPONSIVE
        assert decision.actions == (), "counted first, deleted once that is stored"
        job, decision = a_step(job, THREE)  # the rendezvous service drops the worker once it is given up
        assert decision.actions == (DeleteWorker("digits-worker-1", "uid-1"),), "in order: it may still hold its GPUs"
        later = NOW + 2
        assert created(a_step(job, [a_pod(0), a_pod(1, deleting=True), a_pod(2)], now=later)[1]) == [3]
        assert created(a_step(job, [a_pod(0), a_pod(2)], now=later)[1]) == [1]

    def test_a_worker_that_its_peers_missed_first_is_put_down_to_its_node_once_that_is_found_dead(self):
        job, _ = a_step(a_running_job(), THREE, silent=frozenset({"uid-1"}))
        job, _ = a_step(job, THREE)
        pods, lost = [a_pod(0), a_pod(1, deleting=True), a_pod(2), a_pod(3)], frozenset({"node-1"})
        job, _ = a_step(job, pods)
        job, decision = a_step(job, pods, NOW + 31, lost_nodes=lost)
        assert job.status.restarts == {"NodeLost": 1}
        assert [(item.uid, item.cause, item.at) for item in job.status.interruptions] == [
            ("uid-1", Cause.NODE_LOST, NOW)
        ]
        assert [(event.reason, event.message) for event in decision.events] == [
            ("NodeLost", "lost worker digits-worker-1: it did not answer, and 31s later its node was found to be lost")
        ]
        assert decision.actions == (DeleteWorker("digits-worker-1", "uid-1", force=True),)
        for later in (pods, [a_pod(0), a_pod(2), a_pod(3)]):
            again, decision = a_step(job, later, NOW + 32, lost_nodes=lost)
            assert again.status.restarts == {"NodeLost": 1}
            assert (again.status.interruptions, decision.events) == (job.status.interruptions, ())

    def test_a_node_that_is_found_dead_as_its_pod_vanishes_counts_all_the_same(self):
        job, _ = a_step(a_running_job(), THREE, silent=frozenset({"uid-1"}))
        job, _ = a_step(job, [a_pod(0), a_pod(2)], NOW + 31, lost_nodes=frozenset({"node-1"}))
        assert job.status.restarts == {"NodeLost": 1}
        assert [worker.name for worker in job.status.workers] == ["digits-worker-0", "digits-worker-2"]

    def test_a_pod_on_a_lost_node_is_replaced_immediately_and_by_force(self):
        job, _ = a_step(a_running_job(), THREE, lost_nodes=frozenset({"node-1"}))
        assert job.status.restarts == {"NodeLost": 1}
        job, decision = a_step(job, THREE, lost_nodes=frozenset({"node-1"}))
        assert decision.actions == (DeleteWorker("digits-worker-1", "uid-1", force=True),)
        assert created(a_step(job, [a_pod(0), a_pod(2)], lost_nodes=frozenset({"node-1"}))[1]) == [1]

    def test_a_pod_that_hangs_terminating_on_a_lost_node_is_forced_out(self):
        pods, lost = [a_pod(0), a_pod(1, deleting=True), a_pod(2)], frozenset({"node-1"})
        job, _ = a_step(a_running_job(), pods)
        assert deleted(a_step(job, pods)[1]) == []
        assert a_step(job, pods, lost_nodes=lost)[1].actions[0] == DeleteWorker("digits-worker-1", "uid-1", force=True)

    def test_a_worker_that_vanished_is_missed(self):
        job, decision = a_step(a_running_job(), [a_pod(0), a_pod(2)])
        assert job.status.restarts == {"Deleted": 1}
        assert created(decision) == [1]
        job, _ = a_step(a_running_job(), [a_pod(0), a_pod(2)], lost_nodes=frozenset({"node-1"}))
        assert job.status.restarts == {"NodeLost": 1}

    def test_the_loss_of_many_workers_is_reported_in_few_events(self):
        job, _ = a_step(a_job(desired=100, max=100), [a_pod(i) for i in range(100)])
        job, decision = a_step(job, [])
        assert job.status.restarts == {"Deleted": 100}
        assert len(job.status.interruptions) == 50
        assert decision.events[10].message == "lost 40 more workers"
        assert len(decision.events) == 12

    def test_below_the_minimum_the_job_is_restarting(self):
        job, decision = a_step(a_running_job(min=3), [a_pod(0), a_pod(2)])
        assert (job.status.phase, job.status.reason) == (Phase.RESTARTING, "WaitingForWorkers")
        assert job.status.message == "2 of at least 3 workers running"
        assert conditions(job) == {"Created": "True", "Restarting": "True"}
        assert decision.events[-1].reason == "ElasticJobRestarting"
        job, _ = a_step(job, [a_pod(0), a_pod(1, uid="uid-1b"), a_pod(2)])
        assert conditions(job) == {"Created": "True", "Running": "True"}


class TestScaling:
    def test_out(self):
        job, decision = a_step(replace(a_running_job(), desired=4, scaled_by="ada"), THREE)
        assert created(decision) == [3]
        assert [(s.from_workers, s.to_workers, s.by, s.at) for s in job.status.scalings] == [(3, 4, "ada", NOW)]
        assert [event.message for event in decision.events] == ["scaled from 3 to 4 workers by ada"]

    def test_of_a_suspended_job_is_in_the_history_and_done_immediately(self):
        job, _ = a_step(replace(a_running_job(), suspend=True), THREE)
        job, _ = a_step(replace(job, desired=2, scaled_by="ada"), [])
        job, _ = a_step(replace(job, suspend=False), [], NOW + 600)
        back = a_generation(9, 2, formed_at=Timestamp(NOW + 605), first_step_at=Timestamp(NOW + 606), resumed_step=1)
        job, _ = a_step(job, [a_pod(0), a_pod(1)], NOW + 610, generations=(back,))
        recorded = [(s.from_workers, s.to_workers, s.by, s.phase, s.recovery_s) for s in job.status.scalings]
        assert recorded == [(3, 2, "ada", ScalingPhase.DONE, None)]

    def test_a_job_that_a_queue_admits_with_fewer_has_not_been_scaled(self):
        job, _ = a_step(a_job(queue="ml", suspend=True), [])
        job, _ = a_step(replace(job, suspend=False, desired=2, scaled_by="kueue"), [], NOW + 60)
        job, _ = a_step(job, [a_pod(0), a_pod(1)], NOW + 70)
        assert job.status.scalings == ()
        job, _ = a_step(replace(job, desired=3), [a_pod(0), a_pod(1)], NOW + 80)
        assert [(s.from_workers, s.to_workers, s.by) for s in job.status.scalings] == [(2, 3, "kueue")]

    def test_in_takes_workers_first_that_do_not_train_yet(self):
        members = ("digits-worker-1", "digits-worker-2")
        group = replace(a_generation(4, 0, formed_at=Timestamp(NOW - 5)), workers=members)
        newcomer = a_pod(2, uid="uid-2b", started_at=Timestamp(NOW - 2))  # has the name of one that was in the group
        job, _ = a_step(a_running_job(), [a_pod(0), a_pod(1), newcomer], generations=(group,))
        job, _ = a_step(replace(job, desired=1), [a_pod(0), a_pod(1), newcomer], generations=(group,))
        assert [worker.name for worker in job.status.workers if not worker.removal] == ["digits-worker-1"]

    def test_in_removes_the_highest_indices_and_restarts_no_worker(self):
        job, decision = a_step(replace(a_running_job(), desired=1), THREE)
        assert (decision.actions, decision.requeue_s) == ((), 0.0)
        job, decision = a_step(job, THREE)
        assert decision.actions == (DeleteWorker("digits-worker-1", "uid-1"), DeleteWorker("digits-worker-2", "uid-2"))
        leaving = [a_pod(0), a_pod(1, deleting=True), an_end(2, 143, deleting=True)]
        job, decision = a_step(job, leaving)
        assert decision.actions == ()
        job, decision = a_step(job, [a_pod(0)])
        assert decision.actions == ()
        assert job.status.restarts == {Cause.SCALED_IN.value: 2}
        assert (job.status.failures, job.status.interruptions) == (0, ())
        assert job.status.active == 1

    def test_in_prefers_workers_that_do_not_run_yet(self):
        job = a_step(a_job(), [a_pod(0, PodPhase.PENDING), a_pod(1), a_pod(2)])[0]
        job, _ = a_step(replace(job, desired=2), [a_pod(0, PodPhase.PENDING), a_pod(1), a_pod(2)])
        assert [worker.name for worker in job.status.workers if worker.removal] == ["digits-worker-0"]

    def test_a_scale_in_that_is_taken_back_makes_new_workers(self):
        job, _ = a_step(replace(a_running_job(), desired=2), THREE)
        job, decision = a_step(replace(job, desired=3), THREE)
        assert deleted(decision) == ["digits-worker-2"]
        assert created(decision) == [3]

    def test_a_name_does_not_hit_the_successor(self):
        refs = (WorkerRef("digits-worker-0", "an older uid"), WorkerRef("digits-worker-1", ""))
        job, _ = a_step(replace(a_running_job(), remove_workers=refs), THREE)
        assert all(worker.removal == "" for worker in job.status.workers)

    def test_to_none_and_back(self):
        job, _ = a_step(replace(a_running_job(), desired=0, min=0), THREE)
        job, _ = a_step(job, [])
        assert (job.status.phase, job.status.reason) == (Phase.RESTARTING, "NoWorkersWanted")
        assert created(a_step(replace(job, desired=1), [])[1]) == [0]


class TestEnding:
    def test_the_first_success_and_a_bounded_wait_for_the_others(self):
        pods = [an_end(0, 0), a_pod(1), a_pod(2)]
        job, decision = a_step(a_running_job(), pods)
        assert (job.status.phase, job.status.reason) == (Phase.RUNNING, "Finishing")
        assert (decision.actions, decision.requeue_s) == ((), 30.0)
        job, decision = a_step(job, [an_end(0, 0), an_end(1, 1), a_pod(2)], NOW + 1)
        assert created(decision) == []
        assert (job.status.failures, job.status.interruptions) == (0, ())
        job, _ = a_step(job, [an_end(0, 0), a_pod(2)], NOW + 30)
        assert (job.status.phase, job.status.message) == (Phase.SUCCEEDED, "worker digits-worker-0 completed")
        assert conditions(job) == {"Created": "True", "Running": "False", "Succeeded": "True"}

    def test_when_all_have_ended_there_is_no_wait(self):
        job, _ = a_step(a_running_job(), [an_end(0, 0), an_end(1, 0), an_end(2, 0)])
        assert job.status.phase is Phase.SUCCEEDED
        assert job.status.replica_statuses["Worker"].succeeded == 3

    def test_workers_that_wait_are_there_to_stay_and_not_yet_active_in_torchelastics_count(self):
        pending = a_pod(2, PodPhase.PENDING)
        job, _ = a_step(a_running_job(), [a_pod(0), an_end(1, 1, message=termination_message("application")), pending])
        assert job.status.active == 2
        assert job.status.replica_statuses["Worker"] == ReplicaStatus(active=1, succeeded=0, failed=1)

    def test_a_worker_on_its_way_into_the_group_is_not_waited_for(self):
        pods = [an_end(0, 0), an_end(1, 0), a_pod(2)]
        assert a_step(a_running_job(), pods, generations=(a_generation(1, 3),))[0].status.reason == "Finishing"
        assert a_step(a_running_job(), pods, generations=(a_generation(1, 2),))[0].status.phase is Phase.SUCCEEDED

    def test_success_is_remembered_when_its_pod_is_gone(self):
        job, _ = a_step(a_running_job(), [an_end(0, 0), a_pod(1), a_pod(2)])
        job, _ = a_step(job, [a_pod(1), a_pod(2)], NOW + 1)
        job, _ = a_step(job, [], NOW + 2)
        assert job.status.phase is Phase.SUCCEEDED

    def test_a_worker_we_removed_does_not_make_a_success(self):
        job, _ = a_step(replace(a_running_job(), desired=2), THREE)
        job, _ = a_step(job, [a_pod(0), a_pod(1), an_end(2, 0)])
        assert (job.status.phase, job.status.restarts) == (Phase.RUNNING, {"ScaledIn": 1})

    @pytest.mark.parametrize(
        ("policy", "kept"), [(CleanPodPolicy.NONE, 3), (CleanPodPolicy.RUNNING, 1), (CleanPodPolicy.ALL, 0)]
    )
    def test_clean_pod_policy(self, policy, kept):
        pods = [an_end(0, 0), a_pod(1), a_pod(2, PodPhase.PENDING)]
        job = a_running_job(clean_pod_policy=policy)
        for now in (NOW, NOW + 30):
            job, _ = a_step(job, pods, now)
        job, decision = a_step(job, pods, NOW + 31)
        assert 3 - len(deleted(decision)) == kept
        assert created(decision) == []

    @pytest.mark.parametrize(("has_stopped", "removed"), [(True, 0), (False, 1)])
    def test_a_worker_that_completed_is_removed_only_while_something_of_it_runs(self, has_stopped, removed):
        pods = [an_end(0, 0, phase=PodPhase.RUNNING, has_stopped=has_stopped)]
        job, _ = a_step(replace(a_running_job(clean_pod_policy=CleanPodPolicy.RUNNING), desired=1), pods)
        job, decision = a_step(job, pods, NOW + 1)
        assert job.status.phase is Phase.SUCCEEDED
        assert len(deleted(decision)) == removed

    @pytest.mark.parametrize("fields", [{"cancel": True}, {"deadline_s": 10.0}])
    def test_a_job_that_is_stopped_removes_its_workers_even_under_policy_none(self, fields):
        job, _ = a_step(replace(a_running_job(), **fields), THREE, NOW + 10)
        assert job.status.phase in (Phase.CANCELLED, Phase.FAILED)
        assert len(deleted(a_step(job, THREE, NOW + 10)[1])) == 3

    def test_cancel_is_an_end_that_tools_of_torchelastic_see(self):
        job, _ = a_step(replace(a_running_job(), cancel=True), THREE)
        assert job.status.phase is Phase.CANCELLED
        failed = next(item for item in job.status.conditions if item.type == ConditionType.FAILED)
        assert (failed.status, failed.reason) == ("True", "ElasticJobCancelled")

    def test_the_deadline(self):
        job = a_running_job(deadline_s=10.0)
        assert a_step(job, THREE, NOW + 4)[1].requeue_s == 6.0
        job, _ = a_step(job, THREE, NOW + 10)
        assert (job.status.phase, job.status.reason) == (Phase.FAILED, "DeadlineExceeded")

    def test_the_time_to_live(self):
        job, decision = a_step(a_running_job(ttl_s=60.0, cancel=True), [])
        assert decision.requeue_s == 60.0
        assert a_step(job, [], NOW + 59)[1].actions == ()
        assert a_step(job, [], NOW + 60)[1].actions == (DeleteJob(),)

    def test_an_end_is_final(self):
        job, _ = a_step(replace(a_running_job(), cancel=True), THREE)
        job, _ = a_step(job, [])
        for change in ({"cancel": False}, {"desired": 4}, {"suspend": True}, {"backoff_limit": 0}):
            after, decision = a_step(replace(job, **change), [], NOW + 1000)
            assert after.status.phase is Phase.CANCELLED
            assert decision.actions == ()
            assert after.status.completion_time == NOW


class TestSuspending:
    def test_workers_go_and_counters_stay(self):
        job, _ = a_step(a_running_job(deadline_s=10.0), [a_pod(0), an_end(1, 1), a_pod(2)])
        counts = (job.status.failures, job.status.restarts)
        job, _ = a_step(replace(job, suspend=True), [a_pod(0), an_end(1, 1), a_pod(2)])
        assert (job.status.phase, job.status.start_time) == (Phase.SUSPENDED, None)
        assert conditions(job) == {"Created": "True", "Running": "False", "Suspended": "True"}
        job, decision = a_step(job, [a_pod(0), an_end(1, 1), a_pod(2)])
        assert len(deleted(decision)) == 3
        job, decision = a_step(job, [], NOW + 5)
        assert (decision.actions, decision.requeue_s) == ((), None)
        assert (job.status.failures, job.status.restarts) == counts
        job, decision = a_step(replace(job, suspend=False), [], NOW + 500)
        assert created(decision) == [0, 1, 2]
        assert (job.status.phase, job.status.start_time) == (Phase.RESTARTING, NOW + 500)
        assert conditions(job) == {"Created": "True", "Suspended": "False", "Restarting": "True"}
        assert (job.status.failures, job.status.restarts) == counts

    def test_a_job_may_be_born_suspended(self):
        job, decision = a_step(a_job(suspend=True), [])
        assert (job.status.phase, decision.actions) == (Phase.SUSPENDED, ())


def test_the_time_of_a_condition_is_the_change_of_its_status():
    job = a_running_job()
    job, _ = a_step(replace(job, min=3), [a_pod(0)], NOW + 10)
    job, _ = a_step(job, [a_pod(0)], NOW + 20)
    restarting = job.status.conditions[-1]
    assert (restarting.type, restarting.last_transition_time) == ("Restarting", NOW + 10)


def test_contradictory_bounds_are_reported_once_per_edit():
    spec = {"minReplicas": 5, "maxReplicas": 2, "replicaSpecs": {"Worker": {"replicas": 4}}}
    job = ElasticJob.from_manifest({"metadata": {"name": "j", "uid": "u", "generation": 1}, "spec": spec})
    first = reconcile(job, Observed(), 0.0)
    (message,) = [event.message for event in first.events if event.reason == "ContradictoryBounds"]
    assert message.startswith(
        "minReplicas 5, 4 replicas, maxReplicas 2 contradict each other: the job gets 2-2 workers, 2 "
    )
    later = reconcile(replace(job, status=first.status), Observed(), 1.0)
    assert "ContradictoryBounds" not in {event.reason for event in later.events}
    edited = reconcile(replace(job, status=first.status, generation=2), Observed(), 2.0)
    assert "ContradictoryBounds" in {event.reason for event in edited.events}
