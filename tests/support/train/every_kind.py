"""A training script that combines what scripts do and what a lost step must not leave traces of.

Two optimizers, a scaler, a scheduler stepped ahead of each step and one after each epoch, gradients accumulated under
`no_sync`, BatchNorm, an average of the weights, an evaluation after each epoch, batches that no world size divides.
`$NORM` (BatchNorm or Identity) is a layer's name; `$HABIT` is a bad one. Faults, loops and ledger are `unbroken`'s.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy
from tests.support.train.unbroken import FOLDER, NOW, Marked, batches_of, strike

E = os.environ
HABIT = E.get("HABIT", "")
SAMPLES, BATCH, ACCUMULATE = 250, 25, 2
WIDTH = 1024
"""So wide that the average is none of the small parts, which are copied in each step."""


class Net(nn.Module):
    """A place to die in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if E.get("NORM", "BatchNorm") == "BatchNorm" else nn.Identity()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        strike("forward" if self.training else "evaluation", NOW[0])
        outputs: torch.Tensor = self.last(torch.tanh(self.norm(Marked.apply(self.first(inputs)))))
        return outputs


def main() -> None:
    """Train."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(SAMPLES))
    model = Net()
    first = torch.optim.SGD(model.first.parameters(), lr=0.01, momentum=0.9)
    second = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("first")], lr=1e-3)
    second.register_step_pre_hook(lambda *_: strike("optimizer", NOW[0]))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    ahead, after_epoch = LambdaLR(first, lambda step: 1 / (1 + 0.1 * step)), StepLR(second, 1, 0.5)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))
    parts = {"second": second, "scaler": scaler, "after_epoch": after_epoch, "average": average}
    parts.pop(HABIT, None)
    ledger = (FOLDER / f"ledger-{os.getpid()}").open("a", buffering=1)
    evaluated: list[float] = []
    url, save = str(FOLDER / "ckpt"), SavePolicy(every_steps=3)
    with Run(url, model=model, optimizer=first, scheduler=ahead, save=save, **parts) as run:
        set_up(run.world_size)
        for epoch in run.epochs(int(E["EPOCHS"])):
            seen: list[int] = []
            losses: list[float] = []
            loader = run.loader(dataset, global_batch=BATCH, shuffle=True)
            for number, (batch, targets, names) in enumerate(batches_of(loader)):
                NOW[0] = run.steps_done
                is_last = (number + 1) % ACCUMULATE == 0
                if not seen:
                    ahead.step()
                seen += names.tolist()[: run.own_samples]
                with nullcontext() if is_last else no_sync(run.model):
                    loss = nn.functional.mse_loss(run.model(batch), targets)
                    scaler.scale(run.scale_loss(loss / ACCUMULATE)).backward()
                losses.append(loss.item())
                if not is_last:
                    continue
                row = {
                    "step": run.steps_done + 1,
                    "epoch": epoch,
                    "group": int(E["ELASTICCTL_GENERATION"]),
                    "pid": os.getpid(),
                    "of": run.world_size,
                    "names": seen,
                    "loss": losses,
                }
                write_row(ledger, row, made=False)
                for optimizer in (first, second):
                    scaler.step(optimizer)
                scaler.update()
                strike("after", NOW[0])
                average.update_parameters(model)
                if HABIT == "twice" and NOW[0] > 5:
                    strike("between", NOW[0])
                    nn.functional.mse_loss(run.model(batch), targets).backward()
                    second.step()
                if HABIT == "metrics" or (HABIT == "late metrics" and NOW[0] > 5):
                    report(loss.item(), run.world_size)
                if HABIT == "groups" and NOW[0] == 3:
                    dist.barrier(dist.new_group())
                before = run.steps_done
                run.step(loss=loss)
                made = run.steps_done - before
                if made:  # a habit of its own: gradients are cleared where a step counts
                    first.zero_grad()
                    second.zero_grad(set_to_none=False)
                write_row(ledger, {**row, "jump": made}, made=made > 0)
                seen, losses = [], []
            model.eval()
            run.model.eval()
            with torch.no_grad():
                evaluated.append(run.model(inputs).square().mean().item())
            run.model.train()
            after_epoch.step()
    state = [*model.state_dict().values(), *average.parameters()]  # its buffers are a rank's own
    sums = [[part.double().sum().item(), part.double().norm().item()] for part in state]
    settings = [scaler.state_dict(), first.param_groups[0]["lr"], second.param_groups[0]["lr"]]
    (FOLDER / f"end-{os.getpid()}").write_text(json.dumps([run.steps_done, sums, settings, evaluated[-1]]))


def set_up(world_size: int) -> None:
    """Find out about the other ranks, as libraries do, in a group that is needed for nothing else."""
    if HABIT == "short-lived groups" and world_size > 1:
        group = dist.new_group()
        dist.barrier(group)  # all are connected: one that destroys it sooner ends the others' attempt
        dist.destroy_process_group(group)


def report(loss: float, world_size: int) -> None:
    """Average a loss over the ranks, in every way that scripts do."""
    total = torch.tensor([loss])
    work = dist.all_reduce(total, async_op=True)
    each, all_of = [torch.zeros(1) for _ in range(world_size)], torch.zeros(world_size)
    dist.all_gather(each, torch.tensor([loss]))
    dist.all_gather_into_tensor(all_of, torch.tensor([loss]))
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"loss": loss})
    from_first: list[Any] = [loss]
    dist.broadcast_object_list(from_first)
    work.wait()
    sums = [sum(float(part) for part in each), float(all_of.sum()), sum(part["loss"] for part in objects)]
    assert all(math.isfinite(value) for value in [float(total), *sums, *from_first])
    assert all(math.isclose(value, sums[0], rel_tol=1e-5) for value in sums)


def no_sync(model: Any) -> Any:
    """As DistributedDataParallel's; one rank has none."""
    return model.no_sync() if hasattr(model, "no_sync") else nullcontext()


def write_row(ledger: TextIO, row: Mapping[str, Any], *, made: bool) -> None:
    """Write a line."""
    print(json.dumps({**row, "made": made, "at": time.time()}), file=ledger)


if __name__ == "__main__":
    main()
