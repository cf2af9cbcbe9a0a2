"""What jobs with a deadline train: a step takes a given time on the largest group, and longer on smaller ones."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy

GLOBAL_BATCH = 12


def main() -> None:
    """Make that many steps on noise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--most", type=int, required=True, help="the largest group")
    parser.add_argument("--step-s", type=float, required=True, help="how long a step of it takes")
    parser.add_argument("--exponent", type=float, required=True, help="of the speed, in the number of workers")
    args = parser.parse_args()
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(args.steps * GLOBAL_BATCH, 8), torch.randint(0, 2, (args.steps * GLOBAL_BATCH,)))
    net = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    begun = time.monotonic()
    with Run(model=net, optimizer=optimizer, save=SavePolicy(every_s=2.0)) as run:
        for _ in run.epochs(1):
            for inputs, labels in run.loader(data, global_batch=GLOBAL_BATCH, shuffle=True):
                loss = nn.functional.cross_entropy(run.model(inputs), labels)
                optimizer.zero_grad()
                run.scale_loss(loss).backward()
                optimizer.step()
                workers = run.world_size
                step_s = args.step_s * (args.most / workers) ** args.exponent
                time.sleep(max(0.0, begun + step_s - time.monotonic()))
                begun = time.monotonic()
                run.step(loss=loss)


if __name__ == "__main__":
    main()
