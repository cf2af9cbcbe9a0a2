"""State that no checkpoint has begins anew whenever the script starts: that is said."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel

from elasticctl_train import Run
from elasticctl_train.unsaved_state import Unsaved


class Net(torch.nn.Linear):
    """A class that no other test has models of."""


class Holder:
    """A script's own class around schedulers or averages."""

    def __init__(self, *held: object) -> None:
        self.held = list(held)


class Wrapper(torch.nn.Module):
    """A module around an average, as libraries have."""

    def __init__(self, average: torch.nn.Module) -> None:
        super().__init__()
        self.module = average


@pytest.fixture
def model() -> Net:
    return Net(2, 1)


@pytest.fixture
def optimizer(model: Net) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def seen_of(between: Callable[[], object] = int, **parts: object) -> list[str]:
    """What two steps show, with something done between them."""
    unsaved = Unsaved(parts)
    first = unsaved.look()
    between()
    return [first, unsaved.look()]


def test_schedulers_that_no_part_holds_are_found(optimizer: torch.optim.Optimizer) -> None:
    inner = [StepLR(optimizer, 1), ChainedScheduler([ConstantLR(optimizer)], optimizer)]
    whole, plateau = SequentialLR(optimizer, inner, [3]), ReduceLROnPlateau(optimizer)
    both = ["ReduceLROnPlateau and the SequentialLR", ""]
    assert seen_of(optimizer=optimizer) == both, "not what the second one consists of"
    assert seen_of(optimizer=optimizer, scheduler=whole) == ["ReduceLROnPlateau", ""]
    assert seen_of(optimizer=optimizer, warmup=Holder(whole, plateau)) == ["", ""]
    assert seen_of() == ["", ""], "those of other optimizers are none of the run's"


def test_averages_that_no_part_holds_are_found(model: Net) -> None:
    average, other = AveragedModel(model), AveragedModel(Net(3, 1))
    assert seen_of(model=model) == ["AveragedModel", ""], "that of another model is none of the run's"
    assert seen_of(model=model, average=average) == ["", ""]
    assert seen_of(model=model, averages=Holder(average), wrapped=Wrapper(other)) == ["", ""]


def test_copies_that_change_and_that_no_part_holds_are_found(model: Net) -> None:
    by_hand, reference, shared = copy.deepcopy(model), copy.deepcopy(model), copy.copy(model)
    frame = copy.deepcopy(model).to("meta")

    def update() -> None:
        for mine, its in zip(by_hand.parameters(), model.parameters(), strict=True):
            its.data.add_(1)
            mine.data.lerp_(its.data, 0.5)

    assert seen_of(update, model=model) == ["", "copy of Net"]
    assert seen_of(update, model=model, ema=Wrapper(by_hand)) == ["", ""], "not one that stays as it is"
    assert seen_of(update, model=model, ema=by_hand) == ["", ""]
    assert [type(each) for each in (reference, shared, frame)] == [Net] * 3, "they are alive"


def test_a_module_that_was_never_built_does_no_harm(model: Net) -> None:
    unbuilt = Net.__new__(Net)  # as an error in a constructor leaves it
    assert seen_of(model=model) == ["", ""]
    assert isinstance(unbuilt, Net), "it is alive"


def test_a_run_says_so(model: Net, optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture) -> None:
    average = AveragedModel(model)
    with Run(model=model, optimizer=optimizer, average=average) as run:
        run.step()
    assert "Run was not given" not in caplog.text
    with Run(model=model, optimizer=optimizer) as run:
        scheduler = StepLR(optimizer, 1)
        for _ in range(3):
            run.step()
    assert caplog.text.count("Run was not given the AveragedModel and the StepLR: no checkpoint has it") == 1
    assert scheduler.optimizer is optimizer, "it is alive"
