"""A training script with a compiled model, which says what it compiles.

Each compilation is a line of `compiled-WORKER`; that of the worker `$SLOW` goes on once there is a file `go-on`. The
rest is `unbroken`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tests.support.train import unbroken
from tests.support.train.unbroken import FOLDER, E

NAME = E["ELASTICCTL_WORKER"]


def compile_slowly(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """Compile nothing, and take as long as the test wants."""
    with (FOLDER / f"compiled-{NAME}").open("a") as file:
        file.write(f"{E['ELASTICCTL_GENERATION']}\n")
    while E.get("SLOW") == NAME and not (FOLDER / "go-on").exists():
        time.sleep(0.02)
    return graph.forward


def compiled_model() -> Any:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
    return torch.compile(model, backend=compile_slowly)


if __name__ == "__main__":
    unbroken.main(compiled_model)
