"""What a pass waits for, when a peer is lost in it."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.futures import Future

from elasticctl_train.dist import GroupOver
from elasticctl_train.inplace.gradients import ElasticDataParallel, PeerWatch
from tests.support.train import ranks
from tests.support.waiting import wait_until

LOST = GroupOver("lost")


@pytest.fixture
def told() -> list[BaseException]:
    return []


@pytest.fixture
def watch(told: list[BaseException]) -> PeerWatch:
    return PeerWatch(2, told.append)


def take_over_buffers(port: int, from_frozen: bool) -> None:
    """Rank 1 takes over rank 0's buffers, or what never comes from it: it is frozen, as far as anybody can tell."""
    dist.init_process_group("gloo")
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    rank, told = dist.get_rank(), list[BaseException]()
    watch = PeerWatch(2, told.append)
    watch.group = dist.group.WORLD
    norm = torch.nn.BatchNorm1d(3).double()
    norm.running_mean.fill_(rank)
    norm.num_batches_tracked.fill_(40 + rank)
    model = ElasticDataParallel(norm, watch, init_sync=False)
    if rank == 0 and from_frozen:
        store.set("frozen", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and from_frozen:
        threading.Thread(target=lambda: wait_until(lambda: watch.give_up(LOST)), daemon=True).start()
        with pytest.raises(GroupOver):
            model.share_buffers()
        assert told == [LOST]
        assert (norm.running_mean.tolist(), int(norm.num_batches_tracked)) == ([1.0] * 3, 41)
        os.kill(int(store.get("frozen")), signal.SIGKILL)
        os._exit(0)
    model.share_buffers()
    assert (norm.running_mean.tolist(), int(norm.num_batches_tracked)) == ([0.0] * 3, 40)
    model(torch.rand(4, 3).double()).sum().backward()
    waited_s = model.reduce_waits_s()
    assert waited_s > 0.0
    model.share_buffers()
    assert model.reduce_waits_s() == waited_s, "buffers are no gradients, and what lies between is no wait for them"
    dist.barrier()


@pytest.mark.parametrize(("from_frozen", "codes"), [(False, [0, 0]), (True, [-signal.SIGKILL, 0])])
def test_buffers_are_rank_0s_or_given_up(from_frozen: bool, codes: list[int]) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set_timeout(timedelta(seconds=240))
    assert ranks.run(take_over_buffers, 2, server.port, from_frozen) == codes


def test_a_mean_that_has_come_is_no_loss(watch: PeerWatch, told: list[BaseException]) -> None:
    future: Future[list[torch.Tensor]] = Future()
    buffer = torch.ones(3)
    averaged = watch.expect(future, buffer)
    assert not averaged.done()
    future.set_result([buffer])
    assert averaged.value() is buffer
    assert (watch.lost, told, watch.give_up(LOST)) == (False, [], False)


def test_one_that_failed_ends_the_pass_and_is_a_loss(watch: PeerWatch, told: list[BaseException]) -> None:
    future: Future[list[torch.Tensor]] = Future()
    averaged = watch.expect(future, torch.ones(3))
    future.set_exception(RuntimeError("Connection closed by peer"))  # type: ignore[arg-type]
    assert averaged.done()
    assert watch.lost
    assert [str(error) for error in told] == ["Connection closed by peer"]


def test_one_that_never_ends_is_given_up_and_its_late_end_says_nothing_of_the_next_group(
    watch: PeerWatch, told: list[BaseException]
) -> None:
    futures: list[Future[list[torch.Tensor]]] = [Future(), Future()]
    averaged = [watch.expect(future, torch.ones(3)) for future in futures]
    assert watch.give_up(LOST)
    assert [each.done() for each in averaged] == [True, True]
    assert (watch.lost, told) == (True, [LOST])
    later: list[BaseException] = []
    watch.reset(2, None, later.append)
    futures[0].set_exception(RuntimeError("Timed out"))  # type: ignore[arg-type]
    futures[1].set_result([torch.ones(3)])
    assert (watch.lost, later) == (False, [])


def test_nobody_heeds_a_loss_once_the_process_is_not_kept(watch: PeerWatch) -> None:
    watch.survives = False
    averaged = watch.expect(Future(), torch.ones(3))
    assert watch.give_up(LOST)
    with pytest.raises(RuntimeError, match="lost"):
        averaged.value()
