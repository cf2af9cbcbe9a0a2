"""What a run saves, and whether a checkpoint is one of it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from elasticctl_store.errors import RestoreError
from elasticctl_train.checkpoint import parts
from tests.support.train.states import same


def network(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class Growing(nn.Module):
    """Loads whatever it is given."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.given = state_dict


@pytest.mark.parametrize(
    ("saved", "live", "said"),
    [
        (network(2, 2), network(2, 2, 2), "2 are missing in it: 1.weight, 1.bias. FIX"),
        (network(2, 2, 2), network(2, 2), "2 are unexpected: 1.weight, 1.bias. FIX"),
        (
            network(2, 2),
            network(2, 3),
            r"2 are of another shape: 0.weight \(\(2, 2\) in the checkpoint, \(3, 2\) here\), 0.bias \(",
        ),
        (nn.Linear(1, 1), network(1, 1), "2 are missing in it: 0.weight, 0.bias; 2 are unexpected: weight, bias. FIX"),
        (network(1, 1), network(1, 1, 1, 1, 1), "6 are missing in it: 1.weight, 1.bias, 2.weight, 2.bias, …. FIX"),
        (
            nn.Linear(1, 1, bias=False),
            nn.Linear(1, 1),
            "1 is missing in it: bias. FIX: use another storage URL, or",
        ),
    ],
)
def test_a_misfit_says_which_keys(saved: nn.Module, live: nn.Module, said: str) -> None:
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    with pytest.raises(RestoreError, match=f"here, step 3: the checkpoint does not fit this model: {said}"):
        parts.load({"model": live}, {"model": saved.state_dict()}, "here, step 3")
    assert same(dict(live.state_dict()), before)


def adam(*groups: int) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2)) for _ in range(count)]} for count in groups])


@pytest.mark.parametrize(
    ("saved", "live", "said"),
    [
        (adam(1), adam(1, 1), "it has 1 groups of parameters, this optimizer 2"),
        (adam(1, 2), adam(1, 3), r"numbers of parameters differ \(group 1: 2 in the checkpoint, 3 here\)"),
        (torch.optim.lr_scheduler.StepLR(adam(1), 1), adam(1), "is no optimizer's state"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(saved: Any, live: torch.optim.Optimizer, said: str) -> None:
    with pytest.raises(RestoreError, match=said):
        parts.load({"optimizer": live}, {"optimizer": saved.state_dict()}, "here")


def test_nothing_is_loaded_when_a_later_part_does_not_fit() -> None:
    model, optimizer = network(2, 2), adam(2)
    state = {"model": network(2, 2).state_dict(), "optimizer": adam(3).state_dict()}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RestoreError, match="does not fit this optimizer"):
        parts.load({"model": model, "optimizer": optimizer}, state, "here")
    assert same(dict(model.state_dict()), before)


def test_rank_0_alone_writes_what_may_differ_on_others() -> None:
    model, critic = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)), network(1, 1)
    average = torch.optim.swa_utils.AveragedModel(critic)
    named = parts.unwrap(model=model, critic=critic, critics=torch.optim.SGD(critic.parameters()), average=average)
    buffers = {f"model/1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    averages = {f"average/{name}" for name in ("n_averaged", "module.0.weight", "module.0.bias")}
    assert parts.rank_0_only(named) == {"run"} | buffers | averages


def test_a_state_of_another_kind_is_refused() -> None:
    with pytest.raises(RestoreError, match="it holds a list in its place"):
        parts.load({"model": network(1, 1)}, {"model": [1]}, "here")


def test_a_module_that_loads_in_its_own_way_is_left_to_it() -> None:
    model = Growing()
    parts.load({"model": model}, {"model": {"rows": torch.ones(3)}}, "here")
    assert same(model.given, {"rows": torch.ones(3)})


class Noting(nn.Linear):
    """Keeps notes among its state, of a kind that changes: nothing, a number, a tensor of any length."""

    notes: Any = None

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


@pytest.mark.parametrize("notes", [0, 0.5, {"seen": 3}, torch.ones(3), None])
def test_extra_state_is_the_modules_own_affair(notes: Any) -> None:
    saved, live = nn.Sequential(Noting(1, 1)), nn.Sequential(Noting(1, 1))
    saved[0].notes = notes  # type: ignore[union-attr]
    parts.load({"model": live}, {"model": saved.state_dict()}, "here")
    assert same(live[0].notes, notes)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, nn.DataParallel, lambda model: compiled(nn.DataParallel(compiled(model)))])
def test_what_a_model_is_wrapped_in_is_not_part_of_its_state(wrap: Callable[[nn.Module], nn.Module]) -> None:
    bare, other = network(2, 3), network(2, 3)
    named = parts.unwrap(model=wrap(bare))
    assert named == {"model": bare}
    parts.load({"model": other}, {"model": named["model"].state_dict()}, "here")
    assert same(dict(other.state_dict()), dict(bare.state_dict()))


@pytest.mark.parametrize("make", [lambda: network(2, 3, 1), lambda: nn.BatchNorm1d(3), lambda: nn.LSTM(2, 2)])
def test_what_fits_fits_without_data_too(make: Callable[[], nn.Module]) -> None:
    state = {name: tensor.to("meta") for name, tensor in make().state_dict().items()}
    assert parts.check_fit({"model": make()}, {"model": state}, "here") == {"model": {}}
