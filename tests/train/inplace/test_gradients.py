"""What a backward pass waits for, when a peer is lost in it."""

from __future__ import annotations

import pytest
import torch
from torch.futures import Future

from elasticctl_train.dist import GroupOver
from elasticctl_train.inplace.gradients import PeerWatch

LOST = GroupOver("lost")


@pytest.fixture
def told() -> list[BaseException]:
    return []


@pytest.fixture
def watch(told: list[BaseException]) -> PeerWatch:
    return PeerWatch(2, told.append)


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
