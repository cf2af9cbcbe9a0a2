"""Training scripts that people might submit. No optimizer: its first use imports for as long as torch itself."""

from __future__ import annotations

TRAIN = """\
import sys
import torch
from elasticctl_train import Run
from torch.utils.data import TensorDataset

model = torch.nn.Linear(1, 1)
with Run(model=model) as run:
    for _ in run.epochs(int(sys.argv[1])):
        for (batch,) in run.loader(TensorDataset(torch.ones(8, 1)), global_batch=4):
            run.step(loss=run.model(batch).sum())
"""
