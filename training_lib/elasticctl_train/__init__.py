"""Makes the state of a PyTorch training script outlive the machine it runs on.

    from elasticctl_train import Run

`Run` is for ordinary loops; `Checkpointer`, `ElasticSampler` and `storage.open` are its parts, each usable alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticctl_store.errors import TrainError
    from elasticctl_train.checkpoint.checkpointer import Checkpointer, Label
    from elasticctl_train.data.loaders import ElasticDataLoader, ElasticSampler
    from elasticctl_train.data.plan import EpochPlan
    from elasticctl_train.policy import SavePolicy
    from elasticctl_train.run import Run

__all__ = [
    "Checkpointer",
    "ElasticDataLoader",
    "ElasticSampler",
    "EpochPlan",
    "Label",
    "Run",
    "SavePolicy",
    "TrainError",
]

_HOMES = {
    "Checkpointer": "checkpoint",
    "ElasticDataLoader": "loaders",
    "ElasticSampler": "loaders",
    "EpochPlan": "data",
    "Label": "checkpoint",
    "Run": "run",
    "SavePolicy": "policy",
    "TrainError": "errors",
}


def __getattr__(name: str) -> object:
    """Import on first use, so that the launcher's modules load without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
