"""What is known of collectives on GPUs, and what is done about failures; with groups that look like those of NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest

from elasticctl_train.inplace.group import ElasticGroup
from elasticctl_train.inplace.lost_peers import nccl
from elasticctl_train.inplace.lost_peers.connections import Connections
from tests.support.train.gpu_groups import OnGpus


class Line:
    """A line to no launcher."""

    generation = 3

    def __init__(self) -> None:
        self.lost: list[str] = []

    def attach(self) -> None:
        pass

    def close(self) -> None:
        pass

    def tell_lost(self, generation: int, why: str) -> None:
        self.lost.append(f"{generation}: {why}")


@pytest.fixture
def line() -> Line:
    return Line()


def member(line: Any, monkeypatch: pytest.MonkeyPatch, failed: str) -> tuple[ElasticGroup, Connections]:
    """One of a group whose NCCL reports a failure."""
    connections = Connections(2)
    groups: Any = [OnGpus("nccl", []), OnGpus("nccl", [], failed)]
    connections.carry(groups)
    connections.settle()
    monkeypatch.setattr(Connections, "none", lambda: connections)
    return ElasticGroup(line), connections


def test_what_groups_do_on_gpus_is_aborted_together_and_once() -> None:
    connections = Connections(2)
    told: list[str] = []
    groups: Any = [OnGpus("nccl", told), OnGpus("gloo", told), OnGpus("nccl", told)]
    connections.carry(groups)
    connections.settle()
    connections.cut()
    connections.cut()
    assert told == ["start", "abort", "abort", "end"]


def test_the_first_failure_is_named() -> None:
    groups: Any = [OnGpus("gloo", [], "COMM_ERROR"), OnGpus("nccl", []), OnGpus("nccl", [], "REMOTE_ERROR")]
    assert nccl.failure(groups) == "REMOTE_ERROR"
    assert not nccl.failure(groups[:2])


def test_a_peer_that_nccl_alone_has_lost_is_reported_and_not_waited_for(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    group, connections = member(line, monkeypatch, "COMM_ERROR")
    group.look_at_gpus()
    assert line.lost == ["3: NCCL reports COMM_ERROR"]
    assert connections.is_cut
    group.look_at_gpus()
    assert len(line.lost) == 1, "aborting makes collectives fail too"


@pytest.mark.parametrize(("failed", "stays"), [("TIMEOUT", True), ("COMM_ERROR", False)])
def test_a_process_ends_where_it_hangs_or_nobody_would_keep_it(
    line: Line, monkeypatch: pytest.MonkeyPatch, failed: str, stays: bool
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(os, "abort", lambda: ended.append(True))
    group, _ = member(line, monkeypatch, failed)
    if not stays:
        group.close()
    group.look_at_gpus()
    assert ended


def test_nothing_is_done_while_nothing_has_failed(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    group, connections = member(line, monkeypatch, "SUCCESS")
    group.look_at_gpus()
    assert not line.lost
    assert not connections.is_cut
