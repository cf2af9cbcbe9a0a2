"""A scheduler that no checkpoint has begins anew whenever the script starts: that is said."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ReduceLROnPlateau, SequentialLR, StepLR

from elasticctl_train import Run
from elasticctl_train.inplace.training import InPlace
from elasticctl_train.schedulers import find_unsaved


class Warmup:
    """A script's own class around schedulers."""

    def __init__(self, *schedulers: torch.optim.lr_scheduler.LRScheduler) -> None:
        self.schedulers = list(schedulers)


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def test_those_that_no_part_holds_are_found(optimizer: torch.optim.Optimizer) -> None:
    inner = [StepLR(optimizer, 1), ChainedScheduler([ConstantLR(optimizer)], optimizer)]
    whole, plateau = SequentialLR(optimizer, inner, [3]), ReduceLROnPlateau(optimizer)
    parts = {"optimizer": optimizer}
    assert find_unsaved(parts) == ["ReduceLROnPlateau", "SequentialLR"], "not what the second one consists of"
    assert find_unsaved({**parts, "scheduler": whole}) == ["ReduceLROnPlateau"]
    assert find_unsaved({**parts, "warmup": Warmup(whole, plateau)}) == []
    assert find_unsaved({}) == [], "those of other optimizers are none of the run's"


def test_a_run_says_so_and_restarts_with_its_group(
    optimizer: torch.optim.Optimizer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its process it would have other learning rates than a new worker's, whose scheduler is new, too."""
    scheduler = StepLR(optimizer, 1)
    model = torch.nn.Linear(1, 1)
    model.weight, model.bias = optimizer.param_groups[0]["params"][0], None
    would_stay = []
    monkeypatch.setattr(InPlace, "open", would_stay.append)
    Run(model=model, optimizer=optimizer, scheduler=scheduler).finish()
    assert len(would_stay) == 1
    assert "Run was not given" not in caplog.text
    Run(model=model, optimizer=optimizer).finish()
    assert len(would_stay) == 1
    assert "Run was not given the StepLR: no checkpoint has it" in caplog.text
