"""A training script that writes down what it trains on, and kills itself at chosen points.

`$FAULTS` is a list of `POINT:STEP:WORKER`, each heeded once; `+N` is the process's own Nth step. Each batch is a line
in `ledger-PID`, before its step is made and after it. `$SCRIPT_SLOW_S`: how long the script takes to get ready.
Training ends before the epoch N if there is a file `stop-before-N`. `$STEP_EACH`: `run.step` is called for each of
the batches that `$ACCUMULATE` says. `$MEET`: with more ranks than that, each epoch begins with a barrier.
`$SCHEDULED`: the scheduler is stepped in so many of the process's own first steps. `$LOOP`: how batches are taken from
the loader (see `LOOPS`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

from elasticctl_train import Run, SavePolicy

E = os.environ
FOLDER = Path(E["LAB"])
SAMPLES, BATCH = 240, 24
FAULTS = [each.split(":") for each in E.get("FAULTS", "").split()]


def strike(point: str, step: int) -> None:
    """Die, if that is to happen here."""
    for fault in FAULTS:
        if fault in ([point, when, E["ELASTICCTL_WORKER"]] for when in (str(step), f"+{OWN[0]}")):
            try:
                (FOLDER / f"struck-{'-'.join(fault)}").touch(exist_ok=False)
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


class Average:
    """An average of the weights, as scripts keep one: updated after each step, saved with the rest."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.values = [parameter.detach().clone() for parameter in model.parameters()]

    def update(self) -> None:
        with torch.no_grad():
            for value, parameter in zip(self.values, self.model.parameters(), strict=True):
                value.lerp_(parameter, 0.1)

    def state_dict(self) -> dict[str, list[torch.Tensor]]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[torch.Tensor]]) -> None:
        self.values = [value.clone() for value in state["values"]]


class Marked(torch.autograd.Function):
    """The identity, whose backward pass may be the place to die."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        strike("backward", NOW[0])
        return gradient


def by_hand(loader: Any) -> Iterator[Any]:
    """Take as many batches as the loader says, one by one."""
    batches = iter(loader)
    for _ in range(len(loader)):
        yield next(batches)


LOOPS: dict[str, Callable[[Any], Iterable[Any]]] = {
    "to the end": lambda loader: loader,
    "one too many": lambda loader: (batch for batch, _ in zip(loader, range(len(loader)), strict=False)),
    "by hand": by_hand,
}
batches_of = LOOPS[E.get("LOOP", "to the end")]

NOW = [0]
OWN = [0]


class Net(nn.Module):
    """Has buffers that each pass changes, and draws random numbers if `$DROPOUT` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(float(E.get("DROPOUT", "0")))
        self.last = nn.Linear(64, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        strike("forward", NOW[0])
        hidden: torch.Tensor = Marked.apply(self.first(inputs))
        outputs: torch.Tensor = self.last(self.drop(torch.relu(self.norm(hidden))))
        return outputs


def main(make_model: Callable[[], nn.Module] = Net) -> None:
    """Train."""
    time.sleep(float(E.get("SCRIPT_SLOW_S", "0")))
    torch.manual_seed(0)
    inputs = torch.randn(SAMPLES, 8)
    dataset = TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(SAMPLES))
    model = make_model().to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(lambda *_: strike("optimizer", NOW[0]))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    average = Average(model)
    ledger = (FOLDER / f"ledger-{os.getpid()}").open("a", buffering=1)
    every = int(E["SAVE_EVERY"]) if "SAVE_EVERY" in E else None
    policy = SavePolicy(every_s=10_000.0) if every is None else SavePolicy(every_steps=every)
    accumulate = int(E.get("ACCUMULATE", "1"))
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "average": average}
    with Run(str(FOLDER / "ckpt"), save=policy, **state) as run:
        for epoch in run.epochs(int(E["EPOCHS"])):
            if (FOLDER / f"stop-before-{epoch}").exists():
                break
            if run.world_size > int(E.get("MEET", run.world_size)):
                dist.barrier()
            seen: list[int] = []
            loader = run.loader(dataset, global_batch=BATCH, shuffle=True)
            for number, (batch, targets, names) in enumerate(batches_of(loader)):
                NOW[0] = run.steps_done
                OWN[0] += 1
                seen += names.tolist()[: run.own_samples]
                batch, targets = batch.to(run.device), targets.to(run.device)
                loss = nn.functional.mse_loss(run.model(batch), targets)
                is_last = (number + 1) % accumulate == 0 or number + 1 == len(loader)
                row = {
                    "step": run.steps_done + 1,
                    "epoch": epoch,
                    "group": int(E["ELASTICCTL_GENERATION"]),
                    "pid": os.getpid(),
                    "worker": E["ELASTICCTL_WORKER"],
                    "of": run.world_size,
                    "names": seen,
                    "loss": loss.item(),
                }
                if is_last:  # a rank that is killed below may have taken part in the step
                    print(json.dumps({**row, "made": False, "at": time.time()}), file=ledger)
                run.scale_loss(loss / accumulate).backward()
                if not is_last:
                    if "STEP_EACH" in E:
                        run.step(loss=loss)
                    continue
                seen = []
                optimizer.step()
                optimizer.zero_grad()
                strike("after", NOW[0])
                if OWN[0] <= float(E.get("SCHEDULED", "inf")):
                    scheduler.step()
                average.update()
                time.sleep(float(E.get("STEP_S", "0.01")))
                before = run.steps_done
                run.step(loss=loss)
                made = run.steps_done - before
                print(json.dumps({**row, "made": made > 0, "jump": made, "at": time.time()}), file=ledger)
                strike("step", NOW[0])
            strike("evaluation", run.steps_done)
        parts = [*model.parameters(), *average.values]  # buffers are a rank's own
        total = torch.cat([part.double().flatten() for part in parts])
        (FOLDER / f"end-{os.getpid()}").write_text(
            json.dumps([run.steps_done, total.sum().item(), total.norm().item()])
        )


if __name__ == "__main__":
    main()
