"""What sharing lets a job have: a share of none waits or gives way, one of some is what the job wants."""

from __future__ import annotations

from dataclasses import replace

from elasticctl.api.codec import Timestamp
from elasticctl.api.spec import ElasticJob, PodPhase, Sharing
from elasticctl.api.status import ConditionType, Phase, ScalingPhase, ShareStatus
from elasticctl_controller.core.actions import CreateWorker
from elasticctl_controller.core.phase import QUEUED
from tests.support.controller.samples import NOW, a_generation, a_job, a_pod, a_step, created, deleted

NOTHING = ShareStatus(0, pool="t4", reason="Waiting", message="waits for 2 t4 that vision is guaranteed")


def an_automatic_job(low: int = 2, top: int = 4) -> ElasticJob:
    """A job whose size is chosen between `low` and `top`."""
    return a_job(desired=top, min=low, max=top, sharing=Sharing(automatic=True), scaled_by="user")


def running(job: ElasticJob, workers: int, share: ShareStatus) -> ElasticJob:
    """The job once that many workers run and train."""
    pods = [a_pod(index) for index in range(workers)]
    groups = (a_generation(1, workers, first_step_at=Timestamp(NOW - 30), resumed_step=0, last_step=10),)
    job, _ = a_step(job, pods, share=share, generations=groups)
    return a_step(job, pods, share=share, generations=groups)[0]


def test_without_sharing_an_automatic_job_asks_for_all_it_may_have() -> None:
    job, decision = a_step(an_automatic_job(), [])
    assert created(decision) == [0, 1, 2, 3]
    assert (job.status.desired, job.status.share) == (4, None)
    status = a_step(job, [a_pod(0), a_pod(1)])[0].status
    assert status.phase is Phase.RUNNING, "it trains with the workers that it has"


def test_a_job_that_is_given_nothing_yet_waits_and_says_why() -> None:
    job, decision = a_step(an_automatic_job(), [], share=NOTHING)
    status = job.status
    assert (status.phase, status.reason, status.message) == (Phase.PENDING, QUEUED, NOTHING.message)
    assert (decision.actions, decision.requeue_s, status.start_time) == ((), None, None)
    job, decision = a_step(job, [], NOW + 5, share=ShareStatus(2))
    assert created(decision) == [0, 1]
    assert job.status.start_time == NOW + 5, "the clock starts when its turn has come"


def test_waiting_uses_up_no_deadline() -> None:
    job = replace(an_automatic_job(), deadline_s=60.0)
    for later in (0.0, 100.0, 1000.0):
        job, _ = a_step(job, [], NOW + later, share=NOTHING)
    assert job.status.phase is Phase.PENDING
    job, _ = a_step(job, [], NOW + 2000, share=ShareStatus(2))
    assert job.status.phase is Phase.PENDING
    assert job.status.start_time == NOW + 2000


def test_a_running_job_that_is_given_less_lets_those_go_that_are_named() -> None:
    job = running(an_automatic_job(), 4, ShareStatus(4))
    pods = [a_pod(index) for index in range(4)]
    less = {"share": ShareStatus(2, change="gave 2 workers to vision/b"), "leave": frozenset({"uid-0", "uid-2"})}
    job, decision = a_step(job, pods, **less)
    gone = {worker.name for worker in job.status.workers if worker.removal}
    assert gone == {"digits-worker-0", "digits-worker-2"}
    assert decision.events[0].message == "scaled from 4 to 2 workers by sharing: gave 2 workers to vision/b"
    _, decision = a_step(job, pods, **less)
    assert deleted(decision) == sorted(gone)
    assert job.status.phase is Phase.RUNNING


def test_no_more_go_than_have_to() -> None:
    job = running(an_automatic_job(), 4, ShareStatus(4))
    pods = [a_pod(index) for index in range(1, 4)]  # one of the named workers is gone already
    job, _ = a_step(job, pods, share=ShareStatus(2), leave=frozenset({"uid-0", "uid-2", "uid-3"}))
    assert [worker.name for worker in job.status.workers if worker.removal] == ["digits-worker-3"]


