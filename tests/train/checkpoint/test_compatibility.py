"""Whether a checkpoint fits the objects, and what is loaded if it does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from elasticctl_store.errors import RestoreError
from elasticctl_train.checkpoint import compatibility, parts
from tests.support.train.states import same


def network(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))


class Growing(nn.Module):
    """Loads any state."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        self.given = state_dict


@pytest.mark.parametrize(
    ("saved", "live", "said"),
    [
        (nn.Linear(1, 1), network(1, 1), "2 are missing in it: 0.weight, 0.bias; 2 are unexpected: weight, bias. FIX"),
        (network(1, 1), network(1, 1, 1, 1, 1), "6 are missing in it: 1.weight, 1.bias, 2.weight, 2.bias, …. FIX"),
        (
            nn.Linear(1, 1, bias=False),
            nn.Linear(1, 1),
            "1 is missing in it: bias. FIX: restore the code, or use another storage URL",
        ),
    ],
)
def test_a_mismatch_names_the_keys(saved: nn.Module, live: nn.Module, said: str) -> None:
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    with pytest.raises(RestoreError, match=f"here, step 3: the checkpoint does not fit this model: {said}"):
        compatibility.load({"model": live}, {"model": saved.state_dict()}, "here, step 3")
    assert same(dict(live.state_dict()), before)


def adam(*groups: int) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.ones(2)) for _ in range(count)]} for count in groups])


@pytest.mark.parametrize(
    ("saved", "live", "said"),
    [
        (adam(1), adam(1, 1), "it has 1 groups of parameters, this optimizer 2"),
        (adam(1, 2), adam(1, 3), r"numbers of parameters differ \(group 1: 2 in the checkpoint, 3 here\)"),
        (torch.optim.lr_scheduler.StepLR(adam(1), 1), adam(1), "is not the state of an optimizer"),
    ],
)
def test_an_optimizer_of_other_parameters_is_refused(saved: Any, live: torch.optim.Optimizer, said: str) -> None:
    with pytest.raises(RestoreError, match=said):
        compatibility.load({"optimizer": live}, {"optimizer": saved.state_dict()}, "here")


def test_a_state_of_another_class_is_refused() -> None:
    with pytest.raises(RestoreError, match="it holds a list in its place"):
        compatibility.load({"model": network(1, 1)}, {"model": [1]}, "here")


def test_a_module_with_its_own_load_state_dict_is_not_checked() -> None:
    model = Growing()
    compatibility.load({"model": model}, {"model": {"rows": torch.ones(3)}}, "here")
    assert same(model.given, {"rows": torch.ones(3)})


class Noting(nn.Linear):
    """Has extra state of varying type: None, a number, a tensor of any length."""

    notes: Any = None

    def get_extra_state(self) -> Any:
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        self.notes = state


@pytest.mark.parametrize("notes", [0, 0.5, {"seen": 3}, torch.ones(3), None])
def test_extra_state_is_not_compared(notes: Any) -> None:
    saved, live = nn.Sequential(Noting(1, 1)), nn.Sequential(Noting(1, 1))
    saved[0].notes = notes  # type: ignore[union-attr]
    compatibility.load({"model": live}, {"model": saved.state_dict()}, "here")
    assert same(live[0].notes, notes)


@pytest.mark.parametrize("make", [lambda: network(2, 3, 1), lambda: nn.BatchNorm1d(3), lambda: nn.LSTM(2, 2)])
def test_tensors_without_data_can_be_compared(make: Callable[[], nn.Module]) -> None:
    state = {name: tensor.to("meta") for name, tensor in make().state_dict().items()}
    assert compatibility.check({"model": make()}, {"model": state}, "here") == {"model": {}}


