"""What every training script of the recovery benchmark has in common: model, data, and the lines that it records."""

from __future__ import annotations

import json
import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

SAMPLES, FEATURES, CLASSES, GLOBAL_BATCH = 4800, 64, 10, 48


class Lines:
    """Appends JSON lines to a file that other processes append to as well: one write() each."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, **fields: object) -> None:
        """Append one object, with the time and this process's id."""
        os.write(self._file, json.dumps({"at": time.time(), "pid": os.getpid(), **fields}).encode() + b"\n")


def build_model() -> nn.Module:
    """Return a network of about 85,000 parameters."""
    hidden = 256
    return nn.Sequential(
        nn.Linear(FEATURES, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES)
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def build_data() -> TensorDataset:
    """Return inputs, labels, and each sample's number."""
    return TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(CLASSES, (SAMPLES,)), torch.arange(SAMPLES))
