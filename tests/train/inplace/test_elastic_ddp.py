"""Backward passes in which a peer is lost, and the synchronization of buffers."""

from __future__ import annotations

import copy
import io
import os
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.optim.swa_utils import AveragedModel

from elasticctl_train.dist import Channel, GroupOver
from elasticctl_train.inplace.elastic_ddp import ElasticDataParallel, PeerWatch, is_own
from tests.support.train import ranks


def take_over_buffers(port: int, from_frozen: bool) -> None:
    """Rank 1 takes over rank 0's buffers, or what never comes from it: it is frozen, as seen from outside."""
    dist.init_process_group("gloo")
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    rank, losses = dist.get_rank(), list[BaseException]()
    is_cut = threading.Event()
    channel = Channel(training=dist.group.WORLD, is_dead=is_cut.is_set)
    watch = PeerWatch(2, losses.append, channel)
    norm = torch.nn.BatchNorm1d(3).double()
    norm.running_mean.fill_(rank)
    norm.num_batches_tracked.fill_(40 + rank)
    model = ElasticDataParallel(norm, watch, init_sync=False)
    if rank == 0 and from_frozen:
        store.set("frozen", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and from_frozen:
        threading.Timer(0.2, is_cut.set).start()
        with pytest.raises(GroupOver):
            model.share_buffers()
        assert channel.is_stuck
        assert (norm.running_mean.tolist(), int(norm.num_batches_tracked)) == ([1.0] * 3, 41)
        os.kill(int(store.get("frozen")), signal.SIGKILL)
        os._exit(0)
    model.share_buffers()
    assert (norm.running_mean.tolist(), int(norm.num_batches_tracked)) == ([0.0] * 3, 40)
    loss = model(torch.rand(4, 3).double()).sum()
    if rank == 1:
        store.wait(["waits"], timedelta(seconds=240))
        time.sleep(1)
    else:
        threading.Timer(0.5, store.set, ("waits", "")).start()
    loss.backward()
    waited_s = model.reduce_waits_s()
    assert waited_s > 0.5 or rank == 1
    model.share_buffers()
    assert model.reduce_waits_s() == waited_s, "broadcasts of buffers are not waits for gradients"
    dist.barrier()


@pytest.mark.parametrize(("from_frozen", "codes"), [(False, [0, 0]), (True, [-signal.SIGKILL, 0])])
def test_buffers_are_those_of_rank_0(from_frozen: bool, codes: list[int]) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set_timeout(timedelta(seconds=240))
    assert ranks.run(take_over_buffers, 2, server.port, from_frozen) == codes


def lose_a_peer(port: int, how: str, survives: bool) -> None:
    """Rank 1 is lost while rank 0 is in its backward pass, of several buckets: it dies, or freezes and is given up."""
    dist.init_process_group("gloo")
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    is_cut, losses = threading.Event(), list[BaseException]()
    channel = Channel(training=dist.group.WORLD, is_dead=is_cut.is_set)
    watch = PeerWatch(2, losses.append, channel, survives=survives)
    layers = [torch.nn.Linear(400, 400) for _ in range(6)]
    model = ElasticDataParallel(torch.nn.Sequential(*layers), watch, init_sync=True)
    model(torch.ones(2, 400)).sum().backward()
    model.rebuild_buckets()
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    buckets = [
        [numbers[each] for each in bucket.parameters()] for bucket in model.reducer._get_zeros_like_grad_buckets()
    ]
    assert watch.buckets == buckets, "the buckets are known before the next pass"
    assert len(buckets) > 1
    for _ in range(2):
        model(torch.ones(2, 400)).sum().backward()
    assert (watch.lost, losses) == (False, [])
    if dist.get_rank() == 1:
        store.set("ready", str(os.getpid()))
        if how == "dies":
            os._exit(9)
        os.kill(os.getpid(), signal.SIGSTOP)
    peer = int(store.get("ready"))
    loss = model(torch.ones(2, 400)).sum()
    if how == "freezes":
        threading.Timer(0.2, is_cut.set).start()
    if survives:
        loss.backward()
        assert watch.lost
        assert len(losses) == 1
        assert isinstance(losses[0], GroupOver) == channel.is_stuck == (how == "freezes")
        model(torch.ones(2, 400)).sum().backward()  # on its own
    else:
        with pytest.raises(RuntimeError):
            loss.backward()
    with suppress(ProcessLookupError):
        os.kill(peer, signal.SIGKILL)
    os._exit(0)


@pytest.mark.parametrize(("how", "survives"), [("dies", True), ("dies", False), ("freezes", True)])
def test_a_lost_peer_breaks_the_pass_and_not_the_script_if_the_watch_survives(how: str, survives: bool) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set_timeout(timedelta(seconds=240))
    end = 9 if how == "dies" else -signal.SIGKILL
    assert ranks.run(lose_a_peer, 2, server.port, how, survives) == [0, end]


def copy_the_model() -> None:
    """For example for an average of the weights."""
    dist.init_process_group("gloo")
    watch = PeerWatch(1, lambda error: None, Channel(training=dist.group.WORLD))
    model = ElasticDataParallel(torch.nn.Linear(2, 1), watch, init_sync=True).eval()
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    copies = copy.deepcopy(model), AveragedModel(model).module, torch.load(pickled, weights_only=False)
    with torch.no_grad():
        model.module.weight.add_(1)
    for each in copies:
        assert list(each.state_dict()) == list(model.state_dict())
        assert not each.training
        torch.testing.assert_close(each(torch.ones(1, 2)) + 2, model(torch.ones(1, 2)))
    dist.destroy_process_group()


def test_the_model_can_be_copied_and_pickled() -> None:
    assert ranks.run(copy_the_model, 1) == [0]


def train_beside_a_newcomer() -> None:
    """The model of rank 0 has registered a buffer in earlier passes; rank 1 is new."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    watch = PeerWatch(2, lambda error: None, Channel(training=dist.group.WORLD))
    norm = torch.nn.BatchNorm1d(3).double()
    model = ElasticDataParallel(norm, watch, init_sync=False)
    if rank == 0:
        norm.register_buffer("table", torch.ones(5))
        model.reform()
    for step in (1, 2):
        model(torch.full((4, 3), float(rank)).double()).sum().backward()
        model.share_buffers()
        assert norm.num_batches_tracked == step
        assert not norm.running_mean.any(), "rank 0's"
    dist.barrier()


def test_a_newcomer_shares_only_the_buffers_that_it_has() -> None:
    """For example growing tables of positions: otherwise ranks would wait in different collectives."""
    assert ranks.run(train_beside_a_newcomer, 2) == [0, 0]


@pytest.mark.parametrize(
    ("words", "is_ours"),
    [
        ("NCCL error in: ...: remote process exited\nncclRemoteError: A call failed", False),
        ("NCCL error in: ...: unhandled system error\nncclSystemError: System call", False),
        ("NCCL error in: ...: invalid usage\nncclInvalidUsage: This usually\nDuplicate GPU detected", True),
        ("CUDA error: device-side assert triggered", True),
        ("DataLoader worker (pid 412) is killed by signal: Killed. ", True),
        ("Connection closed by peer [127.0.0.1]:57037", False),
    ],
)
def test_errors_of_this_process_are_not_lost_peers(words: str, is_ours: bool) -> None:
    assert is_own(RuntimeError(words)) == is_ours
