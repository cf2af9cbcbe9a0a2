"""Pods as the cluster reports them, what keeps them from starting, and how many workers are where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticctl.api.codec import from_json
from elasticctl.api.observed.workers import Headcount, Pod, PodWait, count_workers, read_wait
from elasticctl.api.spec import PodPhase, worker_labels, worker_name
from elasticctl.api.status import JobStatus
from tests.support.any_json import JSON


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "status"]), JSON))
@settings(max_examples=50)
def test_any_object_is_a_pod(data: dict[str, Any]) -> None:
    assert isinstance(Pod.from_manifest(data).phase, PodPhase)


def test_a_pod_shows_how_its_worker_ended() -> None:
    pod = Pod.from_manifest(
        {
            "metadata": {
                "name": worker_name("a", 2),
                "uid": "p",
                "labels": worker_labels("a", 2),
                "ownerReferences": [{"uid": "x"}, {"uid": "u", "controller": True}],
            },
            "spec": {"nodeName": "n", "containers": [{"name": "side"}, {"name": "elasticjob-worker"}]},
            "status": {
                "phase": "Failed",
                "containerStatuses": [
                    {"name": "side", "state": {"terminated": {"exitCode": 0}}},
                    {"name": "elasticjob-worker", "state": {"terminated": {"exitCode": 7, "message": "oh"}}},
                ],
                "conditions": [{"type": "DisruptionTarget", "status": "True"}],
            },
        }
    )
    assert (pod.name, pod.index, pod.owner_uid, pod.node) == ("a-worker-2", 2, "u", "n")
    assert (pod.ended, pod.exit_code, pod.message, pod.disruption_target) == (True, 7, "oh", True)


@pytest.mark.parametrize(("containers", "exit_code"), [(["trainer", "aide"], 3), (["aide", "elasticjob-worker"], None)])
def test_the_exit_code_is_the_workers_own_whatever_the_order_of_statuses(
    containers: list[str], exit_code: int | None
) -> None:
    statuses = [
        {"name": "aide", "state": {"terminated": {"exitCode": 0}}},
        {"name": "trainer", "state": {"terminated": {"exitCode": 3}}},
    ]
    spec = {"containers": [{"name": name} for name in containers]}
    assert Pod.from_manifest({"spec": spec, "status": {"containerStatuses": statuses}}).exit_code == exit_code


@pytest.mark.parametrize(
    ("states", "has_stopped"),
    [
        ([{"terminated": {"exitCode": 0}}, {"terminated": {"exitCode": 1}}], True),
        ([{"terminated": {"exitCode": 0}}, {"running": {}}], False),
        ([{"terminated": {"exitCode": 0}}], False),
        ([], False),
    ],
)
def test_a_pod_has_stopped_once_each_of_its_containers_has_ended(states: list[Any], has_stopped: bool) -> None:
    spec = {"containers": [{"name": "side"}, {"name": "elasticjob-worker"}]}
    pod = Pod.from_manifest(
        {
            "spec": spec,
            "status": {
                "phase": "Running",
                "containerStatuses": [
                    {"name": item["name"], "state": state}
                    for item, state in zip(spec["containers"], states, strict=False)
                ],
            },
        }
    )
    assert (pod.has_stopped, pod.ended) == (has_stopped, False)


@pytest.mark.parametrize(
    ("reason", "annotations", "drained"),
    [
        ("EvictionByEvictionAPI", {}, True),
        ("EvictionByEvictionAPI", {"elastic.pytorch.org/preempted": "true"}, False),
        ("PreemptionByScheduler", {}, False),
        ("DeletionByTaintManager", {}, False),
    ],
)
def test_only_an_eviction_is_a_drain(reason: str, annotations: dict[str, str], drained: bool) -> None:
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": reason}]
    pod = Pod.from_manifest({"metadata": {"annotations": annotations}, "status": {"conditions": conditions}})
    assert (pod.disruption_target, pod.drained) == (True, drained)


def waits(status: dict[str, Any], **spec: Any) -> PodWait | None:
    return read_wait({"spec": spec, "status": {"phase": "Pending", **status}})


def test_reasons_why_a_pod_does_not_start() -> None:
    placing = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes."}
    assert waits({"conditions": [placing]}) == PodWait("Unschedulable", "0/3 nodes.")
    assert waits({"conditions": [placing], "phase": "Running"}) is None
    gate = {
        **placing,
        "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
    }
    assert waits({"conditions": [gate]}, schedulingGates=[{"name": "a.b/c"}]) == PodWait(
        "SchedulingGated", "Scheduling is blocked due to non-empty scheduling gates: a.b/c"
    )
    for part in ("initContainerStatuses", "containerStatuses"):
        found = waits({part: [{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]})
        assert found == PodWait("ErrImagePull", "no such image")
        assert waits({part: [{"state": {"waiting": {"reason": "ContainerCreating"}}}]}) is None
    assert waits({"reason": "Unschedulable", "message": "waits for 1 GPU"}) == PodWait(
        "Unschedulable", "waits for 1 GPU"
    )
    assert waits({}) is None


def test_a_pod_waits_for_init_containers_but_not_for_sidecars() -> None:
    state = {"running": {"startedAt": "2026-11-26T05:51:14Z"}}
    statuses = [{"name": "mesh", "state": {"running": {}}}, {"name": "data", "state": state}]
    init_containers = [{"name": "mesh", "restartPolicy": "Always"}, {"name": "data"}]
    found = waits({"initContainerStatuses": statuses}, initContainers=init_containers)
    assert found == PodWait("Initializing", "init container data has been running since 2026-11-26T05:51:14Z")
    assert waits({"initContainerStatuses": statuses[:1]}, initContainers=init_containers) is None


def test_an_init_container_that_fails_is_the_workers_end() -> None:
    end = {"exitCode": 7, "reason": "Error", "message": "no data set\n", "finishedAt": "2026-11-26T05:51:14Z"}
    failed = {
        "phase": "Failed",
        "initContainerStatuses": [
            {"name": "ready", "state": {"terminated": {"exitCode": 0}}},
            {"name": "data", "state": {"terminated": end}},
        ],
        "containerStatuses": [{"name": "elasticjob-worker", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    pod = Pod.from_manifest({"status": failed})
    assert (pod.exit_code, pod.message) == (7, "init container data exited with code 7: no data set")
    assert Pod.from_manifest({"status": {**failed, "phase": "Pending"}}).exit_code is None


def test_a_pod_beyond_its_own_deadline_says_so_before_its_workers_message() -> None:
    ended = {"name": "w", "state": {"terminated": {"exitCode": 143, "message": "got SIGTERM"}}}
    words = "Pod was active on the node longer than the specified deadline"
    status = {"phase": "Failed", "reason": "DeadlineExceeded", "message": words, "containerStatuses": [ended]}
    assert Pod.from_manifest({"status": status}).message == words


def status(*workers: tuple[str, str], **fields: Any) -> JobStatus:
    """A running job's, of these workers by phase and node; the first three are its group."""
    roster = [
        {"name": f"a-worker-{index}", "uid": str(index), "index": index, "phase": phase, "node": node}
        for index, (phase, node) in enumerate(workers)
    ]
    group = {
        "generation": 1,
        "workers": [f"a-worker-{index}" for index in range(3)],
        "firstStepAt": "2026-01-01T00:00:00Z",
    }
    given = {"phase": "Running", "active": len(workers), "workers": roster, "generations": [group], **fields}
    return from_json(JobStatus, given)


