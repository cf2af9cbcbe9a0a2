"""Groups that are given up while they are being made."""

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
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist
from torch.distributed import PrefixStore, TCPStore

from elasticctl_train import dist
from elasticctl_train.inplace.lost_peers.connections import Connections
from tests.support.ports import free_port
from tests.support.train import ranks
from tests.support.train.gpu_groups import OnGpus
from tests.support.waiting import wait_until


def give_up_and_meet(port: int) -> None:
    """Rank 1 begins a group in which nobody else is, is cut off from it, and is in the next one with rank 0."""
    is_first = os.environ["RANK"] == "0"
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False) if is_first else None
    store = server or _connect(port)
    if is_first:
        store.wait(["given up"], timedelta(seconds=240))
    else:
        connections = Connections(2)
        lonely = PrefixStore("first", _connect(port))
        threading.Timer(0.2, connections.cut).start()
        try:
            dist.rejoin(dist.World(), lonely)
        except RuntimeError:
            assert not connections.settle()
        else:
            raise AssertionError("nobody was there")
        store.set("given up", "")
    world = dist.rejoin(dist.World(), PrefixStore("second", store))
    total = torch.ones(1)
    torch_dist.all_reduce(total)
    assert total.item() == 2
    dist.leave(world)


def lose_the_last(port: int) -> None:
    """The last rank dies as soon as all have said where they listen; the others are cut off a moment later."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _connect(port)

    def die() -> None:
        while store.num_keys() < size:
            time.sleep(0.0001)
        os._exit(9)

    if rank == size - 1:
        threading.Thread(target=die, daemon=True).start()
    connections = Connections(size)
    group_store = PrefixStore("group", _connect(port))
    threading.Timer(1.0, connections.cut).start()
    with suppress(RuntimeError):  # gloo may have noticed before the cut
        dist.rejoin(dist.World(), group_store)
        assert not connections.settle(), "the group has formed without one of its ranks"
    os._exit(0)


def freeze_while_taking(port: int, call: str) -> None:
    """Rank 1 freezes when the first of many bytes has come, and is then killed; rank 0 goes on alone."""
    store = _connect(port)
    connections = Connections(2)
    channel = dist.Channel(is_dead=lambda: connections.is_dead)
    world = dist.rejoin(dist.World(channel=channel), PrefixStore("first", _connect(port)))
    assert connections.settle()
    data = torch.full((256 << 20,), 1 - world.rank, dtype=torch.uint8)
    if world.rank == 1:
        take = torch_dist.irecv if call == "send" else partial(torch_dist.broadcast, async_op=True)
        taking = take(data, 0, group=channel.group)
        while not data[0]:
            assert taking is not None  # what nobody holds is not taken
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


def test_a_rank_that_has_given_up_a_group_finds_the_others_of_the_next() -> None:
    """Its keys in the store are named as theirs, though it has made one group more."""
    assert ranks.run(give_up_and_meet, 2, free_port()) == [0, 0]


def test_ranks_whose_peer_dies_before_it_has_called_them_are_freed() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(lose_the_last, 4, server.port) == [0, 0, 0, 9]


def test_what_is_opened_after_the_cut_is_shut_down_too() -> None:
    connections = Connections(2)
    connections.cut()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    late = _connect(server.port)
    late.set_timeout(timedelta(seconds=240))
    with pytest.raises(RuntimeError) as cut:
        late.wait(["what nobody sets"])
    assert "timeout" not in str(cut.value)
    assert not connections.settle()


def test_it_is_known_that_a_group_is_cut_off_before_a_gpu_can_have_noticed() -> None:
    connections = Connections(2)
    known: list[bool] = []
    group: Any = OnGpus("nccl", [])
    group.tell = lambda word: known.append(connections.is_cut)
    connections.carry([group])
    assert not connections.is_cut
    connections.cut()
    connections.settle()
    assert known == [True] * 3


def test_where_nccl_still_listens_for_a_peer_nobody_is_waited_for() -> None:
    """gloo's listening sockets, which are older, go on: gloo would end the process."""
    with socket.create_server(("127.0.0.1", 0)) as before:
        connections = Connections(1)
        with socket.create_server(("127.0.0.1", 0)) as of_gloo:
            groups: Any = [OnGpus("nccl", [])]
            connections.carry(groups)
            with socket.create_server(("127.0.0.1", 0)) as of_nccl:
                connections.cut()
                with pytest.raises(OSError, match="Invalid argument"):
                    of_nccl.accept()
            of_gloo.accept()[0].close()  # was called in the place of the peer
        connections.settle()
        socket.create_connection(before.getsockname()).close()


@pytest.mark.parametrize("call", ["send", "share"])
def test_what_a_peer_never_took_is_given_up_and_the_next_group_is_made(call: str) -> None:
    """gloo forgets what it had begun to send: without a limit the sender would wait for good."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert ranks.run(freeze_while_taking, 2, server.port, call) == [0, -signal.SIGKILL]