def test_a_worker_whose_node_is_needed_as_a_whole_is_made_again_elsewhere() -> None:
    job = running(an_automatic_job(), 2, ShareStatus(2))
    pods = [a_pod(0), a_pod(1)]
    moving = {
        "share": ShareStatus(2),
        "leave": frozenset({"uid-1"}),
        "moves": frozenset({"uid-1"}),
        "nodes": ("roomy",),
    }
    job, _ = a_step(job, pods, **moving)
    assert [worker.name for worker in job.status.workers if worker.removal] == ["digits-worker-1"]
    job, decision = a_step(job, pods, **moving)
    assert deleted(decision) == ["digits-worker-1"]
    gone = [a_pod(0), a_pod(1, deleting=True)]
    job, decision = a_step(job, gone[:1], **moving)
    assert [action for action in decision.actions if isinstance(action, CreateWorker)] == [CreateWorker(1, "roomy")]
    job, decision = a_step(job, [a_pod(0), a_pod(1, uid="uid-9")], **moving)
    assert decision.actions == ()
    assert [worker.name for worker in job.status.workers if worker.removal and worker.cause is None] == []


def test_nodes_are_for_workers_that_are_made_and_not_for_those_that_wait() -> None:
    job, _ = a_step(an_automatic_job(), [], share=ShareStatus(2), nodes=("a", "b"))
    waiting = a_pod(0, PodPhase.PENDING, node="", started_at=None)
    _, decision = a_step(job, [waiting], share=ShareStatus(4), nodes=("a", "b", "c", "d"))
    assert decision.actions == (CreateWorker(1, "b"), CreateWorker(2, "c"), CreateWorker(3, "d"))
    _, decision = a_step(job, [waiting], share=ShareStatus(4), nodes=("d",))
    assert decision.actions == (CreateWorker(1, ""), CreateWorker(2, ""), CreateWorker(3, "d"))


def test_a_running_job_that_is_given_nothing_is_suspended_and_comes_back() -> None:
    job = running(an_automatic_job(), 2, ShareStatus(2))
    pods = [a_pod(0), a_pod(1)]
    job, _ = a_step(job, pods, share=NOTHING)
    assert (job.status.phase, job.status.reason) == (Phase.SUSPENDED, QUEUED)
    assert [worker.removal for worker in job.status.workers] == ["Suspended", "Suspended"]
    assert any(c.type == ConditionType.SUSPENDED and c.status == "True" for c in job.status.conditions)
    job, decision = a_step(job, pods, share=NOTHING)
    assert len(deleted(decision)) == 2
    job, decision = a_step(job, [], NOW + 60, share=ShareStatus(4))
    assert created(decision) == [0, 1, 2, 3]
    assert job.status.failures == 0
    assert job.status.interruptions == ()


def test_each_change_of_size_is_in_the_history_with_who_asked() -> None:
    job = running(an_automatic_job(), 4, ShareStatus(4))
    pods = [a_pod(index) for index in range(4)]
    job, _ = a_step(job, pods, share=ShareStatus(2))
    job, _ = a_step(job, pods[:2], share=ShareStatus(2))
    three = replace(job, max=3, desired=3)
    job, _ = a_step(three, pods[:2], share=ShareStatus(3))
    recorded = [(item.from_workers, item.to_workers, item.by, item.phase) for item in job.status.scalings]
    assert recorded[-2:] == [
        (4, 2, "sharing", ScalingPhase.SUPERSEDED),
        (2, 3, "sharing", ScalingPhase.IN_PROGRESS),
    ]
    groups = (a_generation(2, 3, first_step_at=Timestamp(NOW + 5), resumed_step=10, last_step=11),)
    job, _ = a_step(job, [a_pod(0), a_pod(1), a_pod(2)], NOW + 6, share=ShareStatus(3), generations=groups)
    last = job.status.scalings[-1]
    assert (last.phase, last.done_at, last.steps_redone) == (ScalingPhase.DONE, NOW + 5, 0)