FOUR = [("Running", "n0"), ("Running", "n1"), ("Pending", "n2"), ("Pending", "")]


def test_each_worker_is_counted_by_its_pod_and_its_group() -> None:
    assert count_workers(status(*FOUR)) == Headcount(placed=3, running=2, starting=1, training=2)
    newcomer = [("Running", "n0")] * 4
    assert count_workers(status(*newcomer)) == Headcount(placed=4, running=4, starting=1, training=3)


@pytest.mark.parametrize("doing", ["waiting", "preparing", "starting", "loading", "first step"])
def test_no_worker_trains_before_the_first_step_of_a_group(doing: str) -> None:
    assert count_workers(status(*FOUR, activity={"doing": doing})) == Headcount(3, 2, starting=3, training=0)


@pytest.mark.parametrize("doing", ["training", "running", "draining", "hung", "exporting"])
def test_from_then_on_the_group_does(doing: str) -> None:
    assert count_workers(status(*FOUR, activity={"doing": doing})).training == 2


def test_workers_that_leave_or_have_ended_are_not_there() -> None:
    found = status(*FOUR)
    leaving = [{"name": "a-worker-0", "phase": "Running", "node": "n", "removal": "ScaledIn"}]
    ended = [{"name": "a-worker-1", "phase": "Failed", "node": "n", "cause": "NodeLost"}]
    assert count_workers(status(workers=leaving + ended)) == Headcount()
    assert count_workers(found).placed == 3


def test_without_a_known_group_running_workers_count_as_training() -> None:
    assert count_workers(status(*FOUR, generations=[])) == Headcount(3, 2, starting=1, training=2)
    assert count_workers(status(*FOUR, generations=[], phase="Restarting")).training == 0
