"""Groups that are given up: while they are made or used, on CPUs and on GPUs, and by a rank that is stuck."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import PrefixStore, TCPStore

from elasticctl_train import dist
from elasticctl_train.inplace.connections import GroupConnections, gpu_failure, is_stuck
from elasticctl_train.inplace.group import ElasticGroup
from tests.support.ports import free_port
from tests.support.train import ranks
from tests.support.waiting import wait_until


class OnGpus:
    """A process group as one of NCCL looks, that records the calls it gets."""

    def __init__(self, name: str, calls: list[str], failed: str = "SUCCESS") -> None:
        self._name, self.record, self.failed = name, calls.append, failed

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def name(self) -> str:
        return self._name

    def _group_start(self) -> None:
        self.record("start")

    def abort(self) -> None:
        self.record("abort")

    def _group_end(self) -> None:
        self.record("end")

    def get_error(self) -> Any:
        return SimpleNamespace(name=self.failed)


def give_up_and_meet(port: int) -> None:
    """Rank 1 enters a group alone, its connections are cut, and it joins rank 0 in the next group."""
    is_first = os.environ["RANK"] == "0"
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if is_first else None
    store = server or _connect(port)
    if is_first:
        store.wait(["given up"], timedelta(seconds=240))
    else:
        connections = GroupConnections(2)
        lonely = PrefixStore("first", _connect(port))
        threading.Timer(0.2, connections.cut).start()
        try:
            dist.rejoin(dist.World(), lonely)
        except RuntimeError:
            assert not connections.seal()
        else:
            raise AssertionError("no connection was expected")
        store.set("given up", "")
    world = dist.rejoin(dist.World(), PrefixStore("second", store))
    total = torch.ones(1)
    torch_dist.all_reduce(total)
    assert total.item() == 2
    dist.leave(world)


def lose_the_last(port: int) -> None:
    """The last rank dies once all have published their addresses; the others are cut a moment later."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _connect(port)

    def die() -> None:
        while store.num_keys() < size:
            time.sleep(0.0001)
        os._exit(9)

    if rank == size - 1:
        threading.Thread(target=die, daemon=True).start()
    connections = GroupConnections(size)
    group_store = PrefixStore("group", _connect(port))
    threading.Timer(1.0, connections.cut).start()
    with suppress(RuntimeError):  # gloo may have noticed before the cut
        dist.rejoin(dist.World(), group_store)
        assert not connections.seal(), "the group has formed without one of its ranks"
    os._exit(0)


