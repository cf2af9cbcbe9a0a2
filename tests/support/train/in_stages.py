"""A training script that makes several runs, one after the other, as for the folds of a cross-validation."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy

FOLDER = Path(os.environ["LAB"])
STAGES, STEPS = 3, 10


def main() -> None:
    """Train; each stage waits in its fifth step until the file `go-on-STAGE` is there."""
    dataset = TensorDataset(torch.rand(4 * STEPS))
    for stage in range(STAGES):
        torch.manual_seed(stage)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        stays = {"optimizer": optimizer} if os.environ.get("STAYS", "1") == "1" else {}
        url = str(FOLDER / f"ckpt-{stage}")
        with Run(url, model=model, save=SavePolicy(every_steps=2), **stays) as run:
            for _ in run.epochs(1):
                for (batch,) in run.loader(dataset, global_batch=4):
                    loss = run.model(batch[:, None]).square().mean()
                    optimizer.zero_grad()
                    run.scale_loss(loss).backward()
                    optimizer.step()
                    run.step(loss=loss)
                    (FOLDER / f"at-{stage}-{run.steps_done}-{run.world_size}").touch()
                    while run.steps_done == STEPS // 2 and not (FOLDER / f"go-on-{stage}").exists():
                        time.sleep(0.02)
            (FOLDER / f"end-{stage}-{run.rank}-{run.steps_done}").touch()


if __name__ == "__main__":
    main()
