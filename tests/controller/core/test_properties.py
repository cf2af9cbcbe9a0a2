"""Properties of a single pass over any job and any pods."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import Timestamp, from_json, to_json
from elasticctl.api.goal import Goal
from elasticctl.api.observed.workers import Pod
from elasticctl.api.spec import CleanPodPolicy, ElasticJob, PodPhase, RestartPolicy, WorkerRef, worker_name
from elasticctl.api.status import GroupGeneration, JobStatus, ShareStatus
from elasticctl_controller.core.actions import DeleteWorker
from elasticctl_controller.core.reconcile import reconcile
from tests.support.any_json import JSON
from tests.support.anything import shaped
from tests.support.controller.samples import (
    JOB_UID,
    NOW,
    a_job,
    a_pod,
    a_step,
    an_end,
    deleted,
    observe,
    stored,
    termination_message,
)
from tests.support.controller.world import check_decision

times = st.none() | st.integers(-200, 10).map(lambda s: Timestamp(NOW + s))
messages = st.sampled_from(
    [
        "",
        "boom",
        termination_message("application"),
        termination_message("collateral"),
        termination_message("stuck"),
        termination_message("preempted"),
    ]
)
some_pods = st.lists(
    st.builds(
        Pod,
        name=st.integers(0, 6).map(lambda i: worker_name("digits", i)) | st.sampled_from(["x", "digits-worker-", ""]),
        uid=st.uuids().map(str),
        index=st.none() | st.integers(0, 6),
        owner_uid=st.sampled_from([JOB_UID, JOB_UID, JOB_UID, "another"]),
        phase=st.sampled_from(PodPhase),
        created_at=times,
        started_at=times,
        finished_at=times,
        deleting=st.sampled_from([False, False, True]),
        node=st.sampled_from(["", "a", "b"]),
        exit_code=st.sampled_from([None, 0, 1, 137, 139, 143]),
        reason=st.sampled_from(["", "Error", "OOMKilled", "Evicted", "NodeLost"]),
        message=messages,
        disruption_target=st.sampled_from([False, False, True]),
    ),
    max_size=8,
    unique_by=lambda pod: pod.name,
)
some_jobs = st.builds(
    lambda low, more, spare, **fields: a_job(min=low, desired=low + more, max=low + more + spare, **fields),
    low=st.integers(0, 3),
    more=st.integers(0, 3),
    spare=st.integers(0, 3),
    restart_policy=st.sampled_from(RestartPolicy),
    clean_pod_policy=st.sampled_from(CleanPodPolicy),
    backoff_limit=st.integers(0, 3),
    deadline_s=st.none() | st.floats(0, 100),
    ttl_s=st.none() | st.floats(0, 100),
    suspend=st.booleans(),
    cancel=st.sampled_from([False, False, False, True]),
    goal=st.sampled_from([None, None, None, Goal(Timestamp(NOW + 900)), Goal(Timestamp(NOW), 0.5, zones=("a", "b"))]),
)
lost_nodes = st.frozensets(st.sampled_from(["a", "b"]))


@settings(max_examples=60)
@given(data=st.data(), job=some_jobs, first=some_pods, then=some_pods, lost=lost_nodes)
def test_the_order_of_pods_makes_no_difference(data, job, first, then, lost):
    job, _ = a_step(job, first)
    kept = data.draw(st.lists(st.sampled_from(first), unique_by=lambda pod: pod.uid)) if first else []
    pods = [*kept, *(pod for pod in then if pod.name not in {other.name for other in kept})]
    shuffled = data.draw(st.permutations(pods))
    observed, other = observe(pods=tuple(pods), lost_nodes=lost), observe(pods=tuple(shuffled), lost_nodes=lost)
    decision = reconcile(job, observed, NOW + 1)
    assert reconcile(job, other, NOW + 1) == decision
    check_decision(job, observed, decision)


@settings(max_examples=60)
@given(job=some_jobs, pods=some_pods, lost=lost_nodes)
def test_every_date_that_is_due_is_covered_by_the_requeue(job, pods, lost):
    job, decision = a_step(job, pods, lost_nodes=lost)
    status = job.status
    due = []
    if status.phase.terminal and status.completion_time is not None and job.ttl_s is not None:
        due = [status.completion_time + job.ttl_s]
    elif not status.phase.terminal and status.start_time is not None and job.deadline_s is not None:
        due = [status.start_time + job.deadline_s]
    for at in due:
        if not decision.actions or at > NOW:
            assert decision.requeue_s is not None
            assert decision.requeue_s <= max(0.0, at - NOW) + 1e-6


@settings(max_examples=30)
@given(desired=st.integers(1, 6), to=st.integers(1, 6), named=st.sets(st.integers(0, 5)))
def test_scaling_restarts_no_worker_and_named_removal_removes_exactly_these(desired, to, named):
    pods = [a_pod(index) for index in range(desired)]
    settled, _ = a_step(a_job(desired=desired, max=6), pods)
    for index_sets, changed in (
        (set(range(to, desired)), replace(settled, desired=to)),
        (
            {index for index in named if index < desired},
            replace(
                settled,
                min=0,
                desired=desired - len([index for index in named if index < desired]),
                remove_workers=tuple(WorkerRef(pod.name, pod.uid) for pod in pods if pod.index in named),
            ),
        ),
    ):
        after, decision = a_step(changed, pods)
        assert not any(isinstance(action, DeleteWorker) for action in decision.actions)
        assert deleted(a_step(after, pods)[1]) == [worker_name("digits", index) for index in sorted(index_sets)]


def objects(*paths: tuple[str, ...]) -> st.SearchStrategy[dict[str, object]]:
    """Objects with anything at all at some of these fields."""

    def build(values: list[object]) -> dict[str, object]:
        root: dict[str, object] = {}
        for path, value in zip(paths, values, strict=True):
            if value == "absent":
                continue
            here = root
            for part in path[:-1]:
                here = here.setdefault(part, {})  # type: ignore[assignment]
            here[path[-1]] = value
        return root

    return st.tuples(*(st.just("absent") | JSON for _ in paths)).map(list).map(build)


SPEC = ("minReplicas", "maxReplicas", "backoffLimit", "activeDeadlineSeconds", "suspend", "removeWorkers", "policy")
STATUS = (
    "phase",
    "workers",
    "restarts",
    "conditions",
    "interruptions",
    "backoff",
    "startTime",
    "generations",
    "desired",
)


@settings(max_examples=60)
@given(
    spec=objects(
        *((field,) for field in SPEC), ("replicaSpecs", "Worker", "replicas"), ("replicaSpecs", "Worker", "template")
    ),
    status=objects(*((field,) for field in STATUS)),
    pod=objects(
        ("metadata", "labels"), ("metadata", "deletionTimestamp"), ("status", "containerStatuses"), ("status", "phase")
    ),
)
def test_objects_of_any_content_do_not_raise(spec, status, pod):
    manifest = {"metadata": {"name": "digits", "uid": JOB_UID}, "spec": spec, "status": status}
    pod.setdefault("metadata", {}).update(  # type: ignore[union-attr]
        {"name": "digits-worker-0", "uid": "u", "ownerReferences": [{"uid": JOB_UID, "controller": True}]}
    )
    job, observed = ElasticJob.from_manifest(manifest), observe(pods=(Pod.from_manifest(pod),))
    for _ in range(3):
        decision = reconcile(job, observed, NOW)
        assert from_json(JobStatus, to_json(decision.status)) is not None
        job = stored(job, decision.status)


@settings(max_examples=60)
@given(status=shaped(JobStatus), suspend=st.booleans(), share=st.none() | st.integers(0, 3))
def test_a_status_of_any_content_can_be_gone_on_from(status, suspend, share):
    spec = {"maxReplicas": 4, "suspend": suspend, "activeDeadlineSeconds": 60, "ttlSecondsAfterFinished": 60}
    spec |= {"replicaSpecs": {"Worker": {"replicas": 3}}}
    manifest = {"metadata": {"name": "digits", "uid": JOB_UID}, "spec": spec, "status": status}
    job = ElasticJob.from_manifest(manifest)
    pods = (a_pod(0), an_end(1, 1, message=termination_message("application")), an_end(2, 137, reason="OOMKilled"))
    given_ = None if share is None else ShareStatus(share, message="shared")
    newer = GroupGeneration(job.status.generation + 1, ("digits-worker-0",), formed_at=Timestamp(NOW))
    for _ in range(3):
        decision = reconcile(job, observe(pods=pods, share=given_, generations=(newer,)), NOW)
        written = json.loads(json.dumps(to_json(decision.status), allow_nan=False))
        job = replace(job, status=from_json(JobStatus, written))
        assert decision.requeue_s is None or decision.requeue_s >= 0
