"""Keep the state of a PyTorch training script beyond the machine that it runs on.

    from elasticctl_train import Run

`Run` is for ordinary training loops. `Checkpointer`, `ElasticSampler` and `storage.open` are its parts, and can be used
on their own.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticctl_store import storage
    from elasticctl_store.errors import TrainError
    from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
    from elasticctl_train.data.loaders import ElasticDataLoader, ElasticSampler
    from elasticctl_train.data.sample_order import EpochPlan
    from elasticctl_train.run import Run
    from elasticctl_train.save_policy import SavePolicy

__all__ = [
    "Checkpointer",
    "ElasticDataLoader",
    "ElasticSampler",
    "EpochPlan",
    "Label",
    "Run",
    "SavePolicy",
    "TrainError",
    "storage",
]

_HOMES = {
    "Checkpointer": "elasticctl_train.checkpoint.checkpointer",
    "ElasticDataLoader": "elasticctl_train.data.loaders",
    "ElasticSampler": "elasticctl_train.data.loaders",
    "EpochPlan": "elasticctl_train.data.sample_order",
    "Label": "elasticctl_train.checkpoint.checkpointer",
    "Run": "elasticctl_train.run",
    "SavePolicy": "elasticctl_train.save_policy",
    "TrainError": "elasticctl_store.errors",
}


def __getattr__(name: str) -> object:
    """Import on first use, so that importing one module of this package does not import torch."""
    if name == "storage":
        return importlib.import_module("elasticctl_store.storage")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
