"""From what a cluster has to what is decided on: claims, pools, projects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticctl.api.codec import Manifest, Timestamp
from elasticctl.api.gpu_types import GKE_GPU_LABEL, INSTANCE_LABEL
from elasticctl.api.podtemplate import GPU_RESOURCE
from elasticctl.api.quota import CPU, CPU_SLOTS, GPU, HELD, Quota
from elasticctl.api.spec import ElasticJob, Sharing
from elasticctl.api.status import Cause, JobStatus, Phase, WorkerStatus
from elasticctl_controller.core.phase import FINISHING
from elasticctl_controller.core.sharing.claims import (
    NOT_YET,
    TO_COME,
    LastGrant,
    Node,
    Project,
    SharedPool,
    Worker,
    build_claim,
    build_pools,
    build_projects,
    is_shared,
    pool_of,
    undecided_grant,
)
from elasticctl_controller.core.sharing.grant_workers import decide
from tests.support.controller.samples import NOW, a_job

NOTHING = LastGrant(0, 0.0)


def template(gpus: int = 0, ranks: int = 1, **spec: Any) -> dict[str, Any]:
    command = ["elasticctl-launch", "--nproc-per-node", str(ranks), "--"]
    limits = {"resources": {"limits": {GPU_RESOURCE: gpus}}} if gpus else {}
    return {"spec": {"containers": [{"name": "elasticjob-worker", "command": command, **limits}], **spec}}


def with_workers(job: ElasticJob, count: int, **status: Any) -> ElasticJob:
    workers = tuple(
        WorkerStatus(f"digits-worker-{n}", f"uid-{n}", n, "Running", f"node-{n}", Timestamp(NOW + n))
        for n in range(count)
    )
    return replace(job, status=JobStatus(phase=Phase.RUNNING, workers=workers, **status))


def node(name: str, gpus: int = 0, slots: int = 0, **labels: str) -> Manifest:
    allocatable = {GPU_RESOURCE: str(gpus), CPU_SLOTS: str(slots)}
    return {"metadata": {"name": name, "labels": labels}, "status": {"allocatable": allocatable}}


@pytest.mark.parametrize(
    "fields",
    [
        {"suspend": True},
        {"cancel": True},
        {"deleting": True},
        {"queue": "team"},
        {"desired": 0, "min": 0},
        {"status": JobStatus(phase=Phase.FAILED)},
        {"template": template(schedulerName="volcano")},
    ],
)
def test_a_job_that_is_over_or_anothers_is_not_shared(fields: dict[str, Any]) -> None:
    assert is_shared(a_job())
    assert is_shared(a_job(template=template(schedulerName="default-scheduler")))
    assert not is_shared(a_job(**fields))


def test_a_job_of_fixed_size_claims_all_or_nothing() -> None:
    claim = build_claim(a_job(desired=3, min=1, template=template(gpus=2)), "t4", NOTHING)
    assert (claim.least, claim.most, claim.slots_per_worker, claim.workers) == (3, 3, 2, ())


def test_once_it_runs_what_it_has_lost_takes_nothing_more_away() -> None:
    job = with_workers(a_job(desired=4, min=2), 3)
    claim = build_claim(job, GPU, LastGrant(4, NOW))
    assert (claim.least, claim.most, claim.granted, claim.changed_at) == (3, 4, 4, NOW)
    assert build_claim(with_workers(a_job(desired=4, min=2), 1), GPU, LastGrant(4, NOW)).least == 2


def test_a_job_of_automatic_size_claims_between_its_bounds() -> None:
    job = a_job(desired=8, min=2, max=8, sharing=Sharing(automatic=True, priority=5), created_at=Timestamp(NOW))
    claim = build_claim(job, GPU, NOTHING)
    assert (claim.least, claim.most, claim.priority, claim.submitted_at, claim.changed_at) == (2, 8, 5, NOW, NOW)


def test_workers_that_go_or_have_gone_are_not_held() -> None:
    job = with_workers(a_job(), 4)
    zero, one, two, three = job.status.workers
    roster = (
        replace(zero, removal="ScaledIn"),
        replace(one, cause=Cause.NODE_LOST),
        two,
        replace(three, started_at=None),
    )
    claim = build_claim(replace(job, status=replace(job.status, workers=roster)), GPU, LastGrant(4, NOW))
    assert claim.workers == (Worker("uid-2", NOW + 2, "node-2"), Worker("uid-3", NOT_YET, "node-3"))


def test_a_job_whose_training_is_done_gets_no_new_workers() -> None:
    claim = build_claim(with_workers(a_job(desired=4), 2, reason=FINISHING), GPU, LastGrant(4, NOW))
    assert (claim.least, claim.most) == (2, 2)


def test_a_job_that_was_never_decided_about_keeps_what_it_has() -> None:
    assert undecided_grant(with_workers(a_job(), 3)) == LastGrant(3, 0.0)
    assert undecided_grant(a_job()) == NOTHING


def test_gpus_are_pooled_by_the_type_in_their_labels() -> None:
    nodes = [
        node("a", 4, **{INSTANCE_LABEL: "g4dn.12xlarge"}),
        node("b", 1, **{GKE_GPU_LABEL: "nvidia-tesla-t4"}),
        node("c", 8, **{INSTANCE_LABEL: "p4d.24xlarge"}),
        node("d", 2, **{INSTANCE_LABEL: "homemade"}),
        node("e", 0),
        node("f", 0, slots=4),
    ]
    assert build_pools(nodes, (), (), {}) == (
        SharedPool("a100", (Node("c", 8),)),
        SharedPool(CPU, (Node("f", 4),), "CPU slot"),
        SharedPool(GPU, (Node("d", 2),)),
        SharedPool("t4", (Node("a", 4), Node("b", 1))),
    )


def test_what_other_jobs_hold_is_not_there_to_be_shared() -> None:
    other = with_workers(a_job(queue="team", template=template(gpus=2)), 2)
    gone = replace(other.status.workers[1], cause=Cause.KILLED)
    other = replace(other, status=replace(other.status, workers=(other.status.workers[0], gone)))
    nodes = [node("node-0", 4), node("node-1", 4)]
    assert build_pools(nodes, (), [other], {}) == (SharedPool(GPU, (Node("node-0", 2), Node("node-1", 4))),)


def test_a_node_that_a_template_names_holds_nothing_before_it_accepts_the_pod() -> None:
    """Otherwise a template that names a node could have others' workers taken from it."""
    other = with_workers(a_job(queue="team", template=template(gpus=10**15)), 1)
    sent = replace(other.status.workers[0], started_at=None, phase="Pending")
    other = replace(other, status=replace(other.status, workers=(sent,)))
    assert build_pools([node("node-0", 4)], (), [other], {}) == (SharedPool(GPU, (Node("node-0", 4),)),)


