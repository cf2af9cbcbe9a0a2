"""What jobs of these tests train: small, and quick to import, for that is most of what they cost.

Each rank, and each spare, that imported scikit-learn for the example's digits would take 7 s of a processor, not 4.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy

STARTS = Path("/state/starts")
"""Where each start of the script adds a line, its pod's uid; /state is the job's folder."""
SAMPLES, GLOBAL_BATCH, FEATURES, CLASSES = 1438, 64, 64, 10


def main() -> None:
    """Train a network of two layers on noise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--step-delay-s", type=float, required=True, help="sleep in each step")
    args = parser.parse_args()
    if uid := os.environ.get("ELASTICCTL_POD_UID"):  # else it is no worker
        with STARTS.open("a") as starts:
            starts.write(f"{uid}\n")

    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, FEATURES), torch.randint(0, CLASSES, (SAMPLES,)))
    net = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, CLASSES))
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    with Run(model=net, optimizer=optimizer, scheduler=scheduler, save=SavePolicy(every_s=1.0)) as run:
        for _ in run.epochs(args.epochs):
            for inputs, labels in run.loader(data, global_batch=GLOBAL_BATCH, shuffle=True):
                loss = nn.functional.cross_entropy(run.model(inputs), labels)
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                time.sleep(args.step_delay_s)
                run.step(loss=loss)
            scheduler.step()


if __name__ == "__main__":
    main()
