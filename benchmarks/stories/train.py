"""What jobs of the stories train: ten steps per second on noise, with a commit every second."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy

STEP_S = 0.1
ENDLESS = 1_000_000


def main() -> None:
    """Train until somebody ends the process."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(480, 16), torch.randint(0, 4, (480,)))
    net = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Run(model=net, optimizer=optimizer, save=SavePolicy(every_s=1.0)) as run:
        for _ in run.epochs(ENDLESS):
            for inputs, labels in run.loader(data, global_batch=48, shuffle=True):
                loss = nn.functional.cross_entropy(run.model(inputs), labels)
                optimizer.zero_grad()
                run.scale_loss(loss).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                time.sleep(STEP_S)
                run.step(loss=loss)


if __name__ == "__main__":
    main()
