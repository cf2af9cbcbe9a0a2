"""A training script with sharded state (FSDP2) that stores nothing before its end, which a file `end` asks for.

Each rank notes its process in `pid-RANK-PID`.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy
from elasticctl_train.dist import join

FOLDER = Path(os.environ["LAB"])


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    world = join()
    (FOLDER / f"pid-{world.rank}-{os.getpid()}").touch()
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(1000, 8)
    url, save = str(FOLDER / "checkpoints"), SavePolicy(every_s=10_000.0)
    with Run(url, model=model, optimizer=optimizer, save=save) as run:
        for _ in run.epochs(100_000):
            for (batch,) in run.loader(TensorDataset(inputs), global_batch=8):
                loss = run.model(batch).square().mean()
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                time.sleep(0.01)
                run.step(loss=loss)
            if (FOLDER / "end").exists():
                break


if __name__ == "__main__":
    main()
