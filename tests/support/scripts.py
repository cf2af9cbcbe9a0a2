"""Training scripts that people might submit."""

from __future__ import annotations

TRAIN = """\
import sys
import torch
from elasticctl_train import Run
from torch.utils.data import TensorDataset

model = torch.nn.Linear(1, 1)
with Run(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as run:
    for _ in run.epochs(int(sys.argv[1])):
        for (batch,) in run.loader(TensorDataset(torch.ones(8, 1)), global_batch=4):
            run.step(loss=run.model(batch).sum())
"""
