"""A script in which ranks train different models is warned."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elasticctl_train import Run
from elasticctl_train.dist import World
from elasticctl_train.same_training import AppliedGradients, OptimizerCalls
from tests.support.train import ranks


class Said(logging.Handler):
    """What has been logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(habit: str) -> None:
    """Train two models on samples that differ between ranks, and expect a warning about the optimizer of one."""
    torch.manual_seed(0)
    said, dataset = Said(), TensorDataset(torch.arange(1.0, 9.0).unsqueeze(1))
    logging.getLogger("elasticctl_train").handlers = [said]
    first, second = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 1)), nn.Linear(1, 1)
    one, other = (torch.optim.SGD(model.parameters(), lr=1e-3) for model in (first, second))
    with Run(model=first, optimizer=one, second=second, other=other) as run:
        here = first if habit == "bare" else run.model
        there = second if habit == "forgotten" else DistributedDataParallel(second)
        for _ in run.epochs(2):
            for (inputs,) in run.loader(dataset, global_batch=2):
                loss = (here(inputs) + there(inputs)).square().mean()
                run.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                for model, optimizer in ((first, one), (second, other)):
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                run.step(loss=loss)
        wanted = {"bare": "optimizer: ranks apply", "forgotten": "other: ranks apply"}.get(habit)
        warned = [line for line in said.lines if "apply different gradients" in line]
        if wanted is None or not run.is_main:
            assert not warned
        else:
            assert len(warned) == 1
            assert warned[0].startswith(wanted)
            assert "FIX:" in warned[0]


@pytest.mark.parametrize("habit", ["none", "bare", "forgotten"])
def test_gradients_that_are_not_averaged_are_reported(habit: str) -> None:
    """Each habit in ranks of its own: in the same processes, a second group could meet in the store of the first."""
    assert ranks.run(train, 2, habit) == [0, 0]


@pytest.mark.parametrize("habit", ["none", "rate", "calls"])
def test_ranks_whose_optimizers_make_different_steps_are_reported(habit: str) -> None:
    digests = []
    for rank in range(2):
        model = nn.Linear(1, 1)
        optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name in ("one", "other")}
        calls = OptimizerCalls(optimizers)
        calls.enter_group(is_compared=True)
        for step in range(4):
            optimizers["one"].step()
            if step == (rank if habit == "calls" else 0):
                optimizers["other"].step()
            if habit == "rate" and rank:
                optimizers["one"].param_groups[0]["lr"] = 0.1 + 0.01 * step
            calls.end_step()
        digests.append(calls.digest)
    assert (digests[0] == digests[1]) == (habit == "none")
    calls.enter_group(is_compared=False)
    calls.end_step()
    assert calls.digest == 0


def test_cuda_graphs_are_not_synchronized(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = OptimizerCalls({"optimizer": optimizer})
    model(torch.ones(1, 1)).sum().backward()
    assert calls.are_awaited()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    optimizer.step()
    calls.end_step()
    assert not calls.are_awaited()


def test_only_the_first_steps_of_a_group_are_checked() -> None:
    """The numbers of steps may differ: a step of several accumulated batches counts as several."""
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    applied, looked = AppliedGradients({"optimizer": optimizer}), len(optimizer._optimizer_step_post_hooks)
    for _ in range(2):
        applied.enter_group()
        assert len(optimizer._optimizer_step_post_hooks) == looked + 1
        for _ in range(3):
            optimizer.step()
            applied.compare(World())
        assert len(optimizer._optimizer_step_post_hooks) == looked


def test_the_gradients_of_a_closure_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.full((1, 1), 100.0)  # left from before on one of the ranks
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = 3 * model(torch.ones(1, 1)).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    seen: list[object] = []

    def gather(_: World, value: object) -> list[object]:
        seen.append(value)
        return [value]

    monkeypatch.setattr(World, "gather", gather)
    applied = AppliedGradients({"optimizer": optimizer})
    applied.enter_group()
    optimizer.step(closure)  # type: ignore[no-untyped-call]
    applied.compare(World())
    assert seen == [{"optimizer": [3.0]}]
