"""Errors in the script's own collectives; test_kinds_of_training has losses of real ranks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from elasticctl_train.dist import Channel
from elasticctl_train.inplace import script_collectives
from elasticctl_train.inplace.script_collectives import ScriptCollectives


class BrokenWork:
    """A collective with a lost peer."""

    def wait(self, timeout: Any = None) -> bool:
        raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        return True


class Bed:
    """A group of two whose collectives fail."""

    def __init__(self) -> None:
        self.losses: list[BaseException] = []
        self.is_in_step, self.is_made = True, False
        watch = SimpleNamespace(survives=True, lost=False, record_loss=self.losses.append)
        world = SimpleNamespace(size=2, channel=Channel())
        self.group: Any = SimpleNamespace(watch=watch, world=world, thread=threading.get_ident(), is_over=True)
        ScriptCollectives(self.group, lambda: self.is_in_step, lambda: self.is_made).install()


@pytest.fixture
def bed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    def all_reduce(tensor: Any, op: Any = None, group: Any = None, async_op: bool = False) -> Any:
        return BrokenWork() if async_op else BrokenWork().wait()

    def all_gather(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
        return BrokenWork() if async_op else BrokenWork().wait()

    monkeypatch.setattr(script_collectives, "CONFIRMED_S", 0.05)
    with monkeypatch.context() as patch:
        for name in script_collectives.ALONE:
            for module in (distributed_c10d, dist):
                patch.setattr(module, name, getattr(module, name))  # restored at the end
        patch.setattr(distributed_c10d, "all_reduce", all_reduce)
        patch.setattr(distributed_c10d, "all_gather", all_gather)
        yield Bed()


def test_in_a_lost_step_collectives_return_this_ranks_values(bed: Bed) -> None:
    total, each = torch.ones(1), [torch.zeros(1), torch.zeros(1)]
    work: Any = dist.all_reduce(total, async_op=True)
    assert work.wait()
    dist.all_gather(each, torch.full((1,), 3.0))
    assert [float(total), *map(float, each)] == [1.0, 3.0, 3.0]
    assert len(bed.losses) == 2


def test_after_the_optimizers_a_failed_collective_loses_no_step(bed: Bed) -> None:
    bed.is_made = True
    dist.all_reduce(torch.ones(1))
    assert bed.losses == []


def test_an_error_without_a_lost_peer_is_raised(bed: Bed) -> None:
    bed.group.is_over = False
    with pytest.raises(RuntimeError, match="closed by peer"):
        dist.all_reduce(torch.ones(1))
    assert bed.losses == []


@pytest.mark.parametrize("what", ["evaluation", "thread", "group"])
def test_outside_of_a_step_an_error_ends_the_script(bed: Bed, what: str) -> None:
    group: Any = None
    if what == "evaluation":
        bed.is_in_step = False
    elif what == "thread":
        bed.group.thread = -1
    else:
        group = object()
    with pytest.raises(RuntimeError, match="closed by peer"):
        dist.all_reduce(torch.ones(1), group=group)
    assert bed.losses == []
