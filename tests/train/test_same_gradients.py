"""A script in which ranks train models of their own is told so."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elasticctl_train import Run
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
    logging.getLogger("elasticctl_train").addHandler(said)
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
        wanted = {"bare": "optimizer: the grad", "forgotten": "other: the grad"}.get(habit)
        warned = [line for line in said.lines if "differ between ranks" in line]
        if wanted is None or not run.is_main:
            assert not warned
        else:
            assert len(warned) == 1
            assert warned[0].startswith(wanted)
            assert "FIX:" in warned[0]


@pytest.mark.parametrize("habit", ["none", "bare", "forgotten"])
def test_gradients_that_nobody_averages_are_told(habit: str) -> None:
    assert ranks.run(train, 2, habit, timeout_s=120) == [0, 0]