def described(**given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts, and their state as `Run` saves it."""
    state = {name: part.state_dict() for name, part in given.items()}
    return given, {**copy.deepcopy(state), "run": {"parts": parts.Describer(given)()}}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()


class Twins(nn.Module):
    """Two layers of the same shape, in either order."""

    def __init__(self, *order: str) -> None:
        super().__init__()
        for name in order:
            self.add_module(name, nn.Linear(3, 3))


def momenta(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}


class Renamed(Twins):
    """The same layers in a class of another name, such as FSDP2 creates."""


@pytest.mark.parametrize("choice", [None, "strict", "ignore", "model-only"])
def test_a_model_may_be_of_another_class(choice: compatibility.Choice | None) -> None:
    _, state = described(model=Renamed("a", "b"))
    live = Twins("a", "b")
    assert compatibility.load({"model": live}, state, "here", choice) == ""
    assert same(dict(live.state_dict()), dict(state["model"]))


@pytest.mark.parametrize("choice", ["strict", "ignore", "model-only"])
def test_optimizer_states_are_matched_by_name(choice: compatibility.Choice) -> None:
    saved = Twins("a", "b")
    optimizer = torch.optim.Adam([{"params": saved.a.parameters(), "lr": 0.5}, {"params": saved.b.parameters()}])
    stepped(saved, optimizer)
    _, state = described(model=saved, optimizer=optimizer)
    live = Twins("b", "a")
    resumed = torch.optim.Adam([{"params": list(live.a.parameters())[::-1]}, {"params": live.b.parameters()}])
    assert compatibility.load({"model": live, "optimizer": resumed}, state, "here", choice) == ""
    assert same(momenta(live, resumed), {name: momenta(saved, optimizer)[name] for name in momenta(live, resumed)})
    assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.001]


def changed() -> tuple[dict[str, Any], dict[str, Any]]:
    """A checkpoint, and parts that differ in every way."""
    model = nn.ModuleDict({"kept": nn.Linear(3, 3), "shape": nn.Linear(2, 2), "gone": nn.Linear(1, 1)})
    optimizer = torch.optim.Adam(
        [{"params": model["kept"].parameters(), "lr": 0.5}, {"params": model["shape"].parameters()}]
    )
    stepped(model, optimizer)
    critic = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7)
    _, state = described(model=model, optimizer=optimizer, critic=critic, schedule=schedule, old=nn.Linear(1, 1))
    live = nn.ModuleDict({"new": nn.Linear(1, 1), "shape": nn.Linear(2, 5), "kept": nn.Linear(3, 3).bfloat16()})
    adam = torch.optim.Adam([{"params": live["kept"].parameters()}, {"params": live["new"].parameters()}])
    adam.add_param_group({"params": live["shape"].parameters()})
    given: dict[str, Any] = {"model": live, "optimizer": adam, "critic": torch.optim.Adagrad(live.parameters())}
    given["schedule"] = torch.optim.lr_scheduler.ExponentialLR(adam, 0.9)
    given["ema"] = nn.Linear(1, 1)
    return state, given


@pytest.mark.parametrize("choice", [None, "strict"])
def test_all_differences_are_reported_and_nothing_is_changed(choice: compatibility.Choice | None) -> None:
    state, given = changed()
    before = copy.deepcopy({name: part.state_dict() for name, part in given.items()})
    with pytest.raises(RestoreError) as caught:
        compatibility.load(given, state, "here, step 3", choice)
    assert same({name: part.state_dict() for name, part in given.items()}, before)
    said = str(caught.value)
    for words in (
        "here, step 3: the checkpoint does not fit this model: 2 are missing in it: new.weight, new.bias",
        "2 are unexpected: gone.weight, gone.bias",
        "2 are of another shape: shape.weight ((2, 2) in the checkpoint, (5, 2) here), shape.bias",
        "2 are of another dtype: kept.weight (float32 in the checkpoint, bfloat16 here), kept.bias",
        "this optimizer: 2 are missing in it: model/new.weight, model/new.bias; in another group of parameters: "
        "model/shape.weight (1 in the checkpoint, 2 here), ",
        "this critic: the checkpoint's is a SGD, this a Adagrad",
        "this schedule: the checkpoint's is a StepLR, this a ExponentialLR",
        "this run: the checkpoint has no 'ema', only",
        "this run: the checkpoint also holds 'old', which this run no longer passes",
        "FIX: restore the code, or use another storage URL",
    ):
        assert words in said
    assert ('"ignore" loads what fits, "model-only" the weights' in said) == (choice is not None)


def test_matching_parts_are_loaded_by_name() -> None:
    state, given = changed()
    live, adam = given["model"], given["optimizer"]
    fresh = copy.deepcopy({name: given[name].state_dict() for name in ("critic", "schedule", "ema")})
    new, shape = live["new"].weight.clone(), live["shape"].weight.clone()
    assert "this critic" in compatibility.load(given, state, "here", "ignore")
    assert same(live["kept"].weight.detach(), state["model"]["kept.weight"].bfloat16())
    assert same(live["new"].weight.detach(), new.detach())
    assert same(live["shape"].weight.detach(), shape.detach())
    assert same({name: given[name].state_dict() for name in ("critic", "schedule", "ema")}, fresh)
    assert adam.state.keys() == set(live["kept"].parameters())
    assert same(adam.state[live["kept"].weight]["exp_avg"], state["optimizer"]["state"][0]["exp_avg"].bfloat16())
    assert [group["lr"] for group in adam.param_groups] == [0.5, 0.001, 0.001]
    stepped(live, adam)


def test_model_only_loads_the_weights() -> None:
    _, state = described(model=network(2, 2), optimizer=adam(2))
    given: dict[str, Any] = {"model": network(2, 2), "optimizer": adam(1), "ema": network(1, 1)}
    before = copy.deepcopy({name: given[name].state_dict() for name in ("optimizer", "ema")})
    assert "this optimizer" in compatibility.load(given, state, "here", "model-only")
    assert same(dict(given["model"].state_dict()), dict(state["model"]))
    assert same({name: given[name].state_dict() for name in ("optimizer", "ema")}, before)
    with pytest.raises(RestoreError, match="does not fit this model: 2 are of another shape"):
        compatibility.load({**given, "model": network(2, 3)}, state, "here", "model-only")


def test_lbfgs_needs_the_order_of_its_parameters() -> None:
    def lbfgs(*order: str) -> dict[str, Any]:
        model = Twins(*order)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters())}

    _, state = described(**lbfgs("a", "b"))
    assert compatibility.load(lbfgs("a", "b"), state, "here", "strict") == ""
    with pytest.raises(RestoreError, match="have another order, and LBFGS keeps them all in one vector"):
        compatibility.load(lbfgs("b", "a"), state, "here", "strict")


class Moody:
    """Loads half of its state, then refuses the rest."""

    def __init__(self, refuses: type[Exception] | None = None) -> None:
        self.refuses, self.half = refuses, 0

    def state_dict(self) -> dict[str, Any]:
        return {"half": self.half}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.half = state["half"]
        if self.refuses is not None and self.half == 7:
            raise self.refuses("no")


@pytest.mark.parametrize(("error", "raised"), [(KeyError, RestoreError), (OSError, OSError)])
def test_a_refusal_by_a_part_leaves_all_parts_unchanged(error: Any, raised: Any) -> None:
    first, second, model = Moody(), Moody(error), network(2, 2)
    before = copy.deepcopy(model.state_dict())
    state = {"model": network(2, 2).state_dict(), "first": {"half": 7}, "second": {"half": 7}}
    with pytest.raises(raised):
        compatibility.load({"model": model, "first": first, "second": second}, state, "here")
    assert (first.half, second.half) == (0, 0)
    assert same(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize(
    "said", [5, [5], {"optimizer": 5}, {"optimizer": {"names": 5}}, {"optimizer": {"names": [[]]}}]
)
def test_an_invalid_description_is_ignored(said: Any) -> None:
    saved, live = adam(2), adam(2)
    compatibility.load({"optimizer": live}, {"optimizer": saved.state_dict(), "run": {"parts": said}}, "here", "strict")


class Keeping:
    """A custom part, which keeps the tensors that are passed to it."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_tensors_of_custom_parts_are_moved_to_their_devices() -> None:
    on_gpu = torch.ones(2, device="meta")  # stands for one: a device that is not the checkpoint's
    part = Keeping({"mean": on_gpu, "parts": [on_gpu, 3], "here": torch.ones(2)})
    saved = {"mean": torch.zeros(2), "parts": [torch.zeros(2), 4, torch.zeros(2)], "here": torch.zeros(2), "new": 5}
    compatibility.load({"part": part}, {"part": saved}, "checkpoint")
    assert part.state["mean"].is_meta
    assert part.state["parts"][0].is_meta
    assert part.state["parts"][1] == 4
    assert same(part.state["parts"][2], torch.zeros(2)), "without a counterpart, it stays where it is"
    assert same(part.state["here"], torch.zeros(2))
    assert part.state["new"] == 5
