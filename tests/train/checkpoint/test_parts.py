"""The parts that a run saves, and their description."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from elasticctl_store.errors import StateError
from elasticctl_train.checkpoint import compatibility, parts
from tests.support.train.states import same


def network(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


def test_only_rank_0_writes_parts_that_may_differ_between_ranks() -> None:
    model, critic = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), network(1, 1)
    average = torch.optim.swa_utils.AveragedModel(critic)
    named = parts.unwrap(model=model, critic=critic, critics=torch.optim.SGD(critic.parameters()), average=average)
    buffers = {f"model/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    averages = {f"average/{name}" for name in ("n_averaged", "module.0.weight", "module.0.bias")}
    assert parts.rank_0_only(named) == {"run"} | buffers | averages


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda model: compiled(nn.DataParallel(compiled(model)))])
def test_wrappers_of_a_model_are_not_part_of_its_state(wrap: Callable[[nn.Module], nn.Module]) -> None:
    bare, other = network(2, 3), network(2, 3)
    named = parts.unwrap(model=wrap(bare))
    assert named == {"model": bare}
    compatibility.load({"model": other}, {"model": named["model"].state_dict()}, "here")
    assert same(dict(other.state_dict()), dict(bare.state_dict()))


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("torch.distributed.optim.zero_redundancy_optimizer", "ZeroRedundancyOptimizer"),
        ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),
    ],
)
def test_zero_redundancy_optimizer_and_fsdp1_are_refused(module: str, name: str) -> None:
    kind = getattr(importlib.import_module(module), name)
    part = kind.__new__(kind)
    if isinstance(part, nn.Module):
        nn.Module.__init__(part)  # its own needs a GPU
    with pytest.raises(StateError, match=rf"^part: a checkpoint cannot hold a .*{name}.* FIX: .*fully_shard"):
        parts.check({"part": part})


def test_a_shared_parameter_has_one_name_in_any_order() -> None:
    shared = nn.Linear(2, 2)
    for order in (("a", "b"), ("b", "a")):
        model = nn.ModuleDict(dict.fromkeys(order, shared))
        known = parts.names_of_parameters({"model": model})
        assert known == {id(shared.weight): "model/a.weight", id(shared.bias): "model/a.bias"}


def test_the_description_is_updated_when_the_optimizer_gets_parameters() -> None:
    model, other = network(1, 1, 1), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    describe = parts.Describer({"model": model, "optimizer": optimizer})
    first = describe()
    assert first["optimizer"] == {"class": "SGD", "names": [["model/0.weight", "model/0.bias"]]}
    assert describe() is first
    optimizer.add_param_group({"params": [other, model[1].bias]})
    assert describe()["optimizer"]["names"][1:] == [["#0", "model/1.bias"]]