def test_a_cordoned_node_has_room_for_those_that_are_on_it() -> None:
    job = with_workers(a_job(template=template(gpus=2)), 1)
    nodes = [
        node("node-0", 8) | {"spec": {"unschedulable": True}},
        node("node-1", 8) | {"spec": {"unschedulable": True}},
    ]
    assert build_pools(nodes, [job], (), {}) == (SharedPool(GPU, (Node("node-0", 2),)),)


def test_nodes_that_would_come_count_as_there() -> None:
    assert build_pools([node("a", 4)], (), (), {GPU: 16, "t4": 0}) == (
        SharedPool(GPU, (Node("a", 4), Node(TO_COME, 12))),
    )
    assert build_pools([node("a", 4)], (), (), {GPU: 2}) == (SharedPool(GPU, (Node("a", 4),)),)


def test_what_other_pods_hold_is_not_there_to_be_shared_nor_still_to_come() -> None:
    taken = node("node-0", 4, slots=2)
    taken["status"][HELD] = {GPU_RESOURCE: 3}
    other = with_workers(a_job(queue="team", template=template(gpus=1)), 1)
    pools = build_pools([taken, node("node-1", 4)], (), [other], {GPU: 9})
    assert pools == (
        SharedPool(CPU, (Node("node-0", 2),), "CPU slot"),
        SharedPool(GPU, (Node("node-0", 0), Node("node-1", 4), Node(TO_COME, 1))),
    )


def test_a_number_that_cannot_be_meant_does_not_end_the_sharing_of_all() -> None:
    job = a_job(template=template(gpus="9" * 5000))  # type: ignore[arg-type]
    pools = build_pools([node("a", "9" * 5000), node("b", 4)], [job], (), {})  # type: ignore[arg-type]
    claim = build_claim(job, pool_of(job, {GPU}), LastGrant(0, NOW))
    assert decide(pools, (), (claim,), NOW).grants[job.key].workers == 0


def affinity(label: str, *values: str) -> dict[str, Any]:
    term = {"matchExpressions": [{"key": label, "operator": "In", "values": [*values]}]}
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
    return {"affinity": {"nodeAffinity": required}}


def test_a_job_takes_of_the_pool_that_its_placement_names() -> None:
    t4 = a_job(template=template(1, **affinity(INSTANCE_LABEL, "g4dn.xlarge", "g4dn.2xlarge")))
    assert pool_of(t4, {"t4", "a100"}) == "t4"
    assert pool_of(t4, set()) == "t4", "also where there is none: it waits for one"
    plain = a_job(template=template(1))
    assert pool_of(plain, {"a100", CPU}) == "a100", "the only one there is"
    assert pool_of(plain, {"t4", "a100"}) == GPU
    ranks = a_job(template=template(0, ranks=2))
    assert (pool_of(ranks, {CPU, GPU}), pool_of(ranks, {GPU})) == (CPU, "")


def test_ranks_without_gpus_take_a_slot_each() -> None:
    assert build_claim(a_job(template=template(0, ranks=3)), CPU, NOTHING).slots_per_worker == 3


def test_projects_come_from_quotas_of_any_content() -> None:
    quotas = [Quota("a", 2.0, {"t4": 4}, {"t4": 8}).to_manifest(), {"metadata": {"name": "b"}, "spec": {"weight": "x"}}]
    assert build_projects(quotas) == (Project("a", 2.0, {"t4": 4}, {"t4": 8}), Project("b"))
