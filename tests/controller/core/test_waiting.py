"""What workers wait for: refusals, taken names, schedulers that do not look, and the cluster's words about a pod."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticctl.api.codec import Timestamp
from elasticctl.api.observed.workers import PodWait
from elasticctl.api.spec import ElasticJob, PodPhase
from elasticctl.api.status import Condition
from elasticctl_controller.core.actions import Decision
from elasticctl_controller.core.waiting import MAX_MESSAGE_CHARS, PROCESSED_S, UNEXPLAINED_S
from tests.support.controller.samples import NOW, a_job, a_pod, a_running_job, a_step, an_end, created

TWO = [a_pod(0), a_pod(1)]
QUOTA = 'pods "digits-worker-2" is forbidden: exceeded quota: team'


def said(job: ElasticJob) -> tuple[str, str, str] | None:
    found: Condition | None = next((item for item in job.status.conditions if item.type == "WorkersWaiting"), None)
    return None if found is None else (found.status, found.reason, found.message)


def reasons(decision: Decision) -> list[str]:
    return [event.reason for event in decision.events]


def pending(index: int, reason: str = "", message: str = "", **fields: object) -> object:
    wait = PodWait(reason, message) if reason else None
    return a_pod(index, PodPhase.PENDING, started_at=None, node="", wait=wait, **fields)


def test_a_job_whose_workers_have_never_waited_has_no_such_condition():
    assert said(a_running_job()) is None


def test_a_refusal_is_a_condition_and_one_event_until_a_worker_can_be_created():
    job, decision = a_step(a_running_job(), [*TWO, a_pod(2)])
    job, decision = a_step(job, TWO, NOW + 1, refused=QUOTA)
    job, again = a_step(job, TWO, NOW + 4, refused=QUOTA)
    assert said(job) == ("True", "FailedCreate", QUOTA)
    assert (reasons(decision).count("FailedCreate"), reasons(again)) == (1, [])
    job, decision = a_step(job, [*TWO, a_pod(2, uid="uid-3")], NOW + 5, refused="")
    assert (said(job), reasons(decision)) == (("False", "AllWorkersStart", ""), [])


def test_a_restarted_controller_that_has_tried_nothing_yet_keeps_what_is_known():
    job = a_step(a_step(a_job(), [], refused=QUOTA)[0], [], NOW + 1)[0]
    assert said(job) == ("True", "FailedCreate", QUOTA)
    assert said(a_step(job, [], NOW + 2, refused="")[0]) == ("False", "AllWorkersStart", "")


@pytest.mark.parametrize("fields", [{"suspend": True}, {"cancel": True}, {"desired": 2}])
def test_a_job_that_wants_no_more_workers_waits_for_none(fields: dict[str, object]):
    job = a_step(a_running_job(), TWO, NOW + 1, refused=QUOTA)[0]
    assert said(a_step(replace(job, **fields), TWO, NOW + 2, refused=QUOTA)[0]) == ("False", "AllWorkersStart", "")


def test_the_reason_of_the_first_waiting_pod_is_in_the_jobs_condition():
    words = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    pods = [a_pod(0), pending(2, "ErrImagePull", "no such image"), pending(1, "Unschedulable", words)]
    job, decision = a_step(a_job(), pods)
    assert said(job) == ("True", "Unschedulable", f"digits-worker-1: {words}")
    assert "Unschedulable" not in reasons(decision), "Kubernetes has an event of its own about it"
    assert said(a_step(job, [a_pod(0), a_pod(1), a_pod(2)], NOW + 1)[0]) == ("False", "AllWorkersStart", "")


def test_a_long_message_is_cut():
    job = a_step(a_job(), [pending(0, "Unschedulable", "x" * 5000)])[0]
    assert len((said(job) or ("", "", ""))[2]) == MAX_MESSAGE_CHARS


def test_a_scheduler_that_does_not_look_at_a_pod_is_named_after_a_while():
    made = Timestamp(NOW)
    pods = [a_pod(0), a_pod(1), pending(2, scheduler="typo", created_at=made)]
    job, decision = a_step(a_job(), pods, NOW + 1)
    assert (said(job), decision.requeue_s) == (None, PROCESSED_S - 1)
    job, decision = a_step(job, pods, NOW + PROCESSED_S)
    assert said(job) == ("True", "NoScheduler", 'digits-worker-2: its scheduler "typo" has not processed it')
    assert "NoScheduler" in reasons(decision)
    looked = [*pods[:2], pending(2, scheduler="typo", created_at=made, considered=True)]
    assert said(a_step(job, looked, NOW + PROCESSED_S + 1)[0]) == ("False", "AllWorkersStart", "")


def test_orphans_that_hold_the_last_names_are_named():
    orphan = a_pod(1, owner_uid="", uid="other")
    job, decision = a_step(a_job(max=3), [orphan])
    assert created(decision) == [0, 2]
    words = "pod digits-worker-1 has a worker's name and does not belong to this job"
    assert said(job) == ("True", "NameTaken", words)
    assert "NameTaken" in reasons(decision)
    assert said(a_step(a_job(max=4), [orphan])[0]) is None, "there is another name"


def test_pods_of_an_earlier_job_of_the_name_are_about_to_go():
    job = a_job(max=3, created_at=Timestamp(NOW))
    assert said(a_step(job, [a_pod(1, owner_uid="the job before", uid="other")])[0]) is None
    newer = a_pod(1, owner_uid="other-owner", uid="other", created_at=Timestamp(NOW + 1))
    assert (said(a_step(job, [newer])[0]) or ("",))[0] == "True"


MOUNT = PodWait("FailedMount", 'configmap "conf" not found')


def test_what_only_events_show_of_a_pod_is_in_the_jobs_condition():
    pods = [a_pod(0), a_pod(1), a_pod(2, PodPhase.PENDING)]
    job, decision = a_step(a_job(), pods, NOW + 1)
    assert (said(job), decision.unexplained and decision.unexplained.name) == (None, "digits-worker-2")
    job = a_step(job, pods, NOW + 2, events={"uid-2": MOUNT})[0]
    words = ("True", "FailedMount", 'digits-worker-2: configmap "conf" not found')
    assert said(job) == words
    job = a_step(job, pods, NOW + 3)[0]
    assert said(job) == words, "a controller that has just started has not asked yet"
    assert said(a_step(job, pods, NOW + 4, events={"uid-2": None})[0]) == ("False", "AllWorkersStart", "")


def test_events_are_asked_about_a_pod_that_takes_long():
    start = Timestamp(NOW)
    pod = a_pod(2, PodPhase.PENDING, created_at=start, started_at=start)
    decision = a_step(a_job(), [a_pod(0), a_pod(1), pod], NOW + 1)[1]
    assert (decision.unexplained, decision.requeue_s) == (None, UNEXPLAINED_S - 1)
    explains_itself = pending(2, "ImagePullBackOff", "no such image")
    assert a_step(a_job(), [a_pod(0), a_pod(1), explains_itself], NOW + 60)[1].unexplained is None
    assert a_step(a_job(suspend=True), [pod], NOW + 60)[1].unexplained is None


def test_what_an_autoscaler_says_is_added_to_what_the_scheduler_says():
    pods = [a_pod(0), a_pod(1), pending(2, "Unschedulable", "0/3 nodes are available.")]
    events = {"uid-2": PodWait("NotTriggerScaleUp", "the autoscaler adds no node: max node group size reached")}
    job = a_step(a_job(), pods, NOW, events=events)[0]
    whole = "digits-worker-2: 0/3 nodes are available; the autoscaler adds no node: max node group size reached"
    assert said(job) == ("True", "Unschedulable", whole)
    assert said(a_step(job, pods, NOW + 1)[0]) == ("True", "Unschedulable", whole)
    changed = [a_pod(0), a_pod(1), pending(2, "Unschedulable", "0/4 nodes are available.")]
    words = "digits-worker-2: 0/4 nodes are available."
    assert said(a_step(job, changed, NOW + 2)[0]) == ("True", "Unschedulable", words)


def test_former_workers_that_still_end_are_named():
    """After a resume, or of an earlier job of this name: their names are taken, and they may have minutes."""
    until = Timestamp(NOW + 600)
    running = a_running_job(max=3)
    ours = [a_pod(index, deleting=True, deadline=until) for index in range(3)]
    job = a_step(replace(running, suspend=True), [a_pod(index) for index in range(3)], NOW)[0]
    job, decision = a_step(replace(job, suspend=False), ours, NOW + 1)
    words = "3 former workers are still ending, until 1970-01-12T13:56:40Z at the latest"
    assert (said(job), created(decision)) == (("True", "StillEnding", words), [])
    earlier = a_pod(0, deleting=True, deadline=until, owner_uid="the job before", uid="other")
    job, decision = a_step(a_job(max=3), [earlier])
    words = "digits-worker-0 is still ending, until 1970-01-12T13:56:40Z at the latest"
    assert (said(job), created(decision)) == (("True", "StillEnding", words), [1, 2])
    assert said(a_step(a_job(max=4), [earlier])[0]) is None, "there is another name"
    lost = [a_pod(0), a_pod(1), a_pod(2, deleting=True, deadline=until)]
    job, decision = a_step(running, lost, NOW + 1)
    assert (said(job), created(decision)) == (None, [3]), "one that others delete is replaced next to it"


def test_a_name_that_a_finalizer_keeps_is_given_up():
    held = an_end(1, 0, deleting=True, finalizer="a.dev/b", owner_uid="the job before", uid="other")
    job, decision = a_step(a_job(max=3), [held])
    assert (created(decision), said(job)) == ([0, 2, 3], None)


def test_names_that_unlabelled_pods_have_are_passed_over_and_tried_again_in_time():
    taken = {"digits-worker-0": False}
    job, decision = a_step(a_job(), [], taken=taken)
    assert (created(decision), said(job)) == ([1, 2, 3], None)
    job, decision = a_step(a_job(max=3), [], taken=taken)
    words = "pod digits-worker-0 has a worker's name and does not belong to this job"
    assert (created(decision), said(job)) == ([1, 2], ("True", "NameTaken", words))
    job, decision = a_step(job, [a_pod(1), a_pod(2)], NOW + 3, taken={"digits-worker-0": True})
    assert (created(decision), reasons(decision).count("NameTaken")) == ([0], 0)
    job, decision = a_step(job, [a_pod(0), a_pod(1), a_pod(2)], NOW + 4)
    assert said(job) == ("False", "AllWorkersStart", "")
