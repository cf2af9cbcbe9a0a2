"""A training script with a compiled model, which says what it compiles.

Each compilation is a line of `compiled-WORKER`; that of the worker `$SLOW` goes on once there is a file `go-on`. The
rest is as in `unbroken`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy

E = os.environ
FOLDER, NAME = Path(E["LAB"]), E["ELASTICCTL_WORKER"]


def compile_slowly(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    """Compile nothing, and take as long as the test wants."""
    with (FOLDER / f"compiled-{NAME}").open("a") as file:
        file.write(f"{E['ELASTICCTL_GENERATION']}\n")
    while E.get("SLOW") == NAME and not (FOLDER / "go-on").exists():
        time.sleep(0.02)
    return graph.forward


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    inputs = torch.randn(240, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(240))
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled: Any = torch.compile(model, backend=compile_slowly)
    policy = SavePolicy(every_s=10_000.0)
    with (
        Run(str(FOLDER / "ckpt"), save=policy, model=compiled, optimizer=optimizer) as run,
        (FOLDER / f"ledger-{os.getpid()}").open("a", buffering=1) as ledger,
    ):
        for epoch in run.epochs(100_000):
            if (FOLDER / f"stop-before-{epoch}").exists():
                break
            for batch, targets, names in run.loader(dataset, global_batch=24, shuffle=True):
                loss = nn.functional.mse_loss(run.model(batch), targets)
                row = {
                    "step": run.steps_done + 1,
                    "epoch": epoch,
                    "group": int(E["ELASTICCTL_GENERATION"]),
                    "pid": os.getpid(),
                    "worker": NAME,
                    "of": run.world_size,
                    "names": names.tolist()[: run.own_samples],
                    "loss": loss.item(),
                }
                print(json.dumps({**row, "made": False, "at": time.time()}), file=ledger)
                run.scale_loss(loss).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(0.02)
                before = run.steps_done
                run.step(loss=loss)
                made = run.steps_done - before
                print(json.dumps({**row, "made": made > 0, "jump": made, "at": time.time()}), file=ledger)
        parts = torch.cat([part.double().flatten() for part in model.parameters()])
        (FOLDER / f"end-{os.getpid()}").write_text(json.dumps([run.steps_done, parts.sum().item()]))


if __name__ == "__main__":
    main()
