"""What the cluster says to workers that have to go, and when they leave."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elasticctl.api.status import Cause, WorkerStatus
from elasticctl_controller.core.interruption_notices import (
    LEAVE_S,
    PATIENCE_S,
    TOGETHER_S,
    LeaveNotice,
    Notices,
    Replacements,
    lead_s,
    read_node,
    who_leaves,
)


def a_node(*taints: str, ready: str = "True", message: str = "") -> dict[str, Any]:
    return {
        "metadata": {"name": "n"},
        "spec": {"taints": [{"key": key, "effect": "NoSchedule"} for key in taints]},
        "status": {"conditions": [{"type": "Ready", "status": ready, "message": message}]},
    }


@pytest.mark.parametrize(
    ("taint", "who"),
    [
        ("karpenter.sh/disrupted", "Karpenter"),
        ("ToBeDeletedByClusterAutoscaler", "autoscaler"),
        ("aws-node-termination-handler/spot-itn", "AWS"),
        ("aws-node-termination-handler/rebalance-recommendation", "AWS"),
        ("cloud.google.com/impending-node-termination", "Google"),
    ],
)
def test_the_notice_of_a_node_names_who_takes_it_away(taint: str, who: str) -> None:
    notice = read_node(a_node("nvidia.com/gpu", taint))
    assert notice is not None
    assert (who in notice.reason, notice.deadline, notice.closed) == (True, None, True)


def test_a_node_with_notice_is_avoided_only_while_it_accepts_pods() -> None:
    node = a_node("aws-node-termination-handler/rebalance-recommendation")
    node["spec"]["taints"][0]["effect"] = "PreferNoSchedule"
    assert [read_node(node), read_node({**node, "spec": {**node["spec"], "unschedulable": True}})] == [
        LeaveNotice("AWS recommends leaving its node"),
        LeaveNotice("AWS recommends leaving its node", closed=True),
    ]


@pytest.mark.parametrize("taint", ["nvidia.com/gpu", "node.kubernetes.io/unschedulable", "karpenter.sh/unregistered"])
def test_a_cordoned_node_gives_no_notice(taint: str) -> None:
    assert read_node(a_node(taint)) is None


def test_a_kubelet_that_shuts_down_leaves_no_time() -> None:
    notice = read_node(a_node(ready="False", message="node is shutting down"))
    assert notice is not None
    assert notice.leave_at(LEAVE_S) <= 0
    assert read_node(a_node(ready="False", message="container runtime is down")) is None


def test_the_earliest_deadline_counts() -> None:
    notices = Notices(reported={"u": LeaveNotice("rebalance")}, given={"u": LeaveNotice("drained", 130.0)})
    assert notices.of("u") == LeaveNotice("drained", 130.0)
    notices.reported["u"] = LeaveNotice("reclaimed", 120.0)
    assert notices.of("u") == LeaveNotice("reclaimed", 120.0)
    assert notices.of("v") is None


def test_a_restarted_service_knows_who_has_to_go() -> None:
    workers = [WorkerStatus("a", "u"), WorkerStatus("b", "v", notice="AWS"), WorkerStatus("c", "w", notice="AWS")]
    workers[2] = WorkerStatus("c", "w", notice="AWS", cause=Cause.PREEMPTED)
    assert Notices.restored(workers).reported == {"v": LeaveNotice("AWS")}


def test_a_worker_leaves_earlier_where_steps_and_saves_take_long() -> None:
    assert lead_s(0.1, 2.0) == LEAVE_S
    assert lead_s(30.0, 20.0) > 50.0


HELD = {"a": LeaveNotice("x", 220.0), "b": LeaveNotice("x", 200.0), "c": LeaveNotice("x")}


@pytest.mark.parametrize(
    ("others", "now", "leave", "again_at"),
    [
        (Replacements(), 100.0, (), 185.0),
        (Replacements(3), 100.0, ("b", "a", "c"), math.inf),
        (Replacements(5), 100.0, ("b", "a", "c"), math.inf),
        (Replacements(1, more=True, since=100.0), 100.0, (), 130.0),
        (Replacements(1, more=True, since=180.0), 181.0, (), 185.0),
        (Replacements(1, more=True, since=100.0), 100.0 + PATIENCE_S, ("b",), math.inf),
        (Replacements(1), 100.0, ("b",), math.inf),
        (Replacements(), 185.0, ("b",), math.inf),
        (Replacements(), 205.0 - TOGETHER_S, ("b", "a"), math.inf),
        (Replacements(2), 185.0, ("b", "a"), math.inf),
    ],
)
def test_who_leaves_when(others: Replacements, now: float, leave: tuple[str, ...], again_at: float) -> None:
    assert who_leaves(HELD, others, LEAVE_S, now) == (leave, again_at)


def test_no_worker_leaves_that_may_stay() -> None:
    assert who_leaves({}, Replacements(2), LEAVE_S, 100.0) == ((), math.inf)
