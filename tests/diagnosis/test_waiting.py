"""Why workers cannot start: who refuses them, who has no place for them, whether a node comes, what is missing."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl.api.spec import ElasticJob
from elasticctl.diagnosis import Case, Finding, Observations, Severity, diagnose
from tests.support.job_samples import AT, at, job

NOW = AT + 60.0
QUIET: dict[str, Any] = {"interruptions": [], "scalings": [], "restarts": {}}

NOTHING = Observations()


def case(
    *pods: dict[str, Any], holders: dict[str, int] | None = None, seen: Observations = NOTHING, **status: Any
) -> Case:
    manifest = job(**{**QUIET, **status})
    manifest["metadata"]["namespace"] = "ml"
    return Case(ElasticJob.from_manifest(manifest), pods, NOW, holders or {}, seen)


def pod(index: int = 0, phase: str = "Pending", node: str = "", **status: Any) -> dict[str, Any]:
    metadata = {"name": f"digits-worker-{index}", "uid": f"uid-{index}", "creationTimestamp": at(50)}
    return {"metadata": metadata, "spec": {"nodeName": node}, "status": {"phase": phase, **status}}


def waiting(reason: str, message: str, index: int = 0) -> dict[str, Any]:
    return pod(index, containerStatuses=[{"state": {"waiting": {"reason": reason, "message": message}}}])


def unplaced(index: int = 0, reason: str = "Unschedulable", message: str = "0/3 nodes.", **spec: Any) -> dict[str, Any]:
    placing = {"type": "PodScheduled", "status": "False", "reason": reason, "message": message}
    found = pod(index, conditions=[placing])
    return {**found, "spec": spec}


def held(reason: str, message: str) -> list[dict[str, Any]]:
    return [{"type": "WorkersWaiting", "status": "True", "reason": reason, "message": message}]


def event(who: str, reason: str, message: str, second: float = 20, index: int = 0) -> dict[str, Any]:
    about = {"kind": "Pod", "name": f"digits-worker-{index}", "uid": f"uid-{index}"}
    said = {"reason": reason, "message": message, "lastTimestamp": at(second)}
    return {"involvedObject": about, "source": {"component": who}, **said}


def first(of: Case) -> Finding:
    return diagnose(of)[0]


def named(of: Case) -> dict[str, Finding]:
    return {finding.rule: finding for finding in diagnose(of)}


def test_no_room_names_the_holders() -> None:
    message = "waits for 1 GPU: 0 of 2 on this machine are free"
    pods = [pod(0, reason="Unschedulable", message=message)]
    found = first(case(*pods, phase="Pending", active=1, holders={"train": 1, "big": 4}))
    assert found.rule == "no-room"
    assert found.decisive
    assert found.text == f"worker-0 {message}. Held by big (4 GPUs) and train (1 GPU)."
    assert found.mends[0].command == "elasticctl suspend big"


def test_no_room_for_some_is_a_warning_while_the_others_train() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes."}
    pods = [pod(0, "Running"), pod(1, "Running"), pod(2, conditions=[condition]), pod(3, conditions=[condition])]
    found = named(case(*pods))
    assert found["no-room"].text == "2 workers are waiting to be placed. worker-2 cannot be placed: 0/3 nodes."
    assert found["no-room"].mends[0].command == "elasticctl scale digits --to 2"
    assert "training" in found


@pytest.mark.parametrize(
    ("reason", "rule"),
    [
        ("ImagePullBackOff", "image-not-pulled"),
        ("ErrImagePull", "image-not-pulled"),
        ("CreateContainerConfigError", "secret-missing"),
        ("CreateContainerError", "container-not-made"),
    ],
)
def test_a_container_that_cannot_be_made(reason: str, rule: str) -> None:
    found = first(case(waiting(reason, 'secret "wandb" not found'), phase="Pending"))
    assert (found.rule, found.severity) == (rule, Severity.ERROR)
    assert 'secret "wandb" not found' in found.text


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            'pods "digits-worker-2" is forbidden: exceeded quota: team, requested: pods=1, limited: pods=2',
            "kubectl describe resourcequota -n ml",
        ),
        (
            'pods "digits-worker-2" is forbidden: error looking up service account: serviceaccount "gpu" not found',
            "kubectl create serviceaccount gpu -n ml",
        ),
        (
            'pods "digits-worker-2" is forbidden: maximum memory usage per Container is 1Gi, but limit is 2Gi',
            "kubectl describe limitrange -n ml",
        ),
        (
            "pod digits-worker-2 exists, and it does not belong to this job",
            "kubectl delete pod digits-worker-2 -n ml",
        ),
        (
            'pods "digits-worker-2" is forbidden: no PriorityClass with name urgent was found',
            "elasticctl rerun digits --set PATH=VALUE",
        ),
    ],
)
def test_a_refusal_is_reported_in_the_servers_words_with_a_command(words: str, command: str) -> None:
    found = first(case(phase="Pending", active=2, conditions=held("FailedCreate", words)))
    assert (found.rule, found.severity, found.decisive) == ("refused", Severity.ERROR, True)
    assert found.text == (
        f"2 workers of 4 cannot be created: {words}. It will continue by itself within seconds, once that is changed."
    )
    assert found.mends[0].command == command


def test_a_refusal_of_some_is_reported_while_the_others_train() -> None:
    found = named(case(pod(0, "Running"), active=3, conditions=held("FailedCreate", "exceeded quota: team")))
    assert found["refused"].text.startswith("1 worker of 4 cannot be created: exceeded quota: team.")
    assert not found["refused"].decisive
    assert "training" in found


def test_a_refusal_that_is_over_is_not_reported() -> None:
    over = [{**held("FailedCreate", "exceeded quota")[0], "status": "False"}]
    assert "refused" not in named(case(phase="Pending", conditions=over))
    assert "refused" not in named(case(phase="Failed", conditions=held("FailedCreate", "exceeded quota")))


def test_another_pod_with_a_workers_name_is_named() -> None:
    words = "pod digits-worker-1 has a worker's name and does not belong to this job"
    found = first(case(phase="Pending", conditions=held("NameTaken", words)))
    assert found.text == f"A worker cannot be created: {words}."
    assert found.mends[0].command == "kubectl delete pod digits-worker-1 -n ml"


def test_a_scheduler_that_is_not_there() -> None:
    words = 'digits-worker-0: its scheduler "typo" has not processed it'
    found = first(case(pod(0), phase="Pending", conditions=held("NoScheduler", words)))
    assert (
        found.text
        == 'worker-0: its scheduler "typo" has not processed it: perhaps no scheduler of that name is running.'
    )
    assert "starting" not in named(case(pod(0), phase="Pending", conditions=held("NoScheduler", words)))


def test_scheduling_gates_are_named() -> None:
    found = first(case(unplaced(0, "SchedulingGated", "blocked", schedulingGates=[{"name": "a/b"}]), phase="Pending"))
    assert found.rule == "gated"
    assert found.text == ("worker-0 cannot be scheduled until its scheduling gates are removed: blocked: a/b.")


def test_a_failed_mount_is_known_from_the_events_of_the_pod() -> None:
    words = 'MountVolume.SetUp failed for volume "conf" : configmap "conf" not found'
    other = event("kubelet", "FailedMount", "of another pod", index=1)
    seen = Observations((event("kubelet", "FailedMount", words), other))
    found = first(case(pod(0, node="node-1"), phase="Pending", seen=seen))
    assert found.rule == "not-mounted"
    assert found.text == f"worker-0 cannot start on node-1: {words}. It is retried automatically."
    assert "not-mounted" not in named(case(pod(0, "Running", "node-1"), seen=seen))


CLAIM = {
    "metadata": {
        "name": "default-dwdn5",
        "creationTimestamp": at(20),
        "labels": {"node.kubernetes.io/instance-type": "g4dn.xlarge"},
    },
}
NOMINATED = event("karpenter", "Nominated", "Pod should schedule on: nodeclaim/default-dwdn5")


@pytest.mark.parametrize(
    ("conditions", "words"),
    [
        ([], "launching g4dn.xlarge"),
        (["Launched"], "launched g4dn.xlarge, which joins the cluster"),
        (["Launched", "Registered"], "has g4dn.xlarge, which is getting ready"),
    ],
)
def test_a_node_that_karpenter_brings_is_reported_and_no_job_must_make_room(conditions: list[str], words: str) -> None:
    claim = {**CLAIM, "status": {"conditions": [{"type": item, "status": "True"} for item in conditions]}}
    found = first(case(unplaced(0), phase="Pending", holders={"big": 4}, seen=Observations((NOMINATED,), (claim,))))
    assert (found.rule, found.severity, found.mends) == ("node-coming", Severity.INFO, ())
    assert found.text.endswith(f"A node is being provisioned: nodeclaim default-dwdn5 {words}, requested 40s ago.")
    assert "Held by" not in found.text


def test_without_the_right_to_read_nodeclaims_the_event_is_quoted() -> None:
    found = first(case(unplaced(0), phase="Pending", holders={"big": 4}, seen=Observations((NOMINATED,), None)))
    words = "A node is being provisioned: Pod should schedule on: nodeclaim/default-dwdn5, said 40s ago."
    assert found.text.endswith(words)
    grown = event("cluster-autoscaler", "TriggeredScaleUp", "pod triggered scale-up: [{pool 1->2 (max: 5)}]")
    found = first(case(unplaced(0), phase="Pending", seen=Observations((grown,))))
    assert "A node is being provisioned: pod triggered scale-up: [{pool 1->2 (max: 5)}], said 40s ago." in found.text


def test_a_node_that_karpenter_has_given_up_does_not_come() -> None:
    for seen in (Observations((NOMINATED,), ()), Observations(({**NOMINATED, "lastTimestamp": at(-1000)},), None)):
        found = first(case(unplaced(0), phase="Pending", holders={"big": 4}, seen=seen))
        assert found.mends[0].command == "elasticctl suspend big"


def test_why_the_autoscaler_brings_none() -> None:
    words = "all available instance types exceed limits for nodepool: default"
    said = event("karpenter", "FailedScheduling", f"Failed to schedule pod, {words}")
    of_scheduler = event("default-scheduler", "FailedScheduling", "0/3 nodes are available")
    found = first(case(unplaced(0), phase="Pending", holders={"big": 4}, seen=Observations((said, of_scheduler))))
    assert found.text.endswith(f"The autoscaler is not adding a node: Failed to schedule pod, {words}.")
    assert found.mends[0].command == "elasticctl suspend big"


@pytest.mark.parametrize("event_", [{}, {"involvedObject": 3}, {"involvedObject": {"uid": "uid-0"}, "message": 7}])
def test_events_of_any_content_raise_nothing(event_: dict[str, Any]) -> None:
    odd = {**event_, "reason": "Nominated", "source": {"component": "karpenter"}}
    assert diagnose(
        case(unplaced(0), pod(1, node="n"), phase="Pending", seen=Observations((odd,), ({}, {"metadata": 3})))
    )


def budget(name: str, selector: Any, kind: str = "") -> dict[str, Any]:
    owners = [{"kind": kind}] if kind else []
    return {"metadata": {"name": name, "ownerReferences": owners}, "spec": {"selector": selector}}


OURS = budget("digits-workers", {"matchLabels": {"job-name": "digits"}}, "ElasticJob")


def test_a_budget_of_the_users_is_reported_and_two_are_too_many() -> None:
    team = budget("team", {"matchLabels": {"job-name": "digits"}})
    found = named(case(seen=Observations(budgets=(OURS, team))))["budget-of-others"]
    assert found.text == "PodDisruptionBudget team covers its workers, so the controller keeps none of its own."
    two = named(case(seen=Observations(budgets=(team, budget("all", {})))))["budgets-of-others"]
    assert two.severity == Severity.WARNING
    assert two.mends[0].command == "kubectl delete pdb team -n ml"
    other = budget("other", {"matchLabels": {"app": "web"}})
    assert "budget-of-others" not in named(case(seen=Observations(budgets=(OURS, other, budget("none", None)))))
