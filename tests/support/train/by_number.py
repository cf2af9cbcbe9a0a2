"""A training script that counts its steps itself: to `$STEPS`, from `run.steps_done`. Faults are those of `unbroken`.

`$OWN_BATCHES`: it makes its batches itself, by the number of the step, and its learning rates. `$STOP_AT`: at this
step, rank 0 decides that training ends, and informs the others by a collective of the step.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy
from tests.support.train.unbroken import BATCH, FOLDER, NOW, SAMPLES, Net, strike

E = os.environ


def batches_of(run: Run, dataset: TensorDataset) -> Iterator[Any]:
    """Batches without end, and the epoch that each of them is of."""
    for epoch in run.epochs(100_000):
        for batch in run.loader(dataset, global_batch=BATCH, shuffle=True):
            yield epoch, batch


def own_batch(run: Run, dataset: TensorDataset, step: int) -> Any:
    """This rank's samples of a step."""
    first = BATCH * step + run.rank
    return dataset[[number % SAMPLES for number in range(first, first + BATCH, run.world_size)]]


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: strike("optimizer", NOW[0]))
    ledger = (FOLDER / f"ledger-{os.getpid()}").open("a", buffering=1)
    policy = SavePolicy(every_s=10_000.0)
    stop_at = int(E.get("STOP_AT", "-1"))
    with Run(str(FOLDER / "ckpt"), save=policy, model=model, optimizer=optimizer) as run:
        batches = batches_of(run, dataset)
        for step in range(run.steps_done, int(E["STEPS"])):
            NOW[0] = step
            if "OWN_BATCHES" in E:
                epoch, (batch, targets) = 0, own_batch(run, dataset, step)
                optimizer.param_groups[0]["lr"] = 1e-3 / (1 + step)
            else:
                epoch, (batch, targets) = next(batches)
            loss = nn.functional.mse_loss(run.model(batch), targets)
            run.scale_loss(loss).backward()
            optimizer.step()
            optimizer.zero_grad()
            is_last = torch.tensor([int(step == stop_at and run.rank == 0)])
            if stop_at >= 0 and run.world_size > 1:
                dist.broadcast(is_last, 0)
            strike("after", step)
            time.sleep(float(E.get("STEP_S", "0.01")))
            run.step(loss=loss)
            row = {"step": step + 1, "epoch": epoch, "of": run.world_size, "pid": os.getpid(), "made": True}
            print(json.dumps({**row, "at": time.time()}), file=ledger)
            if is_last:
                break
    total = torch.cat([parameter.double().flatten() for parameter in model.parameters()])
    (FOLDER / f"end-{os.getpid()}").write_text(json.dumps([run.steps_done, total.sum().item(), total.norm().item()]))


if __name__ == "__main__":
    main()
