"""What jobs train whose subject is not training: each sample takes its time, so that more workers are faster."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy

SAMPLES, GLOBAL_BATCH = 640, 64


def main() -> None:
    """Train a small model on noise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--sample-s", type=float, required=True, help="seconds that a rank takes for a sample")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(SAMPLES, 8), torch.randint(0, 2, (SAMPLES,)))
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    with Run(model=net, save=SavePolicy(every_s=1.0)) as run:
        for epoch in run.epochs(args.epochs):
            for inputs, labels in run.loader(data, global_batch=GLOBAL_BATCH, shuffle=True):
                loss = nn.functional.cross_entropy(run.model(inputs), labels)
                net.zero_grad()
                run.scale_loss(loss).backward()
                with torch.no_grad():  # no optimizer of torch's: its first use imports for as long as torch itself
                    for parameter in net.parameters():
                        parameter -= 0.1 * parameter.grad
                time.sleep(len(inputs) * args.sample_s)
                run.step(loss=loss)
            print(f"epoch {epoch}: step {run.steps_done}", flush=True)


if __name__ == "__main__":
    main()