def test_a_scaling_of_a_fixed_size_names_the_person() -> None:
    job = running(a_job(desired=2, min=1, max=4), 2, ShareStatus(2))
    scaled = replace(job, desired=3, generation=2, scaled_by="user")
    waiting, _ = a_step(scaled, [a_pod(0), a_pod(1)], share=ShareStatus(2))
    assert waiting.status.desired == 2, "not before it is given more"
    job, _ = a_step(waiting, [a_pod(0), a_pod(1)], share=ShareStatus(3))
    assert [(item.to_workers, item.by) for item in job.status.scalings][-1] == (3, "user")


def test_what_sharing_takes_from_a_job_of_fixed_size_and_gives_back_is_not_its_owners_doing() -> None:
    """Who has scaled it before, and what the last change was for, are still written down."""
    job = running(a_job(desired=4, min=1, max=4, scaled_by="user"), 4, ShareStatus(4))
    pods = [a_pod(index) for index in range(4)]
    job, _ = a_step(job, pods, share=ShareStatus(2, change="gives 2 workers to b/guest"))
    job, _ = a_step(job, pods[:2], share=ShareStatus(4, change="gets 2 more workers"))
    job, _ = a_step(replace(job, desired=3), pods, share=ShareStatus(4, change="gets 2 more workers"))
    assert [(item.to_workers, item.by, item.message) for item in job.status.scalings] == [
        (2, "sharing", "gives 2 workers to b/guest"),
        (4, "sharing", "gets 2 more workers"),
        (3, "user", ""),
    ]


def test_a_job_may_be_scaled_below_its_share() -> None:
    job = running(a_job(desired=3, min=1, max=4), 3, ShareStatus(3))
    job, _ = a_step(replace(job, desired=1), [a_pod(0), a_pod(1), a_pod(2)], share=ShareStatus(3))
    assert job.status.desired == 1


def test_without_groups_a_scaling_is_done_once_that_many_run() -> None:
    job, _ = a_step(a_job(desired=2), [a_pod(0), a_pod(1)])
    job = replace(job, desired=3)
    for pods in ([a_pod(0), a_pod(1)], [a_pod(0), a_pod(1), a_pod(2)]):
        job, _ = a_step(job, pods)
    assert job.status.scalings[-1].phase is ScalingPhase.IN_PROGRESS
    job, _ = a_step(job, [a_pod(0), a_pod(1), a_pod(2)])
    assert job.status.scalings[-1].phase is ScalingPhase.DONE


def test_the_end_of_a_job_ends_its_share() -> None:
    job = running(an_automatic_job(), 2, ShareStatus(2))
    job, _ = a_step(replace(job, cancel=True), [a_pod(0), a_pod(1)], share=ShareStatus(2))
    assert job.status.phase is Phase.CANCELLED
    assert job.status.share is None


def test_a_suspension_on_request_is_no_scaling() -> None:
    job = running(an_automatic_job(), 2, ShareStatus(2))
    before = job.status.scalings
    asleep, _ = a_step(replace(job, suspend=True), [a_pod(0), a_pod(1)])  # sharing has no say while it is suspended
    assert asleep.status.phase is Phase.SUSPENDED
    gone, _ = a_step(asleep, [])
    waiting, _ = a_step(replace(gone, suspend=False), [], share=NOTHING)
    assert waiting.status.scalings == before
    back, _ = a_step(waiting, [], share=ShareStatus(3, change="starts with 3 workers"))
    last = back.status.scalings[-1]
    assert (last.from_workers, last.to_workers, last.message) == (0, 3, "starts with 3 workers")
