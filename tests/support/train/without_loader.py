"""A training script that makes its data itself, as reinforcement learning does. Faults are those of `unbroken`.

Each of `$STEPS` steps has its own data, divided among the ranks. `$VERIFY_EVERY`: in every so many of the process's own
steps, the ranks compare a number by a collective. `$COMPILED`: torch compiles what the script calls.
"""

from __future__ import annotations

import json
import os
import time

import torch
import torch.distributed as dist
from torch import nn

from elasticctl_train import Run, SavePolicy
from tests.support.train.unbroken import FOLDER, NOW, OWN, Net, strike

E = os.environ
SAMPLES = 24


def main() -> None:
    """Train."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    ledger = (FOLDER / f"ledger-{os.getpid()}").open("a", buffering=1)
    verify_every = int(E.get("VERIFY_EVERY", "0"))
    with Run(
        str(FOLDER / "ckpt"), save=SavePolicy(every_s=10_000.0), model=model, optimizer=optimizer, scheduler=scheduler
    ) as run:
        call = torch.compile(run.model, backend="eager") if "COMPILED" in E else run.model
        while run.steps_done < int(E["STEPS"]):
            step = NOW[0] = run.steps_done
            OWN[0] += 1
            inputs = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(step))[run.rank :: run.world_size]
            loss = nn.functional.mse_loss(call(inputs), inputs.sum(1, keepdim=True))
            run.scale_loss(loss).backward()
            strike("optimizer", step)
            optimizer.step()
            scheduler.step()
            if verify_every and OWN[0] % verify_every == 0 and run.world_size > 1:
                dist.all_reduce(torch.zeros(1))
            run.step(loss=loss)
            optimizer.zero_grad()
            row = {"step": run.steps_done, "epoch": 0, "of": run.world_size, "pid": os.getpid(), "made": True}
            print(json.dumps({**row, "at": time.time()}), file=ledger)
            time.sleep(float(E.get("STEP_S", "0.01")))
    total = torch.cat([parameter.double().flatten() for parameter in model.parameters()])
    end = [run.steps_done, total.sum().item(), total.norm().item(), model.norm.running_mean.sum().item()]
    (FOLDER / f"end-{os.getpid()}").write_text(json.dumps([*end, scheduler.get_last_lr()[0]]))


if __name__ == "__main__":
    main()
