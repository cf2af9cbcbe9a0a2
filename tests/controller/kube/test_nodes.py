"""When a node counts as lost."""

from __future__ import annotations

from typing import Any

import pytest

from elasticctl_controller.kube.nodes import BLIND_S, OUT_OF_SERVICE, SETTLE_S, UNSEEN_GRACE_S, NodeHealth, NodeNotices
from elasticctl_controller.kube.pruning import prune_node
from tests.support.controller.samples import Clock


def node(name: str, ready: str = "True", *taints: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name},
        "spec": {"taints": [{"key": key} for key in taints]},
        "status": {"conditions": [{"type": "Ready", "status": ready}]},
    }


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> NodeHealth:
    health = NodeHealth(1.0, clock)
    for name in ("a", "b"):
        health.node_changed(None, node(name))
    return health


def test_a_deleted_node_is_lost_immediately(health: NodeHealth) -> None:
    health.node_changed(node("a"), None)
    assert health.lost() == {"a"}
    health.node_changed(None, node("a"))  # the machine is back under its name
    assert health.lost() == frozenset()


def test_a_silent_node_is_lost_after_its_grace(health: NodeHealth, clock: Clock) -> None:
    health.node_changed(node("a"), node("a", "Unknown"))
    assert (health.lost(), health.next_loss_s()) == (frozenset(), 1.0)
    clock.now += 0.5
    health.node_changed(node("a", "Unknown"), node("a", "Unknown", "unreachable"))  # no new grace for news of it
    clock.now += 0.5
    assert (health.lost(), health.next_loss_s()) == ({"a"}, None)


def test_a_node_that_is_back_in_time_was_never_lost(health: NodeHealth, clock: Clock) -> None:
    health.node_changed(node("a"), node("a", "Unknown"))
    clock.now += 0.9
    health.node_changed(node("a", "Unknown"), node("a"))
    clock.now += 5
    assert health.lost() == frozenset()


def test_a_kubelet_that_speaks_is_given_longer(health: NodeHealth, clock: Clock) -> None:
    health.node_changed(node("a"), node("a", "False"))
    clock.now += 5
    assert health.lost() == frozenset()
    health.node_changed(node("a", "False"), node("a", "Unknown"))
    clock.now += 1
    assert health.lost() == {"a"}


def test_a_node_that_is_marked_as_off_is_lost(health: NodeHealth) -> None:
    health.node_changed(node("a"), node("a", "True", OUT_OF_SERVICE))
    assert health.lost() == {"a"}


def test_a_drained_or_tainted_node_is_not_lost(health: NodeHealth, clock: Clock) -> None:
    taints = ("node.kubernetes.io/unschedulable", "aws-node-termination-handler/spot-itn")
    health.node_changed(node("a"), node("a", "True", *taints))
    clock.now += 60
    assert health.lost() == frozenset()


def test_an_unseen_node_may_still_appear(health: NodeHealth, clock: Clock) -> None:
    assert health.expect_node("new")
    assert not health.expect_node("new")
    assert not health.expect_node("a")
    assert not health.expect_node("")
    clock.now += UNSEEN_GRACE_S - 1
    health.node_changed(None, node("new"))
    health.expect_node("never")
    clock.now += UNSEEN_GRACE_S
    assert health.lost() == {"never"}


def test_nodes_that_are_gone_are_dropped_with_their_pods(health: NodeHealth) -> None:
    health.node_changed(node("a"), None)
    health.drop_unnamed({"a"})
    assert health.lost() == {"a"}
    health.drop_unnamed(set())
    assert health.lost() == frozenset()


def test_if_all_nodes_are_silent_none_is_lost(health: NodeHealth, clock: Clock) -> None:
    for name in ("a", "b"):
        health.node_changed(node(name), node(name, "Unknown"))
    clock.now += 60
    assert (health.lost(), health.next_loss_s()) == (frozenset(), None)
    health.node_changed(node("b", "Unknown"), node("b"))  # one is back: now the other one's silence means something
    assert health.lost() == {"a"}
    health.node_changed(node("b"), node("b", "Unknown"))  # and what counts as lost stays so
    assert health.lost() == {"a"}


def test_silent_nodes_that_are_gone_or_off_are_lost_all_the_same(health: NodeHealth) -> None:
    health.node_changed(node("a"), None)
    health.node_changed(node("b"), node("b", "Unknown", OUT_OF_SERVICE))
    assert health.lost() == {"a", "b"}


def answering(health: NodeHealth, clock: Clock, seconds: float) -> None:
    """The API server answers every two seconds, as the election asks it."""
    until = clock.now + seconds
    while clock.now < until:
        clock.now += 2
        assert not health.note_api_answer()


def test_silence_is_no_evidence_until_the_api_server_has_been_back_for_a_while(
    health: NodeHealth, clock: Clock
) -> None:
    assert health.note_api_answer()
    answering(health, clock, SETTLE_S)
    clock.now += 60  # it is away, and no kubelet can reach it; when it is back, it shows a node as silent
    health.node_changed(node("a"), node("a", "Unknown"))
    clock.now += 1.5
    assert (health.lost(), health.next_loss_s()) == (frozenset(), None)
    assert health.note_api_answer()
    assert (health.lost(), health.next_loss_s()) == (frozenset(), SETTLE_S)
    answering(health, clock, SETTLE_S)
    assert health.lost() == {"a"}
    clock.now += BLIND_S + 1  # it is away again: lost nodes stay lost
    assert health.lost() == {"a"}


def test_while_the_api_server_answers_a_silent_node_is_lost_immediately(health: NodeHealth, clock: Clock) -> None:
    health.note_api_answer()
    answering(health, clock, SETTLE_S + 10)
    health.node_changed(node("a"), node("a", "Unknown"))
    clock.now += 1
    assert health.lost() == {"a"}


def test_a_node_that_is_back_when_all_has_settled_was_never_lost(health: NodeHealth, clock: Clock) -> None:
    health.note_api_answer()
    health.node_changed(node("a"), node("a", "Unknown"))
    clock.now += 5
    health.node_changed(node("a", "Unknown"), node("a"))
    answering(health, clock, SETTLE_S)
    assert health.lost() == frozenset()


def test_a_dead_watch_of_nodes_is_noticed_before_workers_on_new_nodes_count_as_lost() -> None:
    assert UNSEEN_GRACE_S > 35.0  # what a connection's keep-alive takes


def test_nodes_are_named_to_new_workers_until_karpenter_has_brought_one() -> None:
    notices = NodeNotices()
    own = {"metadata": {"name": "own", "labels": {"kubernetes.io/hostname": "own"}}}
    brought = {"metadata": {"name": "brought", "labels": {"karpenter.sh/capacity-type": "spot"}}}
    notices.node_changed(None, prune_node(own))
    assert notices.may_be_named()
    notices.node_changed(None, prune_node(brought))
    assert not notices.may_be_named()
    notices.node_changed(prune_node(brought), None)
    assert notices.may_be_named()