def freeze_while_taking(port: int, call: str) -> None:
    """Rank 1 freezes after the first of many bytes, and is then killed; rank 0 continues alone."""
    store = _connect(port)
    connections = GroupConnections(2)
    channel = dist.Channel(is_dead=lambda: connections.is_dead)
    world = dist.rejoin(dist.World(channel=channel), PrefixStore("first", _connect(port)))
    assert connections.seal()
    data = torch.full((256 << 20,), 1 - world.rank, dtype=torch.uint8)
    if world.rank == 1:
        take = torch_dist.irecv if call == "send" else partial(torch_dist.broadcast, async_op=True)
        taking = take(data, 0, group=channel.group)
        while not data[0]:
            assert taking is not None  # keeps the operation alive
        store.set("frozen", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def kill_and_cut() -> None:
        peer = int(store.get("frozen"))
        wait_until(lambda: Path(f"/proc/{peer}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        os.kill(peer, signal.SIGKILL)
        connections.cut()

    threading.Thread(target=kill_and_cut, daemon=True).start()
    with pytest.raises(dist.GroupOver, match="never ends"):
        world.send(data, 1) if call == "send" else world.share(data, 0)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    world = dist.rejoin(world, PrefixStore("next", _connect(port)))
    torch_dist.all_reduce(torch.ones(1))
    dist.leave(world)


def _connect(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)


def test_a_rank_that_gave_up_a_group_joins_the_next_one() -> None:
    """Its keys in the store have the same names, although it has created one more group."""
    assert ranks.run(give_up_and_meet, 2, free_port()) == [0, 0]


def test_ranks_whose_peer_dies_before_connecting_are_freed() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(lose_the_last, 4, server.port) == [0, 0, 0, 9]


def test_connections_opened_after_the_cut_are_shut_down_too() -> None:
    connections = GroupConnections(2)
    connections.cut()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late = _connect(server.port)
    late.set_timeout(timedelta(seconds=240))
    with pytest.raises(RuntimeError) as cut:
        late.wait(["never set"])
    assert "timeout" not in str(cut.value)
    assert not connections.seal()


def test_a_cut_group_is_known_before_a_gpu_can_notice() -> None:
    connections = GroupConnections(2)
    known: list[bool] = []
    group: Any = OnGpus("nccl", [])
    group.record = lambda word: known.append(connections.is_cut)
    connections.add_gpu_groups([group])
    assert not connections.is_cut
    connections.cut()
    connections.seal()
    assert known == [True] * 3


def test_no_peer_is_waited_for_while_nccl_still_listens() -> None:
    """gloo's listening sockets, which are older, go on: gloo would end the process."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        connections = GroupConnections(1)
        with socket.create_server(("127.0.0.1", 0)) as of_gloo:
            groups: Any = [OnGpus("nccl", [])]
            connections.add_gpu_groups(groups)
            with socket.create_server(("127.0.0.1", 0)) as of_nccl:
                connections.cut()
                with pytest.raises(OSError, match="Invalid argument"):
                    of_nccl.accept()
            of_gloo.accept()[0].close()  # connected to instead of the peer
        connections.seal()
        socket.create_connection(before.getsockname()).close()


@pytest.mark.parametrize("call", ["send", "share"])
def test_pending_sends_to_a_lost_peer_are_given_up(call: str) -> None:
    """gloo forgets what it had begun to send: without a limit the sender would wait for good."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(freeze_while_taking, 2, server.port, call) == [0, -signal.SIGKILL]


class Line:
    """A link without a launcher."""

    generation = 3

    def __init__(self) -> None:
        self.lost: list[str] = []

    def attach(self) -> None:
        pass

    def close(self) -> None:
        pass

    def listen(self, on_over: object) -> None:
        pass

    def report_lost(self, generation: int, why: str) -> None:
        self.lost.append(f"{generation}: {why}")


@pytest.fixture
def line() -> Line:
    return Line()


def member(line: Any, monkeypatch: pytest.MonkeyPatch, failed: str) -> tuple[ElasticGroup, GroupConnections]:
    """One of a group whose NCCL reports a failure."""
    connections = GroupConnections(2)
    groups: Any = [OnGpus("nccl", []), OnGpus("nccl", [], failed)]
    connections.add_gpu_groups(groups)
    connections.seal()
    monkeypatch.setattr(GroupConnections, "none", lambda: connections)
    return ElasticGroup(line), connections


def test_gpu_groups_are_aborted_together_and_once() -> None:
    connections = GroupConnections(2)
    calls: list[str] = []
    groups: Any = [OnGpus("nccl", calls), OnGpus("gloo", calls), OnGpus("nccl", calls)]
    connections.add_gpu_groups(groups)
    connections.seal()
    connections.cut()
    connections.cut()
    assert calls == ["start", "abort", "abort", "end"]


def test_the_first_failure_is_named() -> None:
    groups: Any = [OnGpus("gloo", [], "COMM_ERROR"), OnGpus("nccl", []), OnGpus("nccl", [], "REMOTE_ERROR")]
    assert gpu_failure(groups) == "REMOTE_ERROR"
    assert not gpu_failure(groups[:2])


def test_a_peer_lost_only_by_nccl_is_reported(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    group, connections = member(line, monkeypatch, "COMM_ERROR")
    group.check_gpus()
    assert line.lost == ["3: NCCL reports COMM_ERROR"]
    assert connections.is_cut
    group.check_gpus()
    assert len(line.lost) == 1, "aborting makes collectives fail too"


@pytest.mark.parametrize(("failed", "stays"), [("TIMEOUT", True), ("COMM_ERROR", False)])
def test_a_process_aborts_if_it_hangs_or_cannot_stay(
    line: Line, monkeypatch: pytest.MonkeyPatch, failed: str, stays: bool
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(os, "abort", lambda: ended.append(True))
    group, _ = member(line, monkeypatch, failed)
    if not stays:
        group.close()
    group.check_gpus()
    assert ended


def test_without_a_failure_nothing_is_done(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    group, connections = member(line, monkeypatch, "SUCCESS")
    group.check_gpus()
    assert not line.lost
    assert not connections.is_cut


def wait_for_frozen_peer(port: int, in_main: bool) -> None:
    """Rank 0 waits for a rank that is frozen, in its main thread or another; it ends with 3 once that is noticed."""
    torch_dist.init_process_group("gloo")
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if os.environ["RANK"] == "1":
        store.set("frozen", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)

    def watch(thread: int) -> None:
        wait_until(partial(is_stuck, thread))
        os.kill(int(store.get("frozen")), signal.SIGKILL)
        os._exit(3)

    def train() -> None:
        threading.Thread(target=watch, args=(threading.get_ident(),), daemon=True).start()
        torch_dist.all_reduce(torch.ones(1))

    if in_main:
        train()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()


def seen_meanwhile(what: str) -> bool:
    """True if the main thread counts as stuck while it does this."""
    found: list[bool] = []
    here = threading.get_ident()
    looking = threading.Thread(target=lambda: found.append(is_stuck(here)))
    looking.start()
    weights = torch.ones(200, 200, requires_grad=True)
    while looking.is_alive():
        if what == "sleeps":
            time.sleep(0.01)
        elif what == "reads":
            looking.join()
        else:
            torch.linalg.matrix_power(weights / 200, 5).sum().backward()
    return found[0]


@pytest.mark.parametrize("in_main", [True, False])
def test_a_thread_that_waits_for_an_idle_peer_is_stuck(in_main: bool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set_timeout(timedelta(seconds=240))
    assert ranks.run(wait_for_frozen_peer, 2, server.port, in_main) == [3, -signal.SIGKILL]


def test_a_thread_that_computes_sleeps_or_reads_is_not_stuck() -> None:
    assert [seen_meanwhile(what) for what in ("computes", "sleeps", "reads")] == [False] * 3
